"""Losses, targets and measures of FedPG's image generator, against fedpg.md 8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.math.generators.images import (
    dce_loss,
    generated_pixels,
    guided_targets,
    image_facts,
    nearest_prototype_accuracy,
    prototype_loss,
    prototype_match,
    random_targets,
    squared_distances,
    target_facts,
)
from flcore.math.generators.networks import build_image_generator, draw_noise
from flcore.models import extract_weights

T = torch.tensor
SIX = {"abs": 1e-6}
ALL = T([True, True])


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(value: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, of, allow_unused=True)


Z, TARGETS = T([[1.0, 0.0]]), T([[0.0, 0.0], [2.0, 1.0]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.126928),  # ln(1 + e^(-2·(2 - 1)))
        ({"scale": 0.5}, 0.474077),  # ln(1 + e^(-½))
        ({"scale": 0.5, "distance": "l2"}, 0.594946),  # ln(1 + e^(-(√2 - 1)/2))
        ({"scale": 0.5, "distance": "l2", "denominator": "negatives"}, -0.207107),  # (1 - √2)/2
        ({"denominator": "negatives"}, -2.0),  # 2·1 - 2·2
    ],
)
def test_dce_toy(options: Any, expected: float) -> None:
    """fedpg.md fact 2: squared distances 1 and 2."""
    assert squared_distances(Z, TARGETS).tolist() == [[1.0, 2.0]]
    assert dce_loss(Z, T([0]), TARGETS, **options).item() == pytest.approx(expected, **SIX)


def test_printed_equation_8_is_unbounded() -> None:
    """fedpg.md fact 2: z = P'_0 = (0,0), P'_1 = (10,0): literal -2·100 = -200, the softmax about 0."""
    z, targets = torch.zeros(1, 2), T([[0.0, 0.0], [10.0, 0.0]])
    assert dce_loss(z, T([0]), targets, denominator="negatives").item() == pytest.approx(-200)
    assert dce_loss(z, T([0]), targets).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("distance", ["squared", "l2"])
@pytest.mark.parametrize("denominator", ["all", "negatives"])
def test_dce_gradients_are_finite_on_a_target(distance: Any, denominator: Any) -> None:
    z, targets = T([[0.0, 0.0], [2.0, 0.9]], requires_grad=True), TARGETS.clone().requires_grad_()
    for grad in gradient(dce_loss(z, T([0, 1]), targets, distance=distance, denominator=denominator), z, targets):
        assert torch.isfinite(grad).all() and grad.abs().sum() > 0


def test_prototype_loss_toy() -> None:
    """fedpg.md fact 3: ‖(1,0)‖² = 1, ‖(0,2)‖² = 4, mean 2.5, times 0.001."""
    loss = prototype_loss(T([[1.0, 0], [2, 3]]), T([0, 1]), TARGETS)
    assert loss.item() == pytest.approx(2.5)
    assert 0.001 * loss.item() == pytest.approx(0.0025)


P_VIRTUAL, P_GLOBAL = T([[1.0, 0], [0, 1], [3, 3]]), T([[1.0, 1], [0, 2], [float("nan")] * 2])
PRESENT = T([True, True, False])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.346741),  # (ln(1 + e^-8) + ln 2)/2: squared distances (1, 5) and (1, 1)
        ({"reduction": "sum"}, 0.693483),
        ({"form": "zero_rows"}, 0.895964),  # (ln(2 + e^-8) + ln 3)/2: the zero row stands 1 from both
        ({"form": "l2"}, 1.0),  # (1 + 1)/2
        ({"form": "l2", "reduction": "sum"}, 2.0),
    ],
)
def test_match_toy(options: Any, expected: float) -> None:
    """fedpg.md fact 4."""
    assert prototype_match(P_VIRTUAL, P_GLOBAL, PRESENT, **options).item() == pytest.approx(expected, **SIX)


@pytest.mark.parametrize("form", ["softmax", "zero_rows", "l2"])
def test_gradient_of_the_match(form: Any) -> None:
    """To the targets of present classes only; finite and zero with no class present."""
    targets, prototypes = P_VIRTUAL.clone().requires_grad_(), P_GLOBAL.clone().requires_grad_()
    grad, to_prototypes = gradient(prototype_match(targets, prototypes, PRESENT, form=form), targets, prototypes)
    assert torch.isfinite(grad).all() and grad[:2].abs().sum() > 0
    assert grad[2].tolist() == [0, 0] and to_prototypes is None
    nobody = prototype_match(targets, prototypes, torch.zeros(3, dtype=torch.bool), form=form)
    assert nobody.item() == 0
    assert gradient(nobody, targets)[0].abs().sum() == 0


def test_the_softmax_match_saturates_and_l2_does_not() -> None:
    """fedpg.md 7c: at squared distances of 100 between classes value and gradient of the softmax form are 0."""
    prototypes = T([[0.0, 0.0], [10.0, 0.0]])
    targets = (prototypes + T([0.0, 1.0])).requires_grad_()
    softmax = prototype_match(targets, prototypes, ALL)
    assert softmax.item() == 0 and gradient(softmax, targets)[0].abs().sum() == 0
    assert gradient(prototype_match(targets, prototypes, ALL, form="l2"), targets)[0].tolist() == [[0, 1], [0, 1]]


def test_random_targets_stand_far_apart() -> None:
    """fedpg.md fact 9: E‖P'_a - P'_b‖² = 2d = 1024 at d = 512.

    Each pair has variance 8d, pairs are dependent; over 100 rows the mean is 2d·(sample variance of the coordinates),
    with relative deviation about √(2/(512·99)) = 0.0063: within 5 of those, 32.
    """
    targets = random_targets(100, 512, stream())
    pairs = squared_distances(targets, targets).sum() / (100 * 99)
    assert abs(pairs.item() - 1024) < 33


def test_guided_targets() -> None:
    """Bit for bit P where present (fedpg.md fact 12); norms 3 and 5: other rows drawn at norm 4, or last round's."""
    prototypes = T([[0.1, 2.998332], [float("nan")] * 2, [3.0, 4.0]])
    prototypes[0] *= 3 / prototypes[0].norm()
    present = T([True, False, True])
    first = guided_targets(prototypes, present, None, stream())
    assert torch.equal(first[present], prototypes[present])
    assert first[1].norm().item() == pytest.approx(4, abs=1e-5)
    later = guided_targets(prototypes, present, torch.full((3, 2), 7.0), stream())
    assert torch.equal(later[present], prototypes[present])
    assert later[1].tolist() == [7.0, 7.0]


