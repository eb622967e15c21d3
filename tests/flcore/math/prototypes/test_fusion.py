"""Prototypes of many clients into one per class, weighted or not (baselines.md section 15)."""

from __future__ import annotations

import itertools

import torch

from flcore.io.messages import Prototypes
from flcore.math.prototypes.class_means import average_prototypes, fuse_prototypes, weighted_class_means

T = torch.tensor


def test_prototypes_by_sample_counts() -> None:
    """fedpa.md fact 3: (30·(1,3) + 10·(4,0))/40 = (1.75, 2.25); unweighted (2.5, 1.5)."""
    means = T([[[1.0, 3.0]], [[4.0, 0.0]]])
    assert weighted_class_means(means, T([[30], [10]]))[0].tolist() == [[1.75, 2.25]]
    assert weighted_class_means(means, T([[True], [True]]))[0].tolist() == [[2.5, 1.5]]


def test_prototypes_over_those_who_have_the_class() -> None:
    """fedpg.md fact 1; what stands in rows of weight 0 is ignored, even NaN."""
    missing = [float("nan")] * 3
    means = T([[[1.0, 0, 2], missing, missing], [[3.0, 2, 0], [5.0, 6, 7], missing]])
    found, present = weighted_class_means(means, T([[1, 0, 0], [1, 1, 0]]))
    assert found.tolist() == [[2, 1, 1], [5, 6, 7], [0, 0, 0]]
    assert present.tolist() == [True, True, False]


# ---- unweighted, and what nobody uploads ----------------------------------------------------------------------------


def prototypes(*rows: float | None) -> Prototypes:
    """One dimension; None for a class without prototype."""
    means = torch.tensor([[0.0 if row is None else row] for row in rows])
    return Prototypes(means, torch.tensor([row is not None for row in rows]))


def test_clients_count_equally() -> None:
    """Prototypes 1 and 5 give 3, whatever the clients' sizes (n-weighted 100:300 would be 4)."""
    found = average_prototypes({0: prototypes(1.0), 1: prototypes(5.0)}, prototypes(None))
    assert found.means.tolist() == [[3.0]]


def test_each_class_over_those_who_hold_it() -> None:
    """Class 0: (1 + 5)/2; class 1: client 1 alone; class 2: nobody, the last value 7 stays; class 3: nobody ever."""
    uploads = {0: prototypes(1.0, None, None, None), 1: prototypes(5.0, 4.0, None, None)}
    found = average_prototypes(uploads, prototypes(9.0, None, 7.0, None))
    assert found.means.flatten().tolist() == [3.0, 4.0, 7.0, 0.0]
    assert found.present.tolist() == [True, True, True, False]


def test_nobody_answers() -> None:
    previous = prototypes(1.0, None)
    found = average_prototypes({}, previous)
    assert torch.equal(found.means, previous.means)
    assert torch.equal(found.present, previous.present)


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


def test_classes_keep_what_they_had_where_nobody_uploads_them() -> None:
    """1 and 5 with counts 1 and 3: 4. Counts of classes that a client does not upload do not count: class 1 keeps 7."""
    uploads = {3: prototypes(5.0, None), 0: prototypes(1.0, None)}
    counts = {0: torch.tensor([1, 9]), 3: torch.tensor([3, 9])}
    found = fuse_prototypes(uploads, prototypes(9.0, 7.0), counts)
    assert found.means.flatten().tolist() == [4.0, 7.0]
    assert found.present.tolist() == [True, True]
    assert fuse_prototypes(uploads, prototypes(9.0, 7.0)).means.flatten().tolist() == [3.0, 7.0]
