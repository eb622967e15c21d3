"""Heads from sums: a line of four samples by hand, the wire, what sums do not see (protolda.md sections 1 and 3)."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.math.prototypes.discriminant import (
    NEVER,
    ClassSums,
    Margins,
    Wire,
    add_sums,
    cross_validated,
    directions,
    discriminant,
    discriminant_sums,
    head,
    next_block,
    pack_sums,
    reweighted,
    ridge,
    solved,
    standardised_products,
    unpack_sums,
)

# One feature: class 0 has 0 and 2, class 1 has 4 and 6. Mean 3, variance (9 + 1 + 1 + 9)/4 = 5; standardised class
# means ∓2/√5, so that the variance within is 1 - (4/5 + 4/5)/2 = 1/5.
LINE = discriminant_sums(torch.tensor([[0.0], [2.0], [4.0], [6.0]]), torch.tensor([0, 0, 1, 1]), 2)


def some_sums(seed: int, number: int = 60, dim: int = 7, classes: int = 4) -> ClassSums:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (number,), generator=generator)
    features = torch.rand(number, dim, generator=generator) + labels.unsqueeze(1) / 5
    return discriminant_sums(features, labels, classes)


def test_a_sample_with_a_weight_counts_as_often() -> None:
    """Class 1 with weight 2 is class 1 twice."""
    rows, labels = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([0, 1])
    found = discriminant_sums(rows, labels, 2, torch.tensor([1.0, 2.0]))
    twice = discriminant_sums(rows[[0, 1, 1]], labels[[0, 1, 1]], 2)
    for name in ("counts", "sums", "second"):
        assert torch.equal(getattr(found, name), getattr(twice, name))


def test_the_discriminant_of_a_line() -> None:
    """λ = 0.3: (1/5 + 0.3)⁻¹ = 2, so w = ∓4/√5, for features as they are ∓4/5.

    b = log ½ − (2/√5)(4/√5)/2 = log ½ − 0.8, less w·3: log ½ + 1.6 and log ½ − 3.2. The classes meet at 3.
    """
    weight, bias = discriminant(LINE, 0.3)
    assert weight.flatten().tolist() == pytest.approx([-0.8, 0.8])
    assert bias.tolist() == pytest.approx([math.log(0.5) + 1.6, math.log(0.5) - 3.2])


def test_ridge_of_a_line() -> None:
    """cov(z, y) = ½·(∓2/√5); λ = 0.25: divided by 1.25 it is ∓0.8/√5, for features as they are ∓0.16; ½ ± 0.16·3."""
    weight, bias = ridge(LINE, 0.25)
    assert weight.flatten().tolist() == pytest.approx([-0.16, 0.16])
    assert bias.tolist() == pytest.approx([0.98, 0.02])


def test_cross_validation_of_a_line() -> None:
    """Residual 0.5 − 0.4(1 + 2λ)/(1 + λ)², tr H = 1/(1 + λ) and one for the mean, of 4 samples.

    λ = 1: 0.2/(1 − 1.5/4)² = 0.512; 0.3: 0.121302/0.311021 = 0.390; 0.1: 0.103306/0.273244 = 0.378; near 0:
    0.1/0.25 = 0.4.
    """
    assert cross_validated(LINE, [1e-5, 0.1, 0.3, 1.0]) == 0.1
    assert cross_validated(LINE, [1e-5, 1.0]) == 1e-5
    assert cross_validated(LINE, [0.3, 1e-5]) == 0.3


def test_cross_validation_is_leave_one_out_on_average() -> None:
    """With one λ the score's numerator is the mean squared residual of the ridge regression itself."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (40,), generator=generator)
    features = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    totals = discriminant_sums(features, labels, 3)

    def score(shrinkage: float) -> float:
        weight, bias = ridge(totals, shrinkage)
        wanted = torch.nn.functional.one_hot(labels, 3).double()
        residual = (wanted - features @ weight.mT - bias).square().sum(1).mean()
        standard = (features - features.mean(0)) / features.std(0, unbiased=False)
        gram = standard.mT @ standard / 40
        trace = torch.linalg.solve(gram + shrinkage * torch.eye(5, dtype=torch.float64), gram).trace() + 1
        return float(residual / (1 - trace / 40) ** 2)

    grid = [1e-3, 1e-2, 0.1, 1.0]
    assert cross_validated(totals, grid) == min(grid, key=score)


