"""Contrastive losses against fedcspc.md section 8 and the test facts of baselines.md sections 4, 8 and 11."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flcore.math.losses.contrastive import (
    contrastive_terms,
    model_contrast,
    prototype_contrast,
    source_weights,
    supervised_contrastive,
)

THREE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])  # fedcspc.md, fact 6
THREE_LABELS, THREE_SOURCES = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])
FOUR = torch.cat([THREE, torch.tensor([[0.8, -0.6]])])  # fact 7
FOUR_LABELS, FOUR_SOURCES = torch.tensor([0, 1, 0, 0]), torch.tensor([0, 0, 1, 0])


def close(*expected: float) -> object:
    return pytest.approx(expected, abs=1e-6)


def reference(
    points: list[list[float]],
    labels: list[int],
    temperature: float,
    sigma: Callable[[int, int], float],
    *,
    self_below: bool = False,
    self_positive: bool = False,
) -> list[float]:
    """Every anchor in plain loops, for vectors of norm 1; with the switches that the specification's variants need."""
    count = len(points)

    def term(i: int, k: int) -> float:
        return sigma(i, k) * math.exp(sum(a * b for a, b in zip(points[i], points[k], strict=True)) / temperature)

    losses = []
    for i in range(count):
        positives = [j for j in range(count) if labels[j] == labels[i] and (j != i or self_positive)]
        below = sum(term(i, k) for k in range(count) if k != i or self_below)
        losses.append(-sum(math.log(term(i, j) / below) for j in positives) / max(1, len(positives)))
    return losses


def sigma_of(labels: Tensor, sources: Tensor) -> Callable[[int, int], float]:
    return lambda i, k: 1.0 if bool(labels[i] == labels[k]) != bool(sources[i] == sources[k]) else 0.5


def test_source_weights() -> None:
    """1 where exactly one of class and client is shared: (0, 1) same client, (0, 2) same class; (1, 2) neither."""
    expected = [[0.5, 1.0, 1.0], [1.0, 0.5, 0.5], [1.0, 0.5, 0.5]]
    assert source_weights(THREE_LABELS, THREE_SOURCES).tolist() == expected


def test_source_aware_contrast_of_three() -> None:
    """Fact 6: 0.263282, none, 0.557277; the mean over anchors with positives 0.410280, over all 0.273520."""
    sigma = source_weights(THREE_LABELS, THREE_SOURCES)
    losses, has_positive = contrastive_terms(THREE, THREE_LABELS, 0.5, pair_weights=sigma)
    assert losses.tolist() == close(0.263282, 0, 0.557277)
    assert has_positive.tolist() == [True, False, True]
    assert losses.sum().item() / 2 == pytest.approx(0.410280, abs=1e-6)
    assert losses.mean().item() == pytest.approx(0.273520, abs=1e-6)


def test_some_anchors_among_all() -> None:
    """Fact 7 of the rows 3 and 1 alone, with pairs [2, 4]; without the third the fourth has one positive.

    Of row 3 then: cosine 0.8 to row 0, weight 0.5; -0.6 to row 1, weight 1: -log(0.5 e^1.6/(0.5 e^1.6 + e^-1.2)).
    """
    rows = torch.tensor([3, 1])
    sigma = source_weights(FOUR_LABELS, FOUR_SOURCES, anchors=rows)
    assert torch.equal(sigma, source_weights(FOUR_LABELS, FOUR_SOURCES)[rows])
    losses, has_positive = contrastive_terms(FOUR, FOUR_LABELS, 0.5, pair_weights=sigma, anchors=rows)
    assert losses.tolist() == close(0.875692, 0)
    assert has_positive.tolist() == [True, False]
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    losses, _ = contrastive_terms(FOUR, FOUR_LABELS, 0.5, weight=weight, pair_weights=sigma, anchors=rows)
    assert losses.tolist() == close(math.log(1 + 2 * math.exp(-1.2 - 1.6)), 0)


def test_plain_contrast() -> None:
    """Fact 6 without sigma, and baselines.md 8a: 0.263282, 0.913015, 0; mean over three 0.392099."""
    points, labels = THREE[[0, 2, 1]], torch.tensor([0, 0, 1])
    losses, _ = contrastive_terms(points, labels, 0.5)
    assert losses.tolist() == close(0.263282, 0.913015, 0)
    assert supervised_contrastive(points, labels, 0.5).item() == pytest.approx(0.392099, abs=1e-6)


