"""One Gaussian per class: merging, mapping, drawing (baselines.md, section 7)."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flcore.core.rng import numpy_stream, torch_stream
from flcore.math.prototypes.gaussians import (
    ClassGaussians,
    Mixture,
    bhattacharyya,
    class_gaussian,
    class_gaussians,
    fit_class_mixtures,
    fit_mixture,
    from_upper_triangles,
    fuse_components,
    fuse_mixtures,
    fuse_uploads,
    group_components,
    merge_gaussians,
    pack_mixtures,
    sample_gaussians,
    sample_mixture,
    unpack_mixtures,
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


# Mixtures of Gaussians per class (gfpl.md, section 8).


def close(*expected: float) -> object:
    return pytest.approx(expected, abs=1e-6)


def stream(label: int) -> np.random.Generator:
    return numpy_stream(0, "mixture", 4, 2, label)


def random_mixture(seed: int, components: int, dim: int) -> Mixture:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(components, generator=generator, dtype=torch.float64) + 0.1
    means = 2 * torch.randn(components, dim, generator=generator, dtype=torch.float64)
    variances = torch.rand(components, dim, generator=generator, dtype=torch.float64) + 0.1
    return Mixture(weights / weights.sum(), means, variances)


def moments(mixture: Mixture) -> tuple[Tensor, Tensor, Tensor]:
    """Total weight, mean and raw second moment per dimension."""
    weights = mixture.weights.unsqueeze(1)
    return (
        mixture.weights.sum(),
        (weights * mixture.means).sum(0),
        (weights * (mixture.variances + mixture.means.square())).sum(0),
    )


def densities(points: Tensor, mixture: Mixture) -> Tensor:
    """Weighted density [N, n] of every component."""
    shift = points.unsqueeze(1) - mixture.means
    exponent = -0.5 * (shift.square() / mixture.variances + (2 * math.pi * mixture.variances).log()).sum(-1)
    return mixture.weights * exponent.exp()


def m_step(points: Tensor, responsibilities: Tensor) -> Mixture:
    numbers = responsibilities.sum(0)
    means = responsibilities.T @ points / numbers.unsqueeze(1)
    spread = (points.unsqueeze(1) - means).square()
    variances = (responsibilities.unsqueeze(2) * spread).sum(0) / numbers.unsqueeze(1)
    return Mixture(numbers / len(points), means, variances)


def test_the_em_of_this_file_gives_the_numbers_of_the_specification() -> None:
    """gfpl.md, fact 7."""
    found = densities(tensor((1,)), Mixture(tensor(0.5, 0.5), tensor((0,), (3,)), tensor((1,), (1,))))
    assert found.sum().item() == pytest.approx(0.147981, abs=1e-6)
    assert (found / found.sum())[0].tolist() == close(0.817574, 0.182426)
    responsibilities = tensor((1, 0), (0.8, 0.2), (0.1, 0.9), (0, 1))
    step = m_step(tensor((0,), (1,), (4,), (6,)), responsibilities)
    assert responsibilities.sum(0).tolist() == close(1.9, 2.1)
    assert step.weights.tolist() == close(0.475, 0.525)
    assert step.means.flatten().tolist() == close(0.631579, 4.666667)
    assert step.variances.flatten().tolist() == close(0.864266, 2.317460)


def test_a_fit_is_a_fixed_point_of_em() -> None:
    """One more E- and M-step, written out here, leaves it (up to the floor 1e-4, which is added to variances)."""
    generator = torch.Generator().manual_seed(0)
    points = torch.cat([torch.randn(60, 2, generator=generator), 2 * torch.randn(40, 2, generator=generator) + 8])
    points = points.double()
    fit = fit_mixture(points, 2, stream(0))
    weighted = densities(points, fit)
    again = m_step(points, weighted / weighted.sum(1, keepdim=True))
    assert torch.allclose(again.weights, fit.weights, atol=1e-4)
    assert torch.allclose(again.means, fit.means, atol=1e-3)
    assert torch.allclose(again.variances + 1e-4, fit.variances, atol=2e-3)
    assert sorted(fit.weights.tolist()) == pytest.approx([0.4, 0.6], abs=0.03)


@pytest.mark.parametrize(
    ("samples", "asked", "components"), [(1, 4, 1), (2, 4, 1), (3, 4, 1), (4, 4, 2), (7, 4, 3), (8, 4, 4), (50, 4, 4)]
)
def test_number_of_components(samples: int, asked: int, components: int) -> None:
    """min(n, N // 2), at least one."""
    points = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
    fit = fit_mixture(points, asked, stream(0))
    assert fit.means.shape == fit.variances.shape == (components, 3)
    assert fit.weights.sum().item() == pytest.approx(1, abs=1e-6)
    assert fit.means.dtype == torch.float32


def test_one_component_is_mean_and_variance() -> None:
    """gfpl.md, fact 13: (1, 2), (3, 8): mean (2, 5), biased variance (1, 9), plus the floor."""
    fit = fit_mixture(torch.tensor([[1.0, 2.0], [3.0, 8.0]]), 1, stream(0), variance_floor=1e-4)
    assert fit.means.tolist() == [[2.0, 5.0]]
    assert fit.variances[0].tolist() == close(1.0001, 9.0001)
    single = fit_mixture(torch.tensor([[5.0, -1.0]]), 4, stream(0), variance_floor=0.01)
    assert single.means.tolist() == [[5.0, -1.0]]
    assert single.variances[0].tolist() == close(0.01, 0.01)


def test_dead_features_have_one_component_at_the_floor() -> None:
    fit = fit_mixture(torch.zeros(40, 3), 4, stream(0))
    assert fit.means.tolist() == [[0.0] * 3]
    assert fit.variances[0].tolist() == close(1e-4, 1e-4, 1e-4)


def test_a_fit_keeps_mean_and_variance_of_the_sample() -> None:
    """EM's M-step matches the first moment exactly, and the variances plus spread of means to the floor."""
    points = torch.rand(80, 3, generator=torch.Generator().manual_seed(2)).double()
    _, mean, second = moments(fit_mixture(points, 4, stream(0)))
    assert torch.allclose(mean, points.mean(0), atol=1e-6)
    assert torch.allclose(second, points.square().mean(0) + 1e-4, atol=1e-6)


def test_a_fit_is_a_function_of_its_generator_and_class() -> None:
    points, labels = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    everything = fit_class_mixtures(points, labels, 4, stream)
    assert list(everything) == [0, 1, 2]
    alone = fit_class_mixtures(points[labels == 1], labels[labels == 1], 4, stream)
    assert list(alone) == [1]
    assert torch.equal(everything[1].means, alone[1].means)
    assert torch.equal(fit_mixture(points, 4, stream(0)).means, fit_mixture(points, 4, stream(0)).means)


def test_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="at least one feature"):
        fit_mixture(torch.zeros(0, 3), 4, stream(0))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((0, 1), (1, 1), 0.125),
        ((0, 1), (2, 1), 0.5),
        ((0, 1), (3, 1), 1.125),
        ((0, 1), (0, 4), 0.111572),  # ½ ln(2.5/2)
        ((0, 1), (2, 4), 0.311572),  # 4/(8·2.5) more
    ],
)
def test_distance_in_one_dimension(one: tuple[float, float], other: tuple[float, float], expected: float) -> None:
    """gfpl.md, fact 3."""
    a, b = (tensor(one[0]), tensor(one[1])), (tensor(other[0]), tensor(other[1]))
    assert bhattacharyya(*a, *b).item() == pytest.approx(expected, abs=1e-6)
    assert bhattacharyya(*b, *a).item() == pytest.approx(expected, abs=1e-6)
    assert bhattacharyya(*a, *a).item() == bhattacharyya(*b, *b).item() == 0.0


