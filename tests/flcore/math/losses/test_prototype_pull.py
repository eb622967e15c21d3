"""The pull to the prototype of the label, against fedpa.md 8 and baselines.md 15."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flcore.math.losses.alignment import prototype_pull

T = torch.tensor
FEATURES, PHI, ALL = T([[3.0, 4.0], [0.0, 0.0]]), T([[0.0, 0.0], [0.0, 2.0]]), T([True, True])


def gradient(value: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, of, allow_unused=True)


def test_pull_toy() -> None:
    """fedpa.md fact 7: norms 5 and 2, mean 3.5; squares 25 and 4: mean 14.5, over d = 2 as well 7.25."""
    labels = T([0, 1])
    assert prototype_pull(FEATURES, labels, PHI, ALL).item() == pytest.approx(7.25)
    assert prototype_pull(FEATURES, labels, PHI, ALL, "l2").item() == pytest.approx(3.5)
    assert prototype_pull(FEATURES, labels, PHI, ALL).item() * 2 == pytest.approx(14.5)


@pytest.mark.parametrize("form", ["mse", "l2"])
def test_a_missing_prototype_pulls_nowhere(form: Any) -> None:
    """fedpa.md fact 8: (1 + 4)/2 = 2.5 against a zero row, 0 when masked; no gradient, even with NaN in the row."""
    feature = T([[1.0, 2.0]], requires_grad=True)
    assert prototype_pull(feature, T([0]), torch.zeros(1, 2), T([True])).item() == pytest.approx(2.5)
    value = prototype_pull(feature, T([0]), torch.full((1, 2), float("nan")), T([False]), form)
    assert value.item() == 0
    assert gradient(value, feature)[0].tolist() == [[0.0, 0.0]]


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


def test_pull_teaches_the_extractor_alone() -> None:
    """fedpa.md fact 12: L_po has zero gradient to the classifier Φ."""
    extractor, head = nn.Linear(3, 2), nn.Linear(2, 2)
    features = extractor(torch.ones(2, 3))
    head(features)
    value = prototype_pull(features, T([0, 1]), PHI, ALL)
    own, other = gradient(value, extractor.weight, head.weight)
    assert own.abs().sum() > 0 and other is None


def test_cap() -> None:
    """Per-sample MSE 12.5 and 2, cap 5: (5 + 2)/2 = 3.5; the first sample has no gradient, the second (0,-2)/2."""
    features = FEATURES.clone().requires_grad_()
    value = prototype_pull(features, T([0, 1]), PHI, ALL, cap=5.0)
    assert value.item() == pytest.approx(3.5)
    assert gradient(value, features)[0].tolist() == [[0.0, 0.0], [0.0, -1.0]]
    assert prototype_pull(FEATURES, T([0, 1]), PHI, ALL, cap=20.0).item() == pytest.approx(7.25)
