"""Lengths, directions and distances, and their gradients where a root has none."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad

from flcore.math.losses.basic import distances, euclidean_norm, safe_root, unit_vectors


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
