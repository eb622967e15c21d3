"""Features of patches: four pixels by hand, contrast normalisation against patches one by one, parameter counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flcore.models import build_model
from flcore.models.patch_dictionary import PatchDictionary

IMAGE = torch.tensor([[0.0, 1.0], [2.0, -1.0]]).reshape(1, 1, 2, 2)


def model(shape: tuple[int, int, int], **settings: Any) -> Any:
    return build_model(PatchDictionary(**settings), shape, 10).eval()


def single(**settings: Any) -> Any:
    """One filter of one pixel, weight 2 and bias -1: products -1, 1, 3 and -3 on the image above."""
    found = model((1, 2, 2), atoms=1, patch=1, grid=1, **{"threshold": 0.5, **settings})
    with torch.no_grad():
        found.encoder.dictionary.weight.fill_(2)
        found.encoder.dictionary.bias.fill_(-1)
    return found


def test_parameters() -> None:
    """111·100 filters and as many biases; 111·9 features: 11,211 + 9,990 + 10."""
    found = model((1, 28, 28))
    assert sum(value.numel() for value in found.parameters()) == 11_100 + 111 + 9_990 + 10 == 21_211
    assert found.feature_dim == 999
    both = model((3, 32, 32), atoms=800, patch=6, grid=2, signs="both", contrast=0.02, mirror=True)
    assert both.feature_dim == 6400
    assert sum(value.numel() for value in both.parameters()) == 800 * (108 + 1) + 10 * 6401


def test_features_by_hand() -> None:
    """Sizes above ½: ½, ½, 2½, 2½, mean 1.5. Both signs: (0, ½, 2½, 0) and (½, 0, 0, 2½), each with mean ¾."""
    assert single(root=False).features(IMAGE).tolist() == [[1.5]]
    assert single(root=False, signs="both").features(IMAGE).tolist() == [[0.75, 0.75]]
    assert single().features(IMAGE).item() == pytest.approx(math.sqrt(1.5), abs=1e-6)
    assert single(root=False, threshold=1.0).features(IMAGE).tolist() == [[1.0]]


def test_cells_by_hand() -> None:
    """A grid of two cells in each direction has one position each."""
    found = model((1, 2, 2), atoms=1, patch=1, grid=2, root=False, threshold=0.0)
    with torch.no_grad():
        found.encoder.dictionary.weight.fill_(1)
        found.encoder.dictionary.bias.zero_()
    assert found.features(IMAGE).tolist() == [[0, 1, 2, 1]]


def test_a_mirrored_image_has_the_same_features() -> None:
    found = model((3, 12, 12), atoms=5, patch=4, grid=2, mirror=True)
    images = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.features(images), found.features(images.flip(-1)))
    alone = model((3, 12, 12), atoms=5, patch=4, grid=2)
    expected = (alone.features(images) + alone.features(images.flip(-1))) / 2
    torch.testing.assert_close(found.features(images), expected)


@pytest.mark.parametrize("contrast", [None, 0.1])
def test_products_are_those_of_the_patches(contrast: float | None) -> None:
    """The filters as rows times the patches as columns, which are normalised one by one."""
    found = model((3, 9, 7), atoms=4, patch=3, grid=2, contrast=contrast)
    images = torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(1))
    patches = found.encoder.patches(images, 1)
    assert patches.shape == (2, 27, 7 * 5)
    dictionary = found.encoder.dictionary
    expected = dictionary.weight.flatten(1) @ patches + dictionary.bias.unsqueeze(1)
    torch.testing.assert_close(found.encoder.products(images).flatten(2), expected, rtol=1e-4, atol=1e-5)
    raw = images[0, :, :3, :3].flatten()
    if contrast is not None:
        raw = (raw - raw.mean()) / (raw.var(unbiased=False) + contrast).sqrt()
    torch.testing.assert_close(patches[0, :, 0], raw, rtol=1e-4, atol=1e-5)
    every_second = patches.unflatten(2, (7, 5))[:, :, ::2, ::2].flatten(2)
    torch.testing.assert_close(found.encoder.patches(images, 2), every_second, rtol=1e-5, atol=1e-6)


def test_any_method_may_train_it() -> None:
    """Where nothing passes a threshold gradients are 0, not infinite."""
    found = model((1, 8, 8), atoms=4, patch=3, grid=2, threshold=1e3)
    found.classify(found.features(torch.ones(2, 1, 8, 8))).sum().backward()
    for name, value in found.named_parameters():
        assert torch.isfinite(value.grad).all(), name


@pytest.mark.parametrize(("shape", "positions"), [((1, 8, 8), 0), ((1, 11, 28), 2)])
def test_an_image_that_is_too_small_is_refused(shape: tuple[int, int, int], positions: int) -> None:
    with pytest.raises(ValueError, match=f"have {positions} positions of a patch in a row; lower patch"):
        model(shape, patch=10)


def test_a_patch_is_a_share_of_the_image() -> None:
    """10/28 of the shorter side: 10 of 28, 11 of 32 (11.4), 3 of 8 (2.9)."""
    for shape, size in (((1, 28, 28), 10), ((3, 32, 32), 11), ((1, 8, 20), 3)):
        assert model(shape, atoms=2).encoder.dictionary.kernel_size == (size, size)
