"""Class means and their mean over clients (baselines.md section 15)."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.messages import Prototypes
from flcore.prototypes import average_prototypes, class_means


def prototypes(*rows: float | None) -> Prototypes:
    """One dimension; None for a class without prototype."""
    means = torch.tensor([[0.0 if row is None else row] for row in rows])
    return Prototypes(means, torch.tensor([row is not None for row in rows]))


def test_class_means() -> None:
    """Class 0: ((1,2) + (3,4))/2 = (2,3); class 2: (5,6); class 1 has no sample."""
    features = torch.tensor([[1.0, 2.0], [5.0, 6.0], [3.0, 4.0]])
    found = class_means(features, torch.tensor([0, 2, 0]), 4)
    assert found.means.tolist() == [[2, 3], [0, 0], [5, 6], [0, 0]]
    assert found.present.tolist() == [True, False, True, False]


def test_a_client_with_a_single_class() -> None:
    found = class_means(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1]), 3)
    assert found.present.tolist() == [False, True, False]
    assert found.means[1].item() == 1.5


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


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50)), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_means_of_any_samples(samples: list[tuple[int, int]]) -> None:
    labels = torch.tensor([label for label, _ in samples])
    features = torch.tensor([[float(value)] for _, value in samples])
    found = class_means(features, labels, 4)
    for c in range(4):
        own = [value for label, value in samples if label == c]
        assert bool(found.present[c]) == bool(own)
        expected = sum(own) / len(own) if own else 0.0
        assert abs(found.means[c].item() - expected) < 1e-5
