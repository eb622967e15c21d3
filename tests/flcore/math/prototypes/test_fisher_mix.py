"""FisherMix: a line of four samples by hand, a triangle, and classes without samples."""

from __future__ import annotations

import math

import pytest
import torch

from flcore.math.prototypes.discriminant import NEVER, ClassSums, discriminant, discriminant_sums
from flcore.math.prototypes.fisher_mix import fisher_mix


def stream() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_two_classes_on_a_line() -> None:
    """Class 0 has 0 and 2, class 1 has 4 and 6: mean 3, deviation √5, variance within 1/5 of the standardised ones.

    With λ = 0.3 the whitened axis is f / √(1/5 + 0.3) = √2·f, in raw features √(2/5). Unit vectors of one dimension are
    −1 and 1 for any draws; the bias puts the border at the mean.
    """
    line = discriminant_sums(torch.tensor([[0.0], [2.0], [4.0], [6.0]]), torch.tensor([0, 0, 1, 1]), 2)
    weight, bias = fisher_mix(line, 0.3, stream())
    slope = math.sqrt(0.4)
    assert weight.flatten().tolist() == pytest.approx([-slope, slope])
    assert bias.tolist() == pytest.approx([3 * slope, -3 * slope])


def test_classes_in_the_corners_of_a_triangle_answer_for_their_corners() -> None:
    """By symmetry the best unit vectors point at the corners; few draws are near borders, hence 6 degrees."""
    angles = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64) * math.pi / 3
    corners = 3 * torch.stack([angles.cos(), angles.sin()], 1)
    counts = torch.full((3,), 10.0, dtype=torch.float64)
    second = 10 * corners.mT @ corners + 30 * torch.eye(2, dtype=torch.float64)  # unit variance within
    weight, _ = fisher_mix(ClassSums(counts, 10 * corners, second), 1e-6, stream())
    cosines = torch.nn.functional.cosine_similarity(weight, corners)
    assert cosines.min() > math.cos(math.radians(6))


def test_with_equal_shares_it_answers_as_the_discriminant() -> None:
    """Means 4 deviations apart: both are near the best border, and differ in at most 2 % of new samples."""
    draw = torch.Generator().manual_seed(0)
    means = 4 / math.sqrt(2) * torch.eye(4, 6)
    labels = torch.arange(4).repeat(500)
    samples = means[labels] + torch.randn(2000, 6, generator=draw)
    new = (means[labels] + torch.randn(2000, 6, generator=draw)).double()
    totals = discriminant_sums(samples, labels, 4)
    ours, theirs = (
        (new @ weight.mT + bias).argmax(1)
        for weight, bias in (fisher_mix(totals, 1e-3, stream()), discriminant(totals, 1e-3))
    )
    assert (ours != theirs).double().mean() < 0.02
    assert (ours == labels).double().mean() > 0.9


def test_classes_without_samples_never_answer() -> None:
    samples, labels = torch.tensor([[0.0, 1.0], [2.0, 0.0], [4.0, 1.0], [6.0, 0.0]]), torch.tensor([0, 0, 2, 2])
    weight, bias = fisher_mix(discriminant_sums(samples, labels, 4), 0.1, stream())
    assert weight[[1, 3]].abs().max() == 0
    assert bias[[1, 3]].tolist() == [NEVER, NEVER]
