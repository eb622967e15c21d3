"""VHL's Gaussian virtual set (baselines.md section 8)."""

from __future__ import annotations

import pytest
import torch

from flcore.math.generators.images import gaussian_virtual_images


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28)])
def test_virtual_images(shape: tuple[int, int, int]) -> None:
    """uint8, class-major, 0 and 255 reached once in the whole set; classes differ more than their samples do.

    Before scaling the mean maps have variance 1 and samples 0.25 around them.
    """
    images = gaussian_virtual_images(5, 40, shape, stream())
    assert images.shape == (200, *shape) and images.dtype == torch.uint8
    assert (images.min(), images.max()) == (0, 255)
    by_class = images.view(5, 40, -1).double()
    within, between = by_class.var(dim=1).mean(), by_class.mean(dim=1).var(dim=0).mean()
    # At 8×8 nothing is interpolated: within/between is 0.25 by construction (5 classes: wide), elsewhere similar.
    assert 0.1 < within / between < 0.6


def test_virtual_images_by_the_formula() -> None:
    """8×8 from 8×8 maps: bilinear enlargement is the identity, so that the set is its maps, scaled and rounded."""
    draws = stream(3)
    means = torch.randn(2, 1, 1, 8, 8, generator=draws)
    maps = (means + 0.5 * torch.randn(2, 3, 1, 8, 8, generator=draws)).reshape(6, 1, 8, 8)
    expected = (maps - maps.min()) / (maps.max() - maps.min()) * 255
    found = gaussian_virtual_images(2, 3, (1, 8, 8), stream(3))
    assert (found.float() - expected).abs().max() <= 0.5 + 1e-4


def test_virtual_sets_are_byte_identical_for_a_seed() -> None:
    """baselines.md 8 (b); from the stream that is handed in alone."""
    before = torch.random.get_rng_state()
    first, second, other = (gaussian_virtual_images(3, 4, (3, 32, 32), stream(seed)) for seed in (7, 7, 8))
    assert first.numpy().tobytes() == second.numpy().tobytes()
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())
