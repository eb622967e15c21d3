"""Prototypes of many clients into one per class, weighted or not (baselines.md section 15)."""

from __future__ import annotations

import itertools

import torch

from flcore.io.messages import Prototypes
from flcore.math.prototypes.class_means import average_prototypes, weighted_class_means

T = torch.tensor


def test_prototypes_over_those_who_have_the_class() -> None:
    """fedpg.md fact 1; what stands in rows of weight 0 is ignored, even NaN."""
    missing = [float("nan")] * 3
    means = T([[[1.0, 0, 2], missing, missing], [[3.0, 2, 0], [5.0, 6, 7], missing]])
    found, present = weighted_class_means(means, T([[1, 0, 0], [1, 1, 0]]))
    assert found.tolist() == [[2, 1, 1], [5, 6, 7], [0, 0, 0]]
    assert present.tolist() == [True, True, False]


def prototypes(*rows: float | None) -> Prototypes:
    """One dimension; None for a class without prototype."""
    means = torch.tensor([[0.0 if row is None else row] for row in rows])
    return Prototypes(means, torch.tensor([row is not None for row in rows]))


def test_what_stands_in_absent_rows_is_ignored() -> None:
    dirty = Prototypes(torch.tensor([[8.0], [2.0]]), torch.tensor([False, True]))
    assert average_prototypes({0: dirty}, prototypes(None, None)).means.flatten().tolist() == [0.0, 2.0]


def test_order_of_arrival_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    uploads = {
        k: Prototypes(torch.randn(3, 5, generator=generator), torch.rand(3, generator=generator) < 0.7)
        for k in range(4)
    }
    previous = Prototypes.empty(3, 5)
    expected = average_prototypes(uploads, previous).means
    for order in itertools.permutations(uploads):
        found = average_prototypes({client: uploads[client] for client in order}, previous)
        assert torch.equal(found.means, expected)