def test_distance_in_two_dimensions() -> None:
    """Fact 3: 0.125 + 0.311572 = 0.436572; per dimension half of it."""
    arguments = tensor(0, 0), tensor(1, 1), tensor(1, 2), tensor(1, 4)
    assert bhattacharyya(*arguments).item() == pytest.approx(0.436572, abs=1e-6)
    assert bhattacharyya(*arguments, per_dimension=True).item() == pytest.approx(0.218286, abs=1e-6)


def full_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    middle = 0.5 * (cov_a + cov_b)
    shift = mean_a - mean_b
    root = math.sqrt(float(torch.linalg.det(cov_a) * torch.linalg.det(cov_b)))
    return float(shift @ torch.linalg.solve(middle, shift)) / 8 + 0.5 * math.log(float(torch.linalg.det(middle)) / root)


def test_distance_equals_the_form_with_determinants() -> None:
    """The full form gives 0.280221 of fact 3, and on diagonal covariances what the library's sums give."""
    found = full_distance(tensor(1, 0), tensor((2, 0.5), (0.5, 1)), tensor(0, 1), torch.diag(tensor(1, 1.5)))
    assert found == pytest.approx(0.280221, abs=1e-6)
    for seed in range(5):
        pair = random_mixture(seed, 2, 4)
        expected = full_distance(
            pair.means[0], torch.diag(pair.variances[0]), pair.means[1], torch.diag(pair.variances[1])
        )
        sums = bhattacharyya(pair.means[0], pair.variances[0], pair.means[1], pair.variances[1])
        assert sums.item() == pytest.approx(expected, rel=1e-9)


