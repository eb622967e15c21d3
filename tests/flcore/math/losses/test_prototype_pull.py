"""The pull to the prototype of the label, against fedpa.md 8 and baselines.md 15."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flcore.math.losses.alignment import prototype_pull

T = torch.tensor
FEATURES, PHI, ALL = T([[3.0, 4.0], [0.0, 0.0]]), T([[0.0, 0.0], [0.0, 2.0]]), T([True, True])


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
        grad, to_phi = gradient(prototype_pull(features, T([0, 1]), phi, ALL, form), features, phi)
        assert grad.norm(dim=1).tolist() == pytest.approx(norms)
        assert to_phi is None


def test_cap() -> None:
    """Per-sample MSE 12.5 and 2, cap 5: (5 + 2)/2 = 3.5; the first sample has no gradient, the second (0,-2)/2."""
    features = FEATURES.clone().requires_grad_()
    value = prototype_pull(features, T([0, 1]), PHI, ALL, cap=5.0)
    assert value.item() == pytest.approx(3.5)
    assert gradient(value, features)[0].tolist() == [[0.0, 0.0], [0.0, -1.0]]
    assert prototype_pull(FEATURES, T([0, 1]), PHI, ALL, cap=20.0).item() == pytest.approx(7.25)
