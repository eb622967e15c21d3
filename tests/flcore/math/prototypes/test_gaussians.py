"""One Gaussian per class: merging, mapping, drawing (baselines.md, section 7)."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flcore.core.rng import torch_stream
from flcore.math.prototypes.gaussians import (
    ClassGaussians,
    class_gaussian,
    class_gaussians,
    from_upper_triangles,
    merge_gaussians,
    sample_gaussians,
    upper_triangles,
)


def tensor(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


CLIENT_A = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
CLIENT_B = torch.tensor([[1.0, 3.0], [3.0, 3.0], [2.0, 6.0]])


def test_single_and_missing_samples() -> None:
    """A class of one sample has covariance 0, not NaN; a missing class is all 0."""
    found = class_gaussians(CLIENT_B[:1], torch.tensor([1]), 3)
    assert found.counts.tolist() == [0, 1, 0]
    assert found.means.tolist() == [[0, 0], [1, 3], [0, 0]]
    assert torch.equal(found.covariances, torch.zeros(3, 2, 2, dtype=torch.float64))
    # Two clients with one sample each: (1, 3) and (2, 6): the pooled covariance [[0.5, 1.5], [1.5, 4.5]].
    merged = merge_gaussians({0: class_gaussian(CLIENT_B[:1]), 1: class_gaussian(CLIENT_B[2:])})
    assert merged.covariances[0].tolist() == [[0.5, 1.5], [1.5, 4.5]]


def test_covariances_as_they_travel() -> None:
    """[[1, 2, 3], [2, 4, 5], [3, 5, 6]] is 1 2 3 4 5 6, two of them in two rows of six."""
    first = tensor((1, 2, 3), (2, 4, 5), (3, 5, 6))
    both = torch.stack([first, 10 * first])
    flat = upper_triangles(both)
    assert flat.tolist() == [[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60]]
    assert torch.equal(from_upper_triangles(flat), both)


@given(samples=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(-9, 9)), min_size=1, max_size=25))
@settings(max_examples=50, deadline=None)
def test_merging_equals_pooling(samples: list[tuple[int, int, int]]) -> None:
    """(client, class, value): merged statistics equal those of all samples together, in exact arithmetic."""
    uploads = {}
    for client in sorted({sample[0] for sample in samples}):
        own = [sample for sample in samples if sample[0] == client]
        features = torch.tensor([[float(value)] for _, _, value in own])
        uploads[client] = class_gaussians(features, torch.tensor([label for _, label, _ in own]), 3)
    merged = merge_gaussians(uploads)
    for label in range(3):
        values = [Fraction(value) for _, c, value in samples if c == label]
        assert merged.counts[label].item() == len(values)
        mean = sum(values) / len(values) if values else Fraction(0)
        scatter = sum((value - mean) ** 2 for value in values)
        assert merged.means[label].item() == pytest.approx(float(mean), abs=1e-12)
        variance = scatter / (len(values) - 1) if len(values) > 1 else Fraction(0)
        assert merged.covariances[label].item() == pytest.approx(float(variance), abs=1e-10)


def test_merging_is_exact_far_from_the_origin() -> None:
    """Values around 1e6 with variance 1: the difference of raw moments would lose four digits, in float32 all."""
    shifted = merge_gaussians({0: class_gaussian(CLIENT_A.double() + 1e6), 1: class_gaussian(CLIENT_B.double() + 1e6)})
    assert shifted.covariances[0].flatten().tolist() == pytest.approx([1.3, 1.2, 1.2, 6.3], abs=1e-9)


def test_merging_does_not_depend_on_who_answered_first() -> None:
    generator = torch.Generator().manual_seed(0)
    uploads = {
        k: class_gaussians(torch.randn(20, 3, generator=generator), torch.randint(4, (20,), generator=generator), 4)
        for k in range(4)
    }
    expected = merge_gaussians(uploads)
    for order in itertools.permutations(uploads):
        found = merge_gaussians({k: uploads[k] for k in order})
        assert torch.equal(found.means, expected.means)
        assert torch.equal(found.covariances, expected.covariances)


def test_draws_of_a_rank_deficient_gaussian() -> None:
    """Mean (1, 2), covariance of (t, 2t): [[1, 2], [2, 4]]; every draw lies on the line x2 - 2 = 2·(x1 - 1).

    Of 50,000 draws the variances 1 and 4 have standard errors of 0.6 %.
    """
    statistics = ClassGaussians(
        torch.tensor([9, 1, 0]), tensor((1, 2), (5, 5), (0, 0)), torch.zeros(3, 2, 2, dtype=torch.float64)
    )
    statistics.covariances[0] = tensor((1, 2), (2, 4))
    draws, labels = sample_gaussians(statistics, 50_000, torch_stream(0, "draw"))
    assert labels.tolist() == [0] * 50_000  # one sample is not enough for class 1, class 2 has none
    assert draws.dtype == torch.float32
    assert torch.allclose(draws[:, 1] - 2, 2 * (draws[:, 0] - 1), atol=1e-4)
    assert draws.mean(0).tolist() == pytest.approx([1, 2], abs=0.05)
    assert draws.var(0).tolist() == pytest.approx([1, 4], rel=0.03)


def test_slightly_negative_eigenvalues_are_clamped() -> None:
    """[[1, 1 + 1e-6], [1 + 1e-6, 1]] has the eigenvalue -1e-6: finite draws on the diagonal."""
    covariance = tensor((1, 1 + 1e-6), (1 + 1e-6, 1)).unsqueeze(0)
    statistics = ClassGaussians(torch.tensor([5]), tensor((0, 0)), covariance)
    draws, _ = sample_gaussians(statistics, 100, torch_stream(0, "draw"))
    assert draws.isfinite().all()
    assert torch.allclose(draws[:, 0], draws[:, 1], atol=1e-5)
