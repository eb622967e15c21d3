"""What feature generators and their clients are trained by, against fedpa.md 8 and baselines.md 6."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flcore.math.generators.features import (
    diversity_loss,
    fidelity_loss,
    frozen_head_logits,
    label_weights,
    qualified_labels,
    teacher_divergence,
    weighted_client_mean,
)

T = torch.tensor
SIX = {"abs": 1e-6}


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(value: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, of, allow_unused=True)


@given(st.lists(st.lists(st.integers(0, 500), min_size=3, max_size=3), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_label_weights_sum_to_one(counts: list[list[int]]) -> None:
    """baselines.md 6 (b): Σ_k ω_kc = 1 for every class present."""
    weights = label_weights(T(counts), 0.0)
    present = qualified_labels(T(counts))
    assert weights.sum(dim=0).tolist() == pytest.approx(present.float().tolist(), abs=1e-5)
    assert label_weights(T(counts)).sum(dim=0).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


@pytest.mark.parametrize("mask", ["intra", "inter", "all"])
@pytest.mark.parametrize("metric", ["code", "norms"])
def test_gradient_of_diversity(mask: Any, metric: Any) -> None:
    """Finite where outputs coincide (norms: root at 0), to the outputs only; a step against it spreads them."""
    outputs = T([[0.0, 0], [0, 0], [2, 0], [2, 1]], requires_grad=True)
    noise = torch.rand(4, 3, generator=stream()).requires_grad_()
    labels = T([0, 0, 1, 1])
    value = diversity_loss(outputs, noise, labels, mask, metric)
    grad, to_noise = gradient(value, outputs, noise)
    assert torch.isfinite(grad).all() and grad.abs().sum() > 0
    assert to_noise is None
    moved = diversity_loss(outputs - 0.1 * grad, noise, labels, mask, metric)
    assert moved < value


@given(st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_masks_of_diversity_multiply(seed: int) -> None:
    """Exponents add: all = intra·inter. In (0, 1]; no dependence on the order of the batch."""
    outputs, noise = torch.randn(6, 3, generator=stream(seed)), torch.rand(6, 2, generator=stream(seed + 1))
    labels = torch.randint(3, (6,), generator=stream(seed))
    intra, inter, everything = (diversity_loss(outputs, noise, labels, m) for m in ("intra", "inter", "all"))
    assert 0 < everything <= 1
    assert (intra * inter).item() == pytest.approx(everything.item(), rel=1e-5)
    order = torch.randperm(6, generator=stream(seed))
    shuffled = diversity_loss(outputs[order], noise[order], labels[order], "intra")
    assert shuffled.item() == pytest.approx(intra.item(), rel=1e-5)


LOSSES, SHARES = T([[0.2, 1.0], [0.5, 0.3]]), T([[0.75, 0.25], [0.25, 0.75]])


def test_fidelity_toy() -> None:
    """fedpa.md fact 4: ½·(0.15 + 0.25 + 0.125 + 0.225) = 0.375 (a further 1/|S| would give 0.1875).

    Broadcast mistake: 0.5·0.6 + 0.5·0.4 = 0.5.
    """
    assert weighted_client_mean(LOSSES, SHARES).item() == pytest.approx(0.375, **SIX)
    assert weighted_client_mean(LOSSES, SHARES, "authors_broadcast").item() == pytest.approx(0.5, **SIX)
    assert weighted_client_mean(LOSSES, SHARES).item() / len(LOSSES) == pytest.approx(0.1875, **SIX)


def test_broadcast_form_is_the_authors_product() -> None:
    """Their (B) loss times (B, 1) weight is a B×B table, of which they take the mean, client by client."""
    losses, weights = torch.rand(3, 5, generator=stream()), torch.rand(3, 5, generator=stream(1))
    table = sum((own * share.unsqueeze(1)).mean() for own, share in zip(losses, weights, strict=True))
    assert weighted_client_mean(losses, weights, "authors_broadcast").item() == pytest.approx(table.item())


def test_fidelity_from_logits() -> None:
    """Two clients, labels (0, 1). Logits chosen so that cross-entropies are -log p with p below.

    Client 0: p = ½, ¼ of the label; client 1: ¾, ½. Weights by class: client 0 (0.9, 0.2), client 1 (0.1, 0.8).
    ½·(0.9·ln 2 + 0.1·ln(4/3) + 0.2·ln 4 + 0.8·ln 2).
    """
    chances = T([[[0.5, 0.5], [0.75, 0.25]], [[0.75, 0.25], [0.5, 0.5]]])
    weights = T([[0.9, 0.2], [0.1, 0.8]])
    expected = 0.5 * (0.9 * math.log(2) + 0.1 * math.log(4 / 3) + 0.2 * math.log(4) + 0.8 * math.log(2))
    assert fidelity_loss(chances.log(), T([0, 1]), weights).item() == pytest.approx(expected, **SIX)


def test_fidelity_teaches_the_generator_alone() -> None:
    """fedpa.md fact 12: L_fid has zero gradient to all client models."""
    features = torch.randn(4, 3, generator=stream()).requires_grad_()
    weight, bias = torch.randn(2, 5, 3, generator=stream()).requires_grad_(), torch.zeros(2, 5, requires_grad=True)
    logits = frozen_head_logits(features, {"weight": weight, "bias": bias})
    assert torch.allclose(logits[1], F.linear(features, weight[1], bias[1]), atol=1e-6)
    loss = fidelity_loss(logits, T([0, 1, 2, 4]), label_weights(torch.ones(2, 5)))
    to_features, *to_heads = gradient(loss, features, weight, bias)
    assert to_features.abs().sum() > 0
    assert to_heads == [None, None]


def test_heads_with_a_hidden_layer_by_hand() -> None:
    """x = (1, -2): hidden units ReLU(1 + 2 - 1, -1) = (2, 0), logits (2·3 + 1, 2·0 + 5); another client is zero."""
    hidden, bias = T([[1.0, -1.0], [-1.0, 0.0]]), T([-1.0, 0.0])
    own = {"hidden.weight": hidden, "hidden.bias": bias, "weight": T([[3.0, 9.0], [0.0, 9.0]]), "bias": T([1.0, 5.0])}
    heads = {name: torch.stack([value, torch.zeros_like(value)]) for name, value in own.items()}
    assert frozen_head_logits(T([[1.0, -2.0]]), heads).tolist() == [[[7.0, 5.0]], [[0.0, 0.0]]]


def test_teacher_divergence() -> None:
    """Teacher (¾, ¼), model (½, ½): ¾·ln 1.5 + ¼·ln 0.5 = 0.130812; second sample equal: 0. Mean 0.065406."""
    teacher = T([[0.75, 0.25], [0.75, 0.25]]).log().requires_grad_()
    logits = T([[0.0, 0.0], [math.log(3), 0.0]], requires_grad=True)
    value = teacher_divergence(logits, teacher)
    assert value.item() == pytest.approx(0.5 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)), **SIX)
    to_model, to_teacher = gradient(value, logits, teacher)
    # softmax minus target over B = 2: (½ - ¾)/2 = -⅛
    assert to_model[0].tolist() == pytest.approx([-0.125, 0.125])
    assert to_model[1].tolist() == pytest.approx([0, 0], abs=1e-7)
    assert to_teacher is None
    assert teacher_divergence(logits, teacher, T([1.0, 0.0])).item() == pytest.approx(2 * value.item())


def test_one_hot_teachers_give_finite_gradients() -> None:
    """A teacher's probability that underflows to 0 contributes 0·log 0 = 0; its divergence is the cross-entropy."""
    logits = torch.zeros(1, 3, requires_grad=True)
    value = teacher_divergence(logits, T([[500.0, 0.0, -500.0]]))
    assert value.item() == pytest.approx(math.log(3), **SIX)
    assert torch.isfinite(gradient(value, logits)[0]).all()