def grouped(values: list[float], threshold: float) -> list[list[float]]:
    """Unit-variance Gaussians at ``values``: D = (difference)²/8."""
    points = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
    groups = group_components(points, torch.ones_like(points), threshold)
    return [[values[index] for index in group] for group in groups]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.0, [[0], [1], [2.5], [3.5], [9]]),
        (0.2, [[0, 1], [2.5, 3.5], [9]]),
        (0.5, [[0, 1], [2.5, 3.5], [9]]),
        (1.0, [[0, 1, 2.5], [3.5], [9]]),
        (2.0, [[0, 1, 2.5, 3.5], [9]]),
        (math.inf, [[0, 1, 2.5, 3.5, 9]]),
    ],
)
def test_groups(threshold: float, expected: list[list[float]]) -> None:
    """gfpl.md, facts 5 and 12. At 1.0 any-link would join 3.5 as well."""
    assert grouped([0, 1, 2.5, 3.5, 9], threshold) == expected


def test_groups_depend_on_the_order() -> None:
    """Fact 5: from 2.5 all of 0, 1, 3.5 are near and join at once, 0 and 3.5 at distance 1.53 included."""
    assert grouped([2.5, 0, 1, 3.5, 9], 1.0) == [[2.5, 0, 1, 3.5], [9]]
    assert grouped([0, -2, 2], 1.0) == [[0, -2, 2]]  # although D(-2, 2) = 2


def as_written(mixture: Mixture, threshold: float) -> list[list[int]]:
    """Algorithm 1 word by word: whoever is near every member joins, again and again."""
    pairs = (mixture.means.unsqueeze(1), mixture.variances.unsqueeze(1), mixture.means, mixture.variances)
    near = (bhattacharyya(*pairs) < threshold).tolist()
    left, groups = list(range(len(near))), []
    while left:
        group = [left.pop(0)]
        while joining := [new for new in left if all(near[new][member] for member in group)]:
            group += joining
            left = [index for index in left if index not in joining]
        groups.append(group)
    return groups


