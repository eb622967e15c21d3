"""A head from products with the second moment: the direct solution once all directions are there (protolda.md)."""

from __future__ import annotations

import pytest
import torch

from flcore.math.prototypes.discriminant import (
    ClassSums,
    Margins,
    directions,
    discriminant,
    discriminant_sums,
    head,
    next_block,
    solved,
    standardised_products,
)


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


def test_eigenvalues_that_noise_made_negative_count_as_nothing() -> None:
    """Class means ±0.1·(1, −1), along which T has −0.45 and S_w −0.47 (test_discriminant.py): 0.1/0.5, not 0.1/0.03."""
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
