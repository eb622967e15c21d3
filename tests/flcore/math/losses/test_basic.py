"""Loss terms against numbers worked out by hand (baselines.md, sections 3 and 15)."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad

from flcore.math.losses.basic import (
    correlation_penalty,
    cross_entropy,
    distances,
    euclidean_norm,
    proximal,
    safe_root,
    unit_vectors,
    weighted_mean,
)


def test_cross_entropy() -> None:
    """Logits (2, 1, 0), label 0: ln(e² + e + 1) - 2 = 0.407606; logits (0, 0, 0): ln 3. Mean of both 0.753109."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([0, 2])
    expected = (math.log(math.exp(2) + math.exp(1) + 1) - 2 + math.log(3)) / 2
    assert expected == pytest.approx(0.753109, abs=1e-6)
    assert cross_entropy(logits, labels).item() == pytest.approx(expected, abs=1e-6)


def test_weighted_mean() -> None:
    """(1·1 + 3·0 + 5·1)/2 = 3; without weights (1 + 3 + 5)/3 = 3 as well, so a third: weights (1, 2, 0): 7/3."""
    values = torch.tensor([1.0, 3.0, 5.0])
    assert weighted_mean(values, torch.tensor([1.0, 0.0, 1.0])).item() == 3.0
    assert weighted_mean(values, torch.tensor([1.0, 2.0, 0.0])).item() == pytest.approx(7 / 3)
    assert weighted_mean(values, None).item() == 3.0
    assert weighted_mean(values, torch.zeros(3)).item() == 0.0


def test_proximal_term_and_gradient() -> None:
    """w = (1, 2), w_g = 0, μ = 0.1: 0.05·(1 + 4) = 0.25, gradient μ·(w - w_g) = (0.1, 0.2)."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    term = proximal({"w": w}, {"w": torch.zeros(2)}, 0.1)
    (gradient,) = torch.autograd.grad(term, w)
    assert term.item() == pytest.approx(0.25)
    assert gradient.tolist() == pytest.approx([0.1, 0.2])


def test_proximal_sums_over_all_parameters() -> None:
    """a = (3,) from 1, b = [[0, 2]] from [[0, 0]]: 0.5·2·(4 + 4) = 8; at the anchor 0."""
    params = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 2.0]])}
    anchor = {"b": torch.zeros(1, 2), "a": torch.tensor([1.0])}  # by name, not by order
    assert proximal(params, anchor, 2.0).item() == 8.0
    assert proximal(params, params, 2.0).item() == 0.0


# Lengths, directions and distances, and their gradients where a root has none.


def test_roots_and_norms_have_gradient_zero_at_zero() -> None:
    """√4 = 2 with slope 1/4; |(3, 4)| = 5 with slope (0.6, 0.8)."""
    assert safe_root(torch.tensor([0.0, 4.0])).tolist() == [0.0, 2.0]
    assert grad(lambda v: safe_root(v).sum())(torch.tensor([0.0, 4.0])).tolist() == [0.0, 0.25]
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert euclidean_norm(vectors).tolist() == [0.0, 5.0]
    gradient = grad(lambda v: euclidean_norm(v).sum())(vectors)
    assert gradient.flatten().tolist() == pytest.approx([0, 0, 0.6, 0.8])


def test_unit_vectors() -> None:
    """(3, 4) to (0.6, 0.8); the zero vector stays and gets no gradient; tiny vectors have a direction."""
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-10, 4e-10]], requires_grad=True)
    unit = unit_vectors(vectors)
    assert unit.flatten().tolist() == pytest.approx([0.6, 0.8, 0, 0, 0.6, 0.8], abs=1e-6)
    (gradient,) = torch.autograd.grad(unit.sum(), vectors)
    assert torch.equal(gradient[1], torch.zeros(2))
    # d/dv of (v1 + v2)/|v| at (3, 4): ((1, 1) - 1.4·(0.6, 0.8))/5 = (0.032, -0.024).
    assert gradient[0].tolist() == pytest.approx([0.032, -0.024], abs=1e-6)


def test_distances() -> None:
    """(0, 0) to (3, 4) and (0, 1): 5 and 1. Equal points are 0 apart, far from the origin, with gradient 0.

    The expanded square |a|² + |b|² - 2ab would leave a rest there.
    """
    columns = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert distances(torch.zeros(1, 2), columns).tolist() == [[5.0, 1.0]]
    points = torch.full((30, 50), 1234.567)
    assert torch.equal(distances(points, points), torch.zeros(30, 30))
    assert not grad(lambda p: distances(p, points).sum())(points).any()


# FedDecorr's penalty by hand, in both scalings; what it does not depend on (baselines.md section 12).

# Deviations from the means 4 and 5: (-3, -3), (-1, 0), (1, 0), (3, 3). Squares add up to 20 and 18, products to 18: the
# correlation is 18/√360 = 0.948683, and (ZᵀZ)_12 is 3 times that, √8.1.
FEATURES = torch.tensor([[1.0, 2.0], [3.0, 5.0], [5.0, 5.0], [7.0, 8.0]])


def test_decorrelation_by_hand() -> None:
    """Fact a. Code: 8.1/4 = 2.025. Paper: (1 + 1 + 2·0.9)/4 = 0.95."""
    assert correlation_penalty(FEATURES).item() == pytest.approx(2.025, abs=1e-6)
    assert correlation_penalty(FEATURES, scaling="paper").item() == pytest.approx(0.95, abs=1e-6)


def test_perfectly_correlated_columns() -> None:
    """Fact b, B = 3: (ZᵀZ)_12 = 2, so the code's is 4/3 and the paper's 4·1/4 = 1."""
    column = torch.tensor([1.0, 2.0, 6.0])
    features = torch.stack([column, 2 * column - 5], dim=1)
    assert correlation_penalty(features).item() == pytest.approx(4 / 3, abs=1e-6)
    assert correlation_penalty(features, scaling="paper").item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("scaling", ["code", "paper"])
def test_decorrelation_does_not_see_shift_and_scale(scaling: str) -> None:
    """Fact c; a negative factor turns signs of correlations, which are squared."""
    changed = FEATURES * torch.tensor([3.0, -0.5]) + torch.tensor([-7.0, 2.0])
    first, second = (correlation_penalty(values, scaling=scaling) for values in (FEATURES, changed))  # type: ignore[arg-type]
    assert first.item() == pytest.approx(second.item(), abs=1e-5)


@pytest.mark.parametrize("scaling", ["code", "paper"])
def test_decorrelation_of_one_sample_and_dead_dimensions(scaling: str) -> None:
    """One sample: 0. A dimension that is always 0 is correlated with nothing; nothing of it is NaN."""
    assert correlation_penalty(FEATURES[:1], scaling=scaling).item() == 0  # type: ignore[arg-type]
    assert correlation_penalty(FEATURES, scaling=scaling, weight=torch.tensor([1.0, 0, 0, 0])).item() == 0  # type: ignore[arg-type]
    with_dead = torch.cat([FEATURES, torch.zeros(4, 1)], dim=1).requires_grad_()
    penalty = correlation_penalty(with_dead, scaling=scaling)  # type: ignore[arg-type]
    # Of 6 entries beside the diagonal 2 are 8.1; of 9 entries 2 are 1 and 2 are 0.9.
    assert penalty.item() == pytest.approx(8.1 / 3 / 4 if scaling == "code" else 3.8 / 9, abs=1e-6)
    (gradient,) = torch.autograd.grad(penalty, with_dead)
    assert bool(torch.isfinite(gradient).all())