def test_guided_targets_with_nothing_to_guide() -> None:
    nobody = torch.zeros(4, dtype=torch.bool)
    found = guided_targets(torch.zeros(4, 3), nobody, None, stream(5))
    assert torch.equal(found, random_targets(4, 3, stream(5)))


def test_nearest_prototype_accuracy() -> None:
    """Classes 0, 2 present at 0 and 10; class 1 (at 5) is missing, so 5.5 goes to 10 and a sample of class 1 is out.

    Samples (1, y0) right, (5.5, y0) wrong, (9, y2) right, (5, y1) not counted: 2/3.
    """
    prototypes, present = T([[0.0], [5.0], [10.0]]), T([True, False, True])
    features, labels = T([[1.0], [5.5], [9.0], [5.0]]), T([0, 0, 2, 1])
    assert nearest_prototype_accuracy(features, labels, prototypes, present).item() == pytest.approx(2 / 3)
    nobody = torch.zeros(3, dtype=torch.bool)
    assert nearest_prototype_accuracy(features, labels, prototypes, nobody).item() == 0


def test_facts_of_the_targets() -> None:
    """P = (3, 0), (0, 4): norm 5, squared distance 25. P' is (0, 0) off at the first, (0, 1) at the second: 1/5."""
    prototypes, present = T([[3.0, 0.0], [9.0, 9.0], [0.0, 4.0]]), T([True, False, True])
    facts = target_facts(T([[3.0, 0.0], [0.0, 0.0], [0.0, 5.0]]), prototypes, present)
    assert facts == {"target_shift": pytest.approx(0.2), "prototype_spread": pytest.approx(25)}
    one = target_facts(prototypes, torch.zeros(3, 2), T([True, False, False]))
    assert one == {}  # no length to measure against, and no pair


def test_facts_of_the_images() -> None:
    """Classes 0 and 1 at 0 and 10, two images each: features 1, 2 and 4, 9; the head is right about three of four.

    Nearest prototypes: 0, 0, 0 (wrong), 1. Squared distances 1, 4, 36, 1: mean 10.5. With one image of each measured:
    1 and 4, 3 apart, no pair within a class. Only class 0 present: features 1, 2, mean square 2.5, nothing else near.
    """
    features, labels = T([[1.0], [2.0], [4.0], [9.0]]), T([0, 0, 1, 1])
    logits = T([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    facts = image_facts(features, logits, labels, T([[0.0], [10.0]]), ALL, most=1)
    assert facts == pytest.approx(
        {
            "nearest_prototype_accuracy": 0.75,
            "head_accuracy": 0.75,
            "prototype_distance": 10.5,
            "virtual_inter": 3.0,
            "virtual_centroid_inter": 3.0,
        }
    )
    some = image_facts(features, logits, labels, T([[0.0], [10.0]]), T([True, False]))
    assert (some["nearest_prototype_accuracy"], some["prototype_distance"]) == (1.0, pytest.approx(2.5))
    assert some["virtual_intra"] == pytest.approx((1 + 5) / 2)
    nobody = image_facts(features, logits, labels, torch.zeros(2, 1), T([False, False]))
    assert "prototype_distance" not in nobody


def test_generated_pixels() -> None:
    """(G + 1)/2 of a generator in evaluation mode, whatever the blocks, with weights that are not its own."""
    trained, other = (build_image_generator("fc", 3, (1, 4, 4), noise_dim=5, seed=seed).eval() for seed in (1, 2))
    noise, labels = draw_noise(300, 5, stream()), torch.arange(300) % 3
    found = generated_pixels(other, extract_weights(trained), noise, labels)
    with torch.no_grad():
        expected = (trained(noise, labels) + 1) / 2
    assert torch.allclose(found, expected, atol=1e-6)
    assert not found.requires_grad
