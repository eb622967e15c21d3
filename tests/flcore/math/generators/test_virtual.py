"""VHL's virtual sets: Gaussian, and of an untrained StyleGAN2 (baselines.md section 8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flcore.math.generators.images import gaussian_virtual_images
from flcore.math.generators.style import WIDTH, StyleNetwork, modulated, style_virtual_images

BOTH = pytest.mark.parametrize("make", [gaussian_virtual_images, style_virtual_images])


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@BOTH
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28)])
def test_virtual_images(make: Callable[..., Tensor], shape: tuple[int, int, int]) -> None:
    """uint8, class-major, 0 and 255 reached once in the whole set; classes differ more than their samples do.

    Before scaling, mean maps and mean latents have variance 1 and samples 0.25 around them.
    """
    images = make(5, 40, shape, stream())
    assert images.shape == (200, *shape) and images.dtype == torch.uint8
    assert (images.min(), images.max()) == (0, 255)
    by_class = images.view(5, 40, -1).double()
    within, between = by_class.var(dim=1).mean(), by_class.mean(dim=1).var(dim=0).mean()
    # At 8×8 no map is interpolated: within/between is 0.25 by construction (5 classes: wide), elsewhere similar.
    assert 0.1 < within / between < (0.6 if make is gaussian_virtual_images else 1)


def test_virtual_images_by_the_formula() -> None:
    """8×8 from 8×8 maps: bilinear enlargement is the identity, so that the set is its maps, scaled and rounded."""
    draws = stream(3)
    means = torch.randn(2, 1, 1, 8, 8, generator=draws)
    maps = (means + 0.5 * torch.randn(2, 3, 1, 8, 8, generator=draws)).reshape(6, 1, 8, 8)
    expected = (maps - maps.min()) / (maps.max() - maps.min()) * 255
    found = gaussian_virtual_images(2, 3, (1, 8, 8), stream(3))
    assert (found.float() - expected).abs().max() <= 0.5 + 1e-4


def test_a_style_scales_the_inputs_of_a_convolution() -> None:
    """Maps 1 and 2. A·style is (0, 2), which scales the inputs by (1, 3): weights (3, 4) become (3, 12).

    The output is 3·1 + 12·2 = 27, demodulated 27/√(3² + 12²) = 27/√153.
    """
    maps, weight = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1), torch.tensor([3.0, 4.0]).reshape(1, 2, 1, 1)
    style, modulation = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    plain, divided = (modulated(maps, style, weight, modulation, demodulate=one).item() for one in (False, True))
    assert (plain, divided) == (27, pytest.approx(27 / 153**0.5))


def test_a_modulated_convolution_is_one_with_other_weights() -> None:
    """As StyleGAN2 writes it: weights of its own for every image."""
    draws = stream(1)
    maps, style = torch.randn(3, 4, 5, 5, generator=draws), torch.randn(3, 6, generator=draws)
    weight, modulation = torch.randn(2, 4, 3, 3, generator=draws), torch.randn(4, 6, generator=draws)
    found = modulated(maps, style, weight, modulation, demodulate=True)
    for image, one, own in zip(maps, style, found, strict=True):
        scaled = weight * (1 + modulation @ one).reshape(1, 4, 1, 1)
        scaled = scaled / scaled.square().sum(dim=(1, 2, 3), keepdim=True).sqrt()
        assert torch.allclose(functional.conv2d(image[None], scaled, padding=1)[0], own, atol=1e-5)


@pytest.mark.parametrize(("size", "sizes"), [(8, [4, 8]), (28, [4, 7, 14, 28]), (32, [4, 8, 16, 32]), (4, [4])])
def test_a_style_network_doubles_up_to_the_image(size: int, sizes: list[int]) -> None:
    network = StyleNetwork.drawn((3, size, size), stream())
    assert [height for height, _ in network.sizes] == sizes
    assert network(torch.zeros(2, WIDTH)).shape == (2, 3, size, size)


@BOTH
def test_virtual_sets_are_byte_identical_for_a_seed(make: Callable[..., Tensor]) -> None:
    """baselines.md 8 (b); from the stream that is handed in alone."""
    before = torch.random.get_rng_state()
    first, second, other = (make(3, 4, (3, 32, 32), stream(seed)) for seed in (7, 7, 8))
    assert first.numpy().tobytes() == second.numpy().tobytes()
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())