def test_classes_without_samples_never_answer() -> None:
    totals = discriminant_sums(torch.tensor([[0.0], [2.0], [4.0], [6.0]]), torch.tensor([0, 0, 2, 2]), 4)
    for weight, bias in (discriminant(totals, 0.3), ridge(totals, 0.3)):
        assert weight[[1, 3]].abs().max() == 0
        assert bias[[1, 3]].tolist() == [NEVER, NEVER]
        assert (torch.tensor([[0.0], [6.0]], dtype=torch.float64) @ weight.mT + bias).argmax(1).tolist() == [0, 2]


def test_a_feature_that_never_changes_is_left_out() -> None:
    features = torch.tensor([[0.0, 7.0], [2.0, 7.0], [4.0, 7.0], [6.0, 7.0]])
    weight, bias = discriminant(discriminant_sums(features, torch.tensor([0, 0, 1, 1]), 2), 0.3)
    assert weight[:, 1].tolist() == [0, 0]
    assert weight[:, 0].tolist() == pytest.approx([-0.8, 0.8])
    assert bias.tolist() == pytest.approx([math.log(0.5) + 1.6, math.log(0.5) - 3.2])


def test_a_moment_that_noise_made_indefinite_is_solved_all_the_same() -> None:
    totals = some_sums(1)
    noisy = ClassSums(totals.counts, totals.sums, totals.second - 12 * torch.eye(7, dtype=torch.float64))
    weight, bias = discriminant(noisy, 1e-6)
    assert torch.isfinite(weight).all() and torch.isfinite(bias).all()


def test_eigenvalues_that_noise_made_negative_count_as_nothing() -> None:
    """Variances 1 and a covariance of 1.45, which noise alone can be: eigenvalues 2.45 and, along (1, −1), −0.45.

    Class means ±0.1·(1, −1) lie along the second. With λ = 0.5 ridge divides half of them by 0 + 0.5, not by 0.05:
    0.1. Within classes it is −0.45 − 2·0.1² = −0.47, and w = 0.1/0.5 = 0.2; b = log ½ − 2·0.1·0.2/2.
    """
    means, covariance = torch.tensor([[0.1, -0.1], [-0.1, 0.1]]), torch.tensor([[1, 1.45], [1.45, 1]])
    totals = ClassSums(torch.ones(2).double(), means.double(), 2 * covariance.double())
    weight, bias = ridge(totals, 0.5, noisy=True)
    torch.testing.assert_close(weight, means.double())
    assert bias.tolist() == [0.5, 0.5]
    weight, bias = discriminant(totals, 0.5, noisy=True)
    torch.testing.assert_close(weight, 2 * means.double())
    assert bias.tolist() == pytest.approx([math.log(0.5) - 0.02] * 2)


def test_other_class_shares() -> None:
    """log ¾ − log ½ and log ¼ − log ½; a class that the client never saw, or nobody told of, does not answer."""
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = reweighted(bias, torch.tensor([2.0, 2.0, 0.0, 0.0]), torch.tensor([3.0, 1.0, 0.0, 0.0]))
    assert found.tolist() == pytest.approx([1 + math.log(1.5), 2 - math.log(2), NEVER, NEVER])
    found = reweighted(bias[:3], torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert found.tolist() == pytest.approx([1 + math.log(2), NEVER, 3.0])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=30, max_size=30), st.permutations(range(6)))
