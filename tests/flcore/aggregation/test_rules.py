"""Median and trimmed mean: by hand, and the law that a few bad clients cannot leave the range of the honest ones."""

from __future__ import annotations

import pytest
import torch

from flcore.aggregation.mean import coordinate_median, robust, trimmed_count, trimmed_mean
from flcore.aggregation.settings import Aggregation

T = torch.tensor


def test_the_median_by_hand() -> None:
    """Column 0 of five: 1 2 3 9 100, the third. Column 1: -7 0 0 4 5, the third. Of four the mean of the middle two."""
    five = T([[9.0, 0.0], [1.0, 5.0], [100.0, -7.0], [2.0, 4.0], [3.0, 0.0]])
    assert coordinate_median(five).tolist() == [3, 0]
    assert coordinate_median(five[:4]).tolist() == [(2 + 9) / 2, (0 + 4) / 2]
    assert coordinate_median(five[:1]).tolist() == [9, 0]


def test_the_trimmed_mean_by_hand() -> None:
    """1 2 3 9 100 without the ends: (2 + 3 + 9)/3; of four with one left out at either end: (2 + 9)/2."""
    five = T([[9.0], [1.0], [100.0], [2.0], [3.0]])
    assert trimmed_mean(five, 0.2).tolist() == [14 / 3]
    assert trimmed_mean(five, 0.4).tolist() == [3]
    assert trimmed_mean(five[:4], 0.1).tolist() == [(2 + 9) / 2]
    assert trimmed_mean(five[:2], 0.4).tolist() == [5]


@pytest.mark.parametrize(
    ("clients", "share", "cut"),
    [(10, 0.1, 1), (10, 0.2, 2), (10, 0.25, 3), (5, 0.1, 1), (100, 0.07, 7), (4, 0.49, 1), (3, 0.1, 1), (2, 0.4, 0),
     (1, 0.4, 0)],
)  # fmt: skip
def test_a_share_is_rounded_up_as_long_as_something_remains(clients: int, share: float, cut: int) -> None:
    assert trimmed_count(clients, share) == cut


@pytest.mark.parametrize(
    "how", [Aggregation("median"), Aggregation("trimmed_mean", 0.3), Aggregation("trimmed_mean", 0.1)], ids=str
)
def test_bad_clients_cannot_leave_the_range_of_the_honest_ones(how: Aggregation) -> None:
    """Whatever up to ⌈m/2⌉ - 1, or ⌈βm⌉, of m clients send; one more, if they agree, carry it away."""
    generator = torch.Generator().manual_seed(20261123)

    def folded(bad: torch.Tensor, honest: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(len(bad) + len(honest), generator=generator)
        return robust(torch.cat([bad, honest])[order], how).float()

    for clients in range(3, 25):
        most = (clients - 1) // 2 if how.rule == "median" else trimmed_count(clients, how.trim)
        for count in range(most + 1):
            honest = 10 * torch.randn(clients - count, 50, generator=generator)
            sizes = 10.0 ** torch.randint(-3, 30, (count, 50), generator=generator)
            found = folded(sizes * torch.randn(count, 50, generator=generator), honest)
            assert bool(((found >= honest.amin(dim=0)) & (found <= honest.amax(dim=0))).all()), (clients, count)
        honest = 10 * torch.randn(clients - most - 1, 50, generator=generator)
        assert bool((folded(torch.full((most + 1, 50), 1e6), honest) > honest.amax(dim=0)).all()), clients


def test_whoever_has_which_id_plays_no_part() -> None:
    """To the bit: ten clients in three orders."""
    generator = torch.Generator().manual_seed(1)
    sent = torch.randn(10, 1000, generator=generator)
    for how in (Aggregation("median"), Aggregation("trimmed_mean", 0.2)):
        orders = [sent, sent.flip(0), sent[torch.randperm(10, generator=generator)]]
        first, *others = [robust(order, how) for order in orders]
        assert all(torch.equal(first, other) for other in others)