def test_weights_above_change_the_value_not_the_gradient() -> None:
    """fedcspc.md 7b: -log sigma is a constant. With sigma 0.5 for all pairs it cancels altogether."""
    plain = supervised_contrastive(FOUR, FOUR_LABELS, 0.5)
    half, _ = contrastive_terms(FOUR, FOUR_LABELS, 0.5, pair_weights=torch.full((4, 4), 0.5))
    assert half.mean().item() == pytest.approx(plain.item(), abs=1e-6)


@given(count=st.integers(1, 7), classes=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_contrast_equals_the_loops(count: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (count,), generator=generator)
    sources = torch.randint(2, (count,), generator=generator)
    sigma = source_weights(labels, sources).double()
    # Any positive scale of the features: they are normalised inside.
    scales = torch.rand(count, 1, generator=generator, dtype=torch.float64) + 0.1
    losses, _ = contrastive_terms(points * scales, labels, 0.3, pair_weights=sigma)
    unit = torch.nn.functional.normalize(points).tolist()
    expected = reference(unit, labels.tolist(), 0.3, sigma_of(labels, sources)) if count > 1 else [0.0]
    assert losses.tolist() == pytest.approx(expected, abs=1e-9)


def at_cosine(cosine: float) -> Tensor:
    return torch.tensor([[cosine, math.sqrt(1 - cosine**2)]])


def test_model_contrast() -> None:
    """baselines.md 4a: cosines 0.8 and 0.2: -log(e^1.6/(e^1.6 + e^0.4)) = 0.263282; with -0.2 too 0.362230."""
    own, positive = at_cosine(1.0), at_cosine(0.8)
    negatives = torch.stack([at_cosine(0.2), at_cosine(-0.2)])
    one = model_contrast(own, positive, negatives, torch.tensor([True, False]), 0.5)
    both = model_contrast(own, positive, negatives, torch.tensor([True, True]), 0.5)
    assert one.item() == pytest.approx(0.263282, abs=1e-6)
    assert both.item() == pytest.approx(0.362230, abs=1e-6)
    # Scale of any of the three is nothing to a cosine.
    scaled = model_contrast(3 * own, 0.5 * positive, 7 * negatives, torch.tensor([True, True]), 0.5)
    assert scaled.item() == pytest.approx(0.362230, abs=1e-6)


AXES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
ALL = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(("label", "expected"), [(0, 0.142932), (1, 2.142932)])
def test_node_loss(label: int, expected: float) -> None:
    """fedcspc.md, fact 1: cosines 1, 0, -1 at temperature 0.5: log(e² + 1 + e^-2) - 2, and + 2 for the second."""
    assert math.log(math.exp(2) + 1 + math.exp(-2)) - 2 == pytest.approx(0.142932, abs=1e-6)
    found = prototype_contrast(torch.tensor([[1.0, 0.0]]), torch.tensor([label]), AXES, ALL, 0.5)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_inner_product_sees_scale() -> None:
    """z = (2, 0), prototypes (1, 0), (0, 1), T = 1: log(1 + e^-2) = 0.126928, not log(1 + e^-1)."""
    found = prototype_contrast(
        torch.tensor([[2.0, 0.0]]), torch.tensor([0]), AXES[:2], ALL[:2], 1.0, similarity="inner"
    )
    assert found.item() == pytest.approx(0.126928, abs=1e-6)


def test_missing_prototypes_leave_the_denominator_and_the_mean() -> None:
    """Class 2 missing: sample 0 has log(1 + e^-2) = 0.126928; sample 1 of class 2 is skipped, or counts as 0."""
    features, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 2])
    present = torch.tensor([True, True, False])
    assert prototype_contrast(features, labels, AXES, present, 0.5).item() == pytest.approx(0.126928, abs=1e-6)
    counted = prototype_contrast(features, labels, AXES, present, 0.5, count_missing=True)
    assert counted.item() == pytest.approx(0.126928 / 2, abs=1e-6)


def test_prototypes_are_constants() -> None:
    means = AXES.clone().requires_grad_()
    loss = prototype_contrast(torch.ones(1, 2, requires_grad=True), torch.tensor([0]), means, ALL, 0.5)
    assert torch.autograd.grad(loss, means, allow_unused=True) == (None,)