def test_a_division_does_not_matter(owners: list[int], order: list[int]) -> None:
    """Whoever owns the samples, and whoever answers first: the same head to 1e-9."""
    generator = torch.Generator().manual_seed(11)
    features, labels = torch.rand(30, 6, generator=generator), torch.arange(30) % 3
    own = torch.tensor(owners)
    parts = [discriminant_sums(features[own == client], labels[own == client], 3) for client in order]
    whole = discriminant(discriminant_sums(features, labels, 3), 0.01)
    divided = discriminant(add_sums(parts, ClassSums.nothing(3, 6)), 0.01)
    for one, other in zip(whole, divided, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_what_is_taken_off_was_never_there() -> None:
    first, second = some_sums(1), some_sums(2)
    left = (first + second) - second
    for one, other in zip(discriminant(left, 0.01), discriminant(first, 0.01), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_what_travels() -> None:
    """C = 4 with three classes held, D = 7: 21 off the diagonal, 28 with it."""
    totals = discriminant_sums(torch.rand(9, 7, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3, 4)
    shapes = {
        wire: {name: tuple(value.shape) for name, value in pack_sums(totals, wire).items()} for wire in get_args(Wire)
    }
    held = {"classes": (3,), "counts": (3,), "sums": (3, 7)}
    assert shapes["float64"] == {**held, "second": (28,)}
    assert shapes["float32"] == shapes["float16"] == {**held, "variances": (7,), "correlations": (21,)}
    assert shapes["int8"] == {**held, "variances": (7,), "factor": (28,), "scales": (7,)}
    kinds = {wire: pack_sums(totals, wire) for wire in get_args(Wire)}
    assert kinds["float16"]["correlations"].dtype == torch.float16
    assert kinds["int8"]["factor"].dtype == torch.int8


@pytest.mark.parametrize(
    ("wire", "tolerance"), [("float64", 0.0), ("float32", 1e-5), ("float16", 1e-3), ("int8", 0.02)]
)
@pytest.mark.parametrize("number", [60, 3])
def test_what_arrives(wire: Wire, tolerance: float, number: int) -> None:
    """Counts exactly, variances and sums to float32, correlations to the wire's step: also of fewer samples than D.

    An entry of a factor is wrong by at most half a step of 1/127: a correlation, a product of two unit rows of 7
    entries, by at most about √7/127 = 0.02 of its scale.
    """
    sums = some_sums(5, number)
    found = unpack_sums(pack_sums(sums, wire), 4)
    assert torch.equal(found.counts, sums.counts)
    torch.testing.assert_close(found.sums, sums.sums, rtol=1e-6, atol=0)
    mean = sums.sums.sum(0) / number
    deviation = (sums.second.diagonal() - number * mean.square()).sqrt()
    wrong = (found.second - sums.second).abs() / torch.outer(deviation, deviation)
    assert float(wrong.max()) <= tolerance + (1e-5 if wire != "float64" else 0)


def test_a_factor_of_eight_bits_stays_positive() -> None:
    """Sums of what arrives have no negative eigenvalue, of few samples neither."""
    for seed in range(5):
        found = unpack_sums(pack_sums(some_sums(seed, 4, dim=20), "int8"), 4)
        mean = found.sums.sum(0) / 4
        about = found.second - 4 * torch.outer(mean, mean)
        assert float(torch.linalg.eigvalsh(about).min()) > -0.05 * float(about.diagonal().max())


def test_what_noise_left_without_a_factor_arrives_as_its_nearest() -> None:
    """Variances 1, 4 and −1 (which is sent as 0), n = 1 about the mean 0; covariances 4 of the first two, 3 and 5.

    The correlation 4/(1·2) = 2 has the eigenvalues 3 and −1: of the first alone 1.5 remains everywhere, and on a
    diagonal of 1 the correlation 1. So 2 of the covariance arrives; of the third feature nothing.
    """
    second = torch.tensor([[1.0, 4, 3], [4, 4, 5], [3, 5, -1]]).double()
    sums = ClassSums(torch.ones(1).double(), torch.zeros(1, 3).double(), second)
    found = unpack_sums(pack_sums(sums, "int8"), 1).second
    torch.testing.assert_close(found, torch.tensor([[1.0, 2, 0], [2, 4, 0], [0, 0, 0]]).double())


def test_one_sample_has_no_correlations() -> None:
    """Its variances are 0: what arrives is f fᵀ."""
    feature = torch.tensor([[1.0, 2.0, 3.0]])
    for wire in get_args(Wire):
        found = unpack_sums(pack_sums(discriminant_sums(feature, torch.tensor([1]), 2), wire), 2)
        torch.testing.assert_close(found.second, torch.outer(feature[0], feature[0]).double(), rtol=1e-6, atol=1e-5)


# A head from products with the second moment: the direct solution once all directions are there (protolda.md).


def data(dim: int = 12, classes: int = 3) -> tuple[ClassSums, Margins]:
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(90) % classes
    mixing = torch.randn(dim, dim, generator=generator)
    features = torch.rand(90, dim, generator=generator) @ mixing + labels.unsqueeze(1) / 3
    totals = discriminant_sums(features, labels, classes)
    return totals, totals.margins


def exchanged(totals: ClassSums, margins: Margins, blocks: int, shrinkage: float) -> tuple[list[float], torch.Tensor]:
    """Residuals by block, and the last solution."""
    means = margins.class_means
    first = float(torch.linalg.matrix_norm(means, 2))
    basis = torch.zeros(means.shape[1], 0, dtype=torch.float64)
    products, residual, left = basis, means.mT, []
    for _ in range(blocks):
        block = next_block(basis, residual, first)
        vectors = directions(block, margins)
        found = standardised_products(vectors, totals.second @ vectors, margins)
        basis, products = torch.cat([basis, block], 1), torch.cat([products, found], 1)
        solution, residual = solved(basis, products, margins, shrinkage)
        left.append(float(torch.linalg.matrix_norm(residual, 2)) / first)
    return left, solution


def test_all_directions_give_the_direct_solution() -> None:
    """12 features, class means of rank 2: after six blocks of two there is nothing else.

    The energy of the error falls with each block; the residual's size need not.
    """
    totals, margins = data()
    left, solution = exchanged(totals, margins, 6, 0.01)
    assert left[0] > 1e-3 and left[-1] < 1e-8
    for found, expected in zip(head(solution, margins), discriminant(totals, 0.01), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_directions_that_travel_rounded_do_no_harm() -> None:
    """What is solved is solved for the directions that arrived."""
    totals, margins = data()
    block = next_block(torch.zeros(12, 0, dtype=torch.float64), margins.class_means.mT, 1.0)
    sent = directions(block, margins).half().double()
    arrived = sent * margins.scale.unsqueeze(1)
    products = standardised_products(sent, totals.second @ sent, margins)
    standard = totals.second / 90 - torch.outer(margins.mean, margins.mean)
    covariance = standard / torch.outer(margins.scale, margins.scale)
    torch.testing.assert_close(products, covariance @ arrived, rtol=1e-9, atol=1e-9)


def test_nothing_is_asked_for_twice() -> None:
    _, margins = data()
    block = next_block(torch.zeros(12, 0, dtype=torch.float64), margins.class_means.mT, 1.0)
    assert block.shape == (12, 2)  # three means around their mean
    assert next_block(block, block @ torch.ones(2, 3, dtype=torch.float64), 1.0).shape == (12, 0)


def test_negative_eigenvalues_count_as_nothing_in_blocks_too() -> None:
    """Class means ±0.1·(1, −1), along which T has −0.45 and S_w −0.47 (as above): 0.1/0.5, not 0.1/0.03."""
    means = torch.tensor([[0.1, -0.1], [-0.1, 0.1]]).double()
    margins = Margins(torch.ones(2).double(), means, 2 * torch.ones(2).double())
    basis = torch.tensor([[2.0], [-2.0]]).double()
    solution, _ = solved(basis, -0.45 * basis, margins, 0.5, noisy=True)
    torch.testing.assert_close(solution, 2 * means)
    exact, _ = solved(basis, -0.45 * basis, margins, 0.5)
    torch.testing.assert_close(exact, means / 0.03)


@pytest.mark.parametrize("blocks", [1, 4, 6])
def test_where_noise_left_nothing_negative_the_solution_is_the_same(blocks: int) -> None:
    totals, margins = data()
    basis, means = torch.zeros(12, 0, dtype=torch.float64), margins.class_means
    for seed in range(blocks):
        found = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        basis = torch.cat([basis, next_block(basis, found, 1.0)], 1)
    products = standardised_products(directions(basis, margins), totals.second @ directions(basis, margins), margins)
    plain, noisy = (solved(basis, products, margins, 0.01, noisy=noisy)[0] for noisy in (False, True))
    torch.testing.assert_close(plain, noisy, rtol=1e-7, atol=1e-7)
    assert plain.shape == means.mT.shape