@given(
    components=st.integers(1, 12), threshold=st.sampled_from([0.0, 0.3, 1.0, 3.0, math.inf]), seed=st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_a_seed_and_all_that_is_near_it_are_algorithm_1(components: int, threshold: float, seed: int) -> None:
    mixture = random_mixture(seed, components, 2)
    assert group_components(mixture.means, mixture.variances, threshold) == as_written(mixture, threshold)


def test_fusion() -> None:
    """gfpl.md, fact 4: mean (3, 1.5), diagonal (4.75, 2.0), deviations (2.179449, 1.414214), weight 4."""
    parts = Mixture(tensor(1, 3), tensor((0, 0), (4, 2)), tensor((1, 2), (2, 1)))
    fused = fuse_components(parts, [[0, 1]])
    assert fused.weights.tolist() == [4.0]
    assert fused.means.tolist() == [[3.0, 1.5]]
    assert fused.variances.tolist() == [[4.75, 2.0]]
    assert fused.variances.sqrt()[0].tolist() == close(2.179449, 1.414214)


@given(
    clients=st.integers(1, 4),
    components=st.integers(1, 3),
    threshold=st.sampled_from([0.0, 0.5, 2.0, 20.0, math.inf]),
    per_dimension=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_fusion_keeps_weight_mean_and_second_moment(
    clients: int, components: int, threshold: float, per_dimension: bool, seed: int
) -> None:
    """Fact 12, for any threshold; merged never more than uploaded, infinity one, 0 the union itself."""
    uploads = {k: random_mixture(100 * seed + k, components, 3) for k in range(clients)}
    counts = {k: float(k + 1) for k in range(clients)}
    fused = fuse_mixtures(uploads, counts, threshold, per_dimension=per_dimension)
    total = sum(counts.values())
    expected = [
        sum(counts[k] * moment for k, moment in enumerate(parts)) / total
        for parts in zip(*(moments(uploads[k]) for k in range(clients)), strict=True)
    ]
    for found, wanted in zip(moments(fused), expected, strict=True):
        assert torch.allclose(found, torch.as_tensor(wanted), rtol=1e-9)
    number = len(fused.weights)
    assert number <= clients * components
    assert (fused.weights > 0).all() and (fused.variances > 0).all()
    if threshold == 0:
        assert torch.equal(fused.means, torch.cat([uploads[k].means for k in range(clients)]))
    if threshold == math.inf:
        assert number == 1


def test_fusion_does_not_depend_on_who_answered_first() -> None:
    uploads = {k: random_mixture(k, 3, 2) for k in (3, 1, 8)}
    counts = {3: 5.0, 1: 2.0, 8: 9.0}
    expected = fuse_mixtures(uploads, counts, 1.0)
    assert 1 < len(expected.weights) < 9  # some merge, some do not
    for order in itertools.permutations(uploads):
        found = fuse_mixtures({k: uploads[k] for k in order}, {k: counts[k] for k in order}, 1.0)
        assert torch.equal(found.weights, expected.weights)
        assert torch.equal(found.means, expected.means)
        assert torch.equal(found.variances, expected.variances)


def test_what_is_packed_is_what_is_unpacked() -> None:
    """Deviations travel, variances come out: 4 and 9 as 2 and 3; counts of the classes that are there."""
    first = Mixture(torch.tensor([0.25, 0.75]), torch.tensor([[0.0], [1.0]]), torch.tensor([[4.0], [9.0]]))
    second = Mixture(torch.ones(1), torch.full((1, 1), 5.0), torch.full((1, 1), 0.25))
    payload = pack_mixtures({7: second, 2: first}, torch.arange(10) * 10, 1)
    assert payload.classes.tolist() == [2, 7]
    assert payload.components.tolist() == [2, 1]
    assert payload.deviations.flatten().tolist() == [2.0, 3.0, 0.5]
    assert payload.counts is not None and payload.counts.tolist() == [20, 70]
    found = unpack_mixtures(payload)
    assert list(found) == [2, 7]
    for mixture, expected in ((found[2], first), (found[7], second)):
        assert torch.equal(mixture.weights, expected.weights)
        assert torch.equal(mixture.means, expected.means)
        assert torch.equal(mixture.variances, expected.variances)


def test_no_mixture_at_all() -> None:
    payload = pack_mixtures({}, torch.arange(10), 3)
    assert payload.means.shape == payload.deviations.shape == (0, 3)
    assert unpack_mixtures(payload) == {} == fuse_uploads({0: payload, 4: payload}, 1.0)


def test_draws_have_the_moments_of_the_mixture() -> None:
    """gfpl.md, fact 6: weights (0.75, 0.25), means 0, 4, variances 1, 2: mean 1, variance 4.25.

    Of 100,000 draws the mean has a standard error of sqrt(4.25/1e5) = 0.0065, the variance of about 0.02.
    """
    mixture = Mixture(torch.tensor([0.75, 0.25]), torch.tensor([[0.0], [4.0]]), torch.tensor([[1.0], [2.0]]))
    _, mean, second = moments(mixture)
    assert (mean.item(), (second - mean.square()).item()) == (1.0, 4.25)
    draws = sample_mixture(mixture, 100_000, torch_stream(0, "draw"))
    assert draws.shape == (100_000, 1)
    assert draws.mean().item() == pytest.approx(1.0, abs=0.03)
    assert draws.var().item() == pytest.approx(4.25, abs=0.1)
    # A quarter of the draws comes from the second component (above 2: 0.75·0.0228 + 0.25·0.9214 = 0.2474).
    assert (draws > 2).float().mean().item() == pytest.approx(0.2474, abs=0.006)
