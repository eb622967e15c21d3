"""Alignment losses against section 8 of fedcspc.md, gfpl.md, fedmlp.md and the test facts of baselines.md."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad

from flcore.math.losses.alignment import (
    angle_loss,
    dot_regression,
    edge_loss,
    extrapolate,
    memory_divergence,
    nearest_centres,
    not_true_distillation,
    prototype_pull,
    row_distance,
    smooth_l1_to_prototypes,
    softmax_divergence,
    triplet_hinge,
)
from flcore.math.losses.basic import cross_entropy, gradient_distance, linear_gradient
from flcore.math.prototypes.class_means import frame_of_basis


def tensor(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def close(*expected: float) -> object:
    return pytest.approx(expected, abs=1e-6)


POINTS = tensor((1, 0), (0, 0), (0, 1))  # fedcspc.md, fact 2: one sample of each of three classes, b the second
PROTOTYPES = tensor((1, 0), (0, 0), (1, 1))
LABELS = torch.tensor([0, 1, 2])
ALL = torch.ones(3, dtype=torch.bool)


def test_angle_loss() -> None:
    """Fact 2: smooth-L1 0.037037 over all 27 ordered triples, 0.166667 over the six with three labels."""
    assert angle_loss(POINTS, LABELS, PROTOTYPES, ALL).item() == pytest.approx(0.166667, abs=1e-6)
    assert angle_loss(POINTS, LABELS, PROTOTYPES, ALL, mode="all").item() == pytest.approx(0.037037, abs=1e-6)


def test_angle_loss_of_two_classes() -> None:
    """No triple has three labels; in `all` mode equal labels have prototype differences 0, cosine 0."""
    labels = torch.tensor([0, 1, 1])
    assert angle_loss(POINTS, labels, PROTOTYPES, ALL).item() == 0.0
    # Features' cosines are 1 for a = c (six), at b 0, at the two others 1/sqrt(2) twice each, else 0. Prototypes (1,0),
    # (0,0), (0,0): vertex 0: directions to 1 and 2 are equal: all four 1; vertices 1 and 2: only a = c = 0 has 1.
    # Differences: vertex 0: 1-1 twice, 0.7071-1 twice; vertex 1: a=c=0: 0, a=c=2: 1, mixed: 0; vertex 2: a=c=0: 0,
    # a=c=1: 1, mixed 0.7071 twice. Halved squares: 2·0.5·0.085786 + 0.5 + 0.5 + 2·0.5·0.5 = 1.585786; over 27.
    expected = (2 * 0.5 * (1 - math.sqrt(0.5)) ** 2 + 0.5 + 0.5 + 2 * 0.5 * 0.5) / 27
    assert angle_loss(POINTS, labels, PROTOTYPES, ALL, mode="all").item() == pytest.approx(expected, abs=1e-6)


def test_edge_loss() -> None:
    """Fact 3: mean-normalised smooth-L1 0.029437 over nine entries, 0.044156 over the six with different labels.

    Literal: two of three pairs differ by 0.414214: ½·0.414214² · 4/9 = 0.038127.
    """
    assert edge_loss(POINTS, LABELS, PROTOTYPES, ALL).item() == pytest.approx(0.029437, abs=1e-6)
    different = edge_loss(POINTS, LABELS, PROTOTYPES, ALL, same_label=False)
    assert different.item() == pytest.approx(0.044156, abs=1e-6)
    literal = edge_loss(POINTS, LABELS, PROTOTYPES, ALL, relative=False)
    assert literal.item() == pytest.approx(0.5 * (math.sqrt(2) - 1) ** 2 * 4 / 9, abs=1e-6)


def test_edge_loss_of_one_class() -> None:
    """fedcspc.md 4.4: a batch of one class has no target."""
    labels = torch.zeros(3, dtype=torch.int64)
    assert edge_loss(POINTS, labels, PROTOTYPES, ALL).item() == 0.0
    gradient = grad(lambda f: edge_loss(f, labels, PROTOTYPES, ALL))(POINTS)
    assert torch.equal(gradient, torch.zeros(3, 2))


def test_samples_without_prototype_take_no_part() -> None:
    """A fourth sample of a missing class, wherever it is, changes neither angles nor edges."""
    features, labels = torch.cat([POINTS, tensor((5, -7))]), torch.tensor([0, 1, 2, 3])
    means, present = torch.cat([PROTOTYPES, tensor((9, 9))]), torch.tensor([True, True, True, False])
    assert angle_loss(features, labels, means, present).item() == pytest.approx(0.166667, abs=1e-6)
    assert edge_loss(features, labels, means, present).item() == pytest.approx(0.029437, abs=1e-6)
    assert grad(lambda f: edge_loss(f, labels, means, present))(features)[3].tolist() == [0.0, 0.0]


@given(seed=st.integers(0, 99), scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
@settings(max_examples=25, deadline=None)
def test_shape_terms_do_not_see_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    means = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    moved = scale * features + shift
    for mode in ("distinct", "all"):
        expected = angle_loss(features, labels, means, ALL, mode=mode)  # type: ignore[arg-type]
        assert torch.allclose(angle_loss(moved, labels, means, ALL, mode=mode), expected)  # type: ignore[arg-type]
    assert torch.allclose(edge_loss(moved, labels, means, ALL), edge_loss(features, labels, means, ALL))
    # Features at a similar image of their prototypes are where both terms want them.
    at_prototypes = scale * means[labels] + shift
    assert angle_loss(at_prototypes, labels, means, ALL, mode="all").item() == pytest.approx(0, abs=1e-12)
    assert edge_loss(at_prototypes, labels, means, ALL).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("same", "other", "mixed", "literal", "hinge"),
    [((3, 2), (0, 0), ((4, 2), (0.5, 1)), 8.75, 2.881966), ((1.5, 2), (-9, 2), ((1.75, 2), (-4, 2)), -23.4375, 0.0)],
)
def test_hinge(same: object, other: object, mixed: object, literal: float, hinge: float) -> None:
    """Fact 5, H = identity, margin 1: the literal squared form is unbounded below, the hinge is not.

    First case: |(1,2) - (4,2)| = 3, |(1,2) - (0.5,1)| = sqrt(1.25) = 1.118034: 3 - 1.118034 + 1.
    """
    anchor = tensor(1, 2)
    positive, negative = extrapolate(anchor, tensor(*same), tensor(*other), 0.5)  # type: ignore[misc]
    assert (tuple(positive.tolist()), tuple(negative.tolist())) == mixed
    squared = (anchor - positive).square().sum() - (anchor - negative).square().sum() + 1
    assert squared.item() == literal
    assert triplet_hinge(anchor, positive, negative).item() == pytest.approx(hinge, abs=1e-6)


def test_hinge_of_coinciding_points() -> None:
    """j = i: u+ = u_i, distance 0; margin 1 less the distance 1 of the negative is 0.0, at margin 2 it is 1."""
    anchor = tensor((1, 2))
    positive, negative = extrapolate(anchor, anchor, tensor((3, 2)), 0.5)
    assert triplet_hinge(anchor, positive, negative, 2.0).item() == 1.0
    gradient = grad(lambda z: triplet_hinge(z, positive, negative, 2.0))(anchor)
    # Only the negative acts: minus the direction from it, -((1, 2) - (2, 2))/1 = (1, 0).
    assert gradient.tolist() == [[1.0, 0.0]]


Z = tensor((0.2, -1.5, 3))
FIRST = torch.tensor([0])


@pytest.mark.parametrize("direction", ["zc", "cz"])
def test_divergence_of_a_saturated_softmax(direction: str) -> None:
    """Fact 13: z = (110, 0, ..., 0), d = 50. `F.kl_div` has a finite loss there and NaN gradients."""
    features = torch.zeros(1, 50)
    features[0, 0] = 110.0
    targets = torch.linspace(0, 1, 50).unsqueeze(0)
    loss = lambda z: softmax_divergence(z, targets, direction=direction).sum()  # type: ignore[arg-type] # noqa: E731
    assert loss(features).isfinite()
    assert grad(loss)(features).isfinite().all()
    naive = grad(lambda z: F.kl_div(targets.log_softmax(1), z.softmax(1), reduction="sum"))(features)
    assert naive.isnan().any()  # or the form above would not be needed


def test_nearest_centre() -> None:
    """Fact 6: distances of (0.5, 0.6) are 0.710634, 0.520683, 2.156965; masked, the first is nearest."""
    centres = tensor((0.95, 0.05), (0.1, 0.933333), (-1, -0.95))
    point = tensor((0.5, 0.6))
    assert (point - centres).norm(dim=1).tolist() == close(0.710634, 0.520683, 2.156965)
    assert nearest_centres(point, centres, ALL).tolist() == [1]
    assert nearest_centres(point, centres, torch.tensor([True, False, True])).tolist() == [0]


def test_memory_divergence() -> None:
    """Class 0 is remembered: 0.266217. Class 1 is not: nearest centre of (1, 2, 0) is (0.5, 1, 1): 0.247989.

    Squared distances 0.25 + 1 + 1 = 2.25 against 1 + 4 + 0 = 5 of the centre (0, 0, 0); the third row is padding.
    """
    features, labels = tensor((1, 0, -1), (1, 2, 0)), torch.tensor([0, 1])
    means, present = tensor((0, 0, 0), (9, 9, -9)), torch.tensor([True, False])
    centres, kept = tensor((0, 0, 0), (0.5, 1, 1), (1, 2, 0)), torch.tensor([True, True, False])
    found = memory_divergence(features, labels, means, present, centres, kept)
    assert found.item() == pytest.approx((0.266217 + 0.247989) / 2, abs=1e-6)
    # Without centres the second sample has nothing to compare with.
    found = memory_divergence(features, labels, means, present, centres, torch.zeros(3, dtype=torch.bool))
    assert found.item() == pytest.approx(0.266217, abs=1e-6)


def test_empty_memory() -> None:
    nothing = torch.zeros(2, dtype=torch.bool)
    loss = lambda f: memory_divergence(f, FIRST, torch.zeros(2, 3), nothing, torch.zeros(2, 3), nothing)  # noqa: E731
    assert loss(Z).item() == 0.0
    assert torch.equal(grad(loss)(Z), torch.zeros(1, 3))


def test_targets_are_constants() -> None:
    """fedmlp.md, fact 8: no gradient to G, P or the memory; nor to any other target of this module."""
    features, labels = torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1])
    means, present = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_(), ALL
    for loss in (
        smooth_l1_to_prototypes(features, labels, means, present),
        memory_divergence(features, labels, means, torch.tensor([True, False, True]), means, present),
        angle_loss(features, labels, means, present, mode="all"),
        edge_loss(features, labels, means, present),
        row_distance(features, means[labels]),
        not_true_distillation(features, means[labels], labels),
        dot_regression(features, labels, means),
        gradient_distance(features, means[:2]),
    ):
        assert loss.requires_grad
        assert torch.autograd.grad(loss, means, allow_unused=True) == (None,)


def test_row_distance() -> None:
    """baselines.md 15a: (1,2), (3,4) to (0,0), (3,0): MSE (2.5 + 8)/2 = 5.25, norms (sqrt 5 + 4)/2 = 3.118034."""
    rows, targets = tensor((1, 2), (3, 4)), tensor((0, 0), (3, 0))
    assert row_distance(rows, targets).item() == pytest.approx(5.25)
    assert row_distance(rows, targets, form="l2").item() == pytest.approx(3.118034, abs=1e-6)
    assert row_distance(rows, targets, torch.tensor([False, True]), form="l2").item() == 4.0


STUDENT, TEACHER = tensor((2, 1, 0)), tensor((3, 0.5, 1.5))


def test_the_true_class_does_not_matter() -> None:
    """baselines.md 5b, for the teacher's and the student's true logit, and every place of the true class."""
    for label in range(3):
        labels, change = torch.tensor([label]), 50 * F.one_hot(torch.tensor([label]), 3)
        expected = not_true_distillation(STUDENT, TEACHER, labels).item()
        assert not_true_distillation(STUDENT, TEACHER + change, labels).item() == pytest.approx(expected, abs=1e-6)
        assert not_true_distillation(STUDENT - change, TEACHER, labels).item() == pytest.approx(expected, abs=1e-6)
        gradient = grad(lambda z, y=labels: not_true_distillation(z, TEACHER, y))(STUDENT)
        assert gradient[0, label].item() == 0.0
        others = [k for k in range(3) if k != label]
        p, q = TEACHER[0, others].softmax(0), STUDENT[0, others].softmax(0)
        assert expected == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


FRAME = frame_of_basis(torch.eye(4)[:, :3])  # gfpl.md, fact 1


def test_dot_regression() -> None:
    """gfpl.md, fact 2: h = (1, 1, 0, 0)/sqrt 2 has dots 0.288675, 0.288675, -0.577350; h = z_c gives 0.

    ½ (0.288675 - 1)² = 0.252992, ½ (-0.577350 - 1)² = 1.244017; the scale of the projection does not matter.
    """
    projection = tensor((1, 1, 0, 0))
    dots = (projection / math.sqrt(2)) @ FRAME
    assert dots[0].tolist() == close(0.288675, 0.288675, -0.577350)
    assert dot_regression(projection, FIRST, FRAME).item() == pytest.approx(0.252992, abs=1e-6)
    assert dot_regression(7 * projection, torch.tensor([2]), FRAME).item() == pytest.approx(1.244017, abs=1e-6)
    assert dot_regression(FRAME.T, LABELS, FRAME).item() == pytest.approx(0, abs=1e-12)
    assert dot_regression(torch.zeros(1, 4), FIRST, FRAME).item() == 0.5  # no direction: dot 0


def test_gradient_equals_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    features, classifier, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 3), (4, 3), (4,)))
    labels, weight = torch.tensor([0, 3, 1, 1, 2]), tensor(1, 1, 1, 0, 1)
    expected = grad(lambda w, b: cross_entropy(features @ w.T + b, labels, weight), argnums=(0, 1))(classifier, bias)
    found = linear_gradient(features, labels, classifier, bias, weight)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_gradient_distance() -> None:
    """baselines.md 20b: rows (∓1, ∓0.5) against ∓(0.5, 0): 2·(1 - 0.894427), with the guard 0.211149."""
    rows = tensor((-1, -0.5), (1, 0.5))
    assert gradient_distance(rows, tensor((-0.5, 0), (0.5, 0))).item() == pytest.approx(0.211149, abs=1e-6)
    assert gradient_distance(rows, 5 * rows).item() == pytest.approx(0, abs=1e-5)
    assert gradient_distance(rows, -rows).item() == pytest.approx(4, abs=1e-5)  # cosine -1 in both rows
    zero = torch.zeros(2, 2)
    assert gradient_distance(zero, rows).item() == 2.0
    assert grad(gradient_distance)(zero, rows).isfinite().all()


# The pull to the prototype of the label, against fedpa.md 8 and baselines.md 15.

T = torch.tensor
FEATURES, PHI, BOTH = T([[3.0, 4.0], [0.0, 0.0]]), T([[0.0, 0.0], [0.0, 2.0]]), T([True, True])


def gradient(value: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, of, allow_unused=True)


def test_masked_samples_stay_in_the_mean() -> None:
    """Distances 12.5 and (masked) 2 over B = 2: 6.25; norms 5 and masked: 2.5."""
    present = T([True, False])
    assert prototype_pull(FEATURES, T([0, 1]), PHI, present).item() == pytest.approx(6.25)
    assert prototype_pull(FEATURES, T([0, 1]), PHI, present, "l2").item() == pytest.approx(2.5)


def test_gradients_of_the_pull() -> None:
    """fedpa.md 7d: per sample of norm 1 (l2) against 2‖h - φ‖/d (MSE), over B = 2; nothing to φ; 0 at distance 0."""
    for form, norms in (("mse", [2 * 5 / 2 / 2, 0.0]), ("l2", [1 / 2, 0.0])):
        features, phi = FEATURES.clone().requires_grad_(), torch.zeros(2, 2, requires_grad=True)
        grad, to_phi = gradient(prototype_pull(features, T([0, 1]), phi, BOTH, form), features, phi)
        assert grad.norm(dim=1).tolist() == pytest.approx(norms)
        assert to_phi is None


def test_cap() -> None:
    """Per-sample MSE 12.5 and 2, cap 5: (5 + 2)/2 = 3.5; the first sample has no gradient, the second (0,-2)/2."""
    features = FEATURES.clone().requires_grad_()
    value = prototype_pull(features, T([0, 1]), PHI, BOTH, cap=5.0)
    assert value.item() == pytest.approx(3.5)
    assert gradient(value, features)[0].tolist() == [[0.0, 0.0], [0.0, -1.0]]
    assert prototype_pull(FEATURES, T([0, 1]), PHI, BOTH, cap=20.0).item() == pytest.approx(7.25)
