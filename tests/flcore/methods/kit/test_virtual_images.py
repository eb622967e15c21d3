"""The client loss on virtual images (fedpg.md section 4, baselines.md section 8), by hand on identity features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.data.images import normalise
from flcore.methods.kit.virtual_images import VirtualLoss, as_input, cycled_positions, pixel_map, virtual_context
from flcore.methods.types import Batch

# Fact 5: these three with labels 0, 0, 1 have supervised contrast 0.392099 at T = T0 = 0.5 and 0.971059 at 0.07.
POINTS = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
LABELS = [0, 0, 1]


class Setting:
    """What normalises: nothing, unless other values are given."""

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        self.pixel_mean, self.pixel_std = (mean,), (std,)


class Identity:
    """Features are the pixels; the head gives the logits (x, 0)."""

    def features(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        return torch.stack([features[:, 0], torch.zeros(len(features))], dim=1)

    def for_extra_inputs(self) -> Identity:
        return self


def loss_of(**changes: Any) -> VirtualLoss:
    values = {
        "cross_entropy": 1.0,
        "contrast": 1.0,
        "alone": 0.0,
        "temperature": 0.5,
        "base_temperature": None,
        "detach": True,
        "joint": False,
    }
    return VirtualLoss(**(values | changes))  # type: ignore[arg-type]


def images_of(points: list[list[float]]) -> Tensor:
    return torch.tensor(points).reshape(len(points), 1, 1, -1)


def terms(loss: VirtualLoss, real: Tensor, labels: list[int], made: Tensor, made_labels: list[int], **kept: Any) -> Any:
    inputs = virtual_context(Setting(), made, torch.tensor(made_labels), kept.pop("outputs", None))  # type: ignore[arg-type]
    batch = Batch(real, torch.tensor(labels), kept.pop("weight", None), {"virtual": torch.arange(len(made))})
    return loss.terms(Identity(), batch, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "batch", "steps"), [(10, 4, 9), (6, 64, 3), (5, 5, 2), (7, 3, 0), (7, 3, 1)])
def test_batches_are_permutations_behind_one_another(size: int, batch: int, steps: int) -> None:
    width = min(batch, size)
    rows = cycled_positions(size, batch, steps, torch.Generator().manual_seed(0))
    assert rows.shape == (steps, width)
    assert rows.dtype == torch.int64
    passes = rows.flatten().split(size)
    for one in passes:
        assert len(set(one.tolist())) == len(one)
        assert set(one.tolist()) <= set(range(size))
    assert all(len(one) == size for one in passes[:-1])
    if len(passes) > 2:
        assert passes[0].tolist() != passes[1].tolist()  # 1 in 10! or 6! by chance


def test_pixels_of_either_type_become_what_real_images_are() -> None:
    """uint8 to the bit like the engine; floating p as 255·p would."""
    pixels = torch.randint(256, (4, 1, 3, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    real = normalise(pixels, (0.3,), (0.4,))
    setting: Any = Setting(0.3, 0.4)
    assert torch.equal(as_input(pixels, *pixel_map(setting, torch.uint8, "cpu")), real)
    assert torch.allclose(as_input(pixels / 255, *pixel_map(setting, torch.float32, "cpu")), real, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_the_authors_mismatch(dtype: torch.dtype) -> None:
    """Mean 0, std 1 leave a real pixel on 0 to 1, and a virtual 0.6 is the generator's 2·0.6 - 1 = 0.2.

    With mean 0.3 and std 0.5 that is (0.2 - 0.3)/0.5 = -0.2.
    """
    pixels = torch.full((1, 1, 1, 1), 0.6 if dtype == torch.float32 else 153, dtype=dtype)  # 153/255 = 0.6
    plain: Any = Setting()
    other: Any = Setting(0.3, 0.5)
    assert as_input(pixels, *pixel_map(plain, dtype, "cpu", "authors")).item() == pytest.approx(0.2, abs=1e-6)
    assert as_input(pixels, *pixel_map(other, dtype, "cpu", "authors")).item() == pytest.approx(-0.2, abs=1e-6)


@pytest.mark.parametrize(
    ("temperature", "base", "expected"),
    [(0.5, None, 0.392099), (0.5, 0.5, 0.392099), (0.07, 0.07, 0.971059), (0.5, 0.07, 2.800709)],
)
@pytest.mark.parametrize("real", [1, 2])
def test_contrast_over_both_kinds(temperature: float, base: float | None, expected: float, real: int) -> None:
    """Wherever the line between real and virtual is drawn; λ = 3 multiplies."""
    loss = loss_of(temperature=temperature, base_temperature=base, contrast=3.0, cross_entropy=0.0)
    found = terms(loss, images_of(POINTS[:real]), LABELS[:real], images_of(POINTS[real:]), LABELS[real:])
    assert found["contrast"].item() == pytest.approx(3 * expected, abs=3e-6)
    assert set(found) == {"cross_entropy", "contrast"}


def test_the_share_of_virtual_images_alone() -> None:
    """The three points as virtual ones alone give 0.392099; a tenth of it is added whatever the real ones are."""
    real, made = images_of([[1.0, 1.0], [0.2, -1.0]]), images_of(POINTS)
    with_it, without = (
        terms(loss_of(alone=alone), real, [0, 1], made, LABELS)["contrast"].item() for alone in (0.1, 0.0)
    )
    assert with_it - without == pytest.approx(0.0392099, abs=1e-6)


def test_the_sum_of_the_specification() -> None:
    """The terms behind fact 7 on real numbers.

    The head gives (x, 0). With one real (1, 0) of class 0 the cross-entropies are ln(1 + e^-1) = 0.313262; of the
    virtual (0.6, 0.8) class 0 ln(1 + e^-0.6) = 0.437488, of (0, 1) class 1 ln 2 = 0.693147, mean 0.565318. Weighted by
    w = 0.5: 0.282659. Total with T = 0.07: 0.313262 + 0.282659 + 0.971059 = 1.566980.
    """
    loss = loss_of(cross_entropy=0.5, temperature=0.07)
    found = terms(loss, images_of(POINTS[:1]), LABELS[:1], images_of(POINTS[1:]), LABELS[1:])
    assert {name: value.item() for name, value in found.items()} == {
        "cross_entropy": pytest.approx(0.313262, abs=1e-6),
        "virtual": pytest.approx(0.282659, abs=1e-6),
        "contrast": pytest.approx(0.971059, abs=1e-5),
    }


def test_outputs_of_their_own() -> None:
    """As outputs (1, 1) instead of (0, 1) the virtual ones cost ln(1 + e^0.6) = 1.037488 and ln 2: mean 0.865318.

    The contrast keeps the labels.
    """
    made = images_of(POINTS[1:])
    found = terms(loss_of(), images_of(POINTS[:1]), LABELS[:1], made, LABELS[1:], outputs=torch.tensor([1, 1]))
    assert found["virtual"].item() == pytest.approx(0.865318, abs=1e-6)
    assert found["contrast"].item() == pytest.approx(0.392099, abs=1e-6)


@pytest.mark.parametrize("detach", [True, False])
def test_virtual_features_are_constants_in_the_contrast_with_real_ones(detach: bool) -> None:
    made = images_of(POINTS[1:]).requires_grad_()
    real = images_of(POINTS[:1]).requires_grad_()
    loss = loss_of(cross_entropy=0.0, detach=detach)
    inputs = {"images": made, "labels": torch.tensor([0, 1]), "outputs": torch.tensor([0, 1])}
    inputs |= {"scale": torch.ones(1, 1, 1), "shift": torch.zeros(1, 1, 1)}
    batch = Batch(real, torch.tensor([0]), None, {"virtual": torch.arange(2)})
    contrast = loss.terms(Identity(), batch, inputs)["contrast"]  # type: ignore[arg-type]
    to_real, to_made = torch.autograd.grad(contrast, [real, made], allow_unused=True, materialize_grads=True)
    assert bool(to_real.any())
    assert bool(to_made.any()) == (not detach)


def test_a_virtual_set_alone_teaches_its_features() -> None:
    """Three virtual ones, so that the gradient of a tenth of their own contrast is not zero, detached as they are."""
    made = images_of(POINTS).requires_grad_()
    inputs = {"images": made, "labels": torch.tensor(LABELS), "outputs": torch.tensor(LABELS)}
    inputs |= {"scale": torch.ones(1, 1, 1), "shift": torch.zeros(1, 1, 1)}
    batch = Batch(images_of([[1.0, 1.0]]), torch.tensor([0]), None, {"virtual": torch.arange(3)})
    contrast = loss_of(alone=0.1).terms(Identity(), batch, inputs)["contrast"]  # type: ignore[arg-type]
    assert bool(torch.autograd.grad(contrast, made)[0].any())


def test_one_pass_or_two_without_batchnorm() -> None:
    one, two = (
        terms(loss_of(joint=joint), images_of(POINTS[:2]), LABELS[:2], images_of(POINTS), LABELS)
        for joint in (True, False)
    )
    assert {name: value.item() for name, value in one.items()} == {name: value.item() for name, value in two.items()}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1, 1), {"virtual", "contrast"}), ((0, 1), {"contrast"}), ((1, 0), {"virtual"}), ((0, 0), set())],
)
def test_a_term_of_weight_zero_is_not_there(weights: tuple[float, float], expected: set[str]) -> None:
    loss = loss_of(cross_entropy=float(weights[0]), contrast=float(weights[1]))
    assert loss.is_on == bool(expected)
    found = terms(loss, images_of(POINTS[:2]), LABELS[:2], images_of(POINTS), LABELS)
    assert set(found) == expected | {"cross_entropy"}
