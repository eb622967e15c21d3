"""Augmentation: draws in range, the transform against slow and obvious versions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from flcore.data.images import Policy, augment, augmentation_draws


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(batch: int, policy: Policy, seed: int = 0) -> dict[str, torch.Tensor]:
    numbers = torch.randint(0, 2**32, (batch, 4), generator=torch.Generator().manual_seed(seed))
    return augmentation_draws(numbers, policy)


def images(batch: int = 6, height: int = 10, width: int = 12) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=generator(1))


def test_draws_are_in_range_and_reach_their_ends() -> None:
    """The ends are those of the integers: 0 and 2^32 - 1."""
    draws = drawn(4000, "crop_flip_rot")
    assert set(draws) == {"shift", "flip", "angle"}
    assert draws["shift"].shape == (4000, 2) and torch.unique(draws["shift"]).tolist() == list(range(9))
    assert draws["flip"].dtype == torch.bool and 0.45 < draws["flip"].float().mean() < 0.55
    assert -15 <= draws["angle"].min() < -14.5 and 14.5 < draws["angle"].max() <= 15
    assert drawn(3, "none") == {}
    ends = augmentation_draws(torch.tensor([[0] * 4, [2**32 - 1] * 4]), "crop_flip_rot")
    assert ends["shift"].tolist() == [[0, 0], [8, 8]] and ends["flip"].tolist() == [True, False]
    assert ends["angle"].tolist() == [-15, pytest.approx(15)]


def still(batch: int) -> dict[str, torch.Tensor]:
    """Draws that change nothing: the middle crop, no flip, no angle."""
    return {
        "shift": torch.full((batch, 2), 4),
        "flip": torch.zeros(batch, dtype=torch.bool),
        "angle": torch.zeros(batch),
    }


def rotated(batch: torch.Tensor, degrees: float) -> torch.Tensor:
    return augment(batch, "crop_flip_rot", still(len(batch)) | {"angle": torch.full((len(batch),), degrees)})


def test_crop_and_flip_equal_padding_slicing_and_flipping_one_by_one() -> None:
    batch = images()
    draws = drawn(6, "crop_flip")
    fill = [1.0, -2.0, 3.0]
    expected = []
    for image, (top, left), flip in zip(batch, draws["shift"].tolist(), draws["flip"], strict=True):
        channels = zip(image, fill, strict=True)
        padded = torch.stack([functional.pad(channel, (4, 4, 4, 4), value=value) for channel, value in channels])
        crop = padded[:, top : top + 10, left : left + 12]
        expected.append(crop.flip(-1) if flip else crop)
    torch.testing.assert_close(augment(batch, "crop_flip", draws, torch.tensor(fill)), torch.stack(expected))


def test_a_mirrored_border_has_the_pixels_next_to_the_edge() -> None:
    """Rows 0 to 9 of ten: above row 0 lie 1, 2, 3, 4; moved up by all four, the crop begins with 4, 3, 2, 1, 0."""
    rows = torch.arange(10.0)[None, None, :, None].expand(1, 1, 10, 12)
    up = still(1) | {"shift": torch.tensor([[0, 4]])}
    assert augment(rows, "reflect_crop_flip", up, 7.0)[0, 0, :, 5].tolist() == [4, 3, 2, 1, 0, 1, 2, 3, 4, 5]
    draws = drawn(6, "reflect_crop_flip")
    assert set(draws) == {"shift", "flip"}
    # Where the crop lies within the image, the border does not matter.
    middle = still(6) | {"flip": draws["flip"]}
    assert torch.equal(augment(images(), "reflect_crop_flip", middle), augment(images(), "crop_flip", middle))


def test_draws_that_change_nothing() -> None:
    assert torch.equal(augment(images(), "crop_flip", still(6)), images())
    torch.testing.assert_close(augment(images(), "crop_flip_rot", still(6)), images())


def test_rotation_by_a_right_angle_is_exact_on_squares() -> None:
    batch = images(height=9, width=9)
    torch.testing.assert_close(rotated(batch, 90), torch.rot90(batch, 1, (2, 3)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", ["none", "crop_flip", "reflect_crop_flip", "crop_flip_rot"])
def test_augmentation_is_a_function_of_images_and_draws(policy: Policy) -> None:
    batch, state = images(), torch.get_rng_state()
    one, two, other = (augment(batch, policy, drawn(6, policy, seed)) for seed in (5, 5, 6))
    assert torch.equal(one, two) and one.shape == batch.shape and one.dtype == torch.float32
    assert torch.equal(batch, images()) and torch.equal(state, torch.get_rng_state())
    assert torch.equal(one, other) == (policy == "none")
