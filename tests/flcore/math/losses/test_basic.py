"""Loss terms against numbers worked out by hand (baselines.md, sections 3 and 15)."""

from __future__ import annotations

import math

import pytest
import torch

from flcore.math.losses.basic import cross_entropy, proximal, weighted_mean


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
