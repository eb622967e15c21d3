"""Long tails: the profiles computed in data.md 2.7, what stays, and what a partition records of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.config.schema import Config
from flcore.core.errors import DataError
from flcore.data.dataset import Dataset
from flcore.data.dividing import make_partition
from flcore.data.imbalance import Imbalance, minority_classes
from flcore.data.partitioners.simple import Iid, Shards

bounded = settings(max_examples=60, deadline=None, derandomize=True)
MNIST = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("gamma", "sizes"),
    [
        (0.5, [5000, 4629, 4286, 3968, 3674, 3401, 3149, 2916, 2700, 2500]),
        (0.05, [5000, 3584, 2569, 1842, 1320, 946, 678, 486, 348, 250]),
        (1.0, [5000] * 10),
    ],
)
def test_profiles_of_cifar10_as_computed_in_the_specification(gamma: float, sizes: list[int]) -> None:
    assert Imbalance(gamma).sizes(np.full(10, 5000), stream()).tolist() == sizes


@pytest.mark.parametrize(
    ("available", "gamma", "total"),
    [
        (np.full(100, 500), 0.5, 36029),
        (np.full(100, 500), 0.05, 15907),
        (np.full(62, 600), 0.5, 26820),
        (np.full(62, 600), 0.05, 11892),
        (MNIST, 1.0, 54210),
        (MNIST, 0.5, 39273),
    ],
)
def test_totals_as_computed_in_the_specification(available: np.ndarray, gamma: float, total: int) -> None:
    assert Imbalance(gamma).sizes(available, stream()).sum() == total


def test_step_profile_makes_half_of_the_classes_small() -> None:
    """Of 5 classes 5 // 2 = 2 are small: 0.1 · 30 = 3, which is 2.9999999999999996 in binary."""
    assert Imbalance(0.1, "step").sizes(np.full(5, 30), stream()).tolist() == [30, 30, 30, 3, 3]
    assert Imbalance(0.5).sizes(np.array([7]), stream()).tolist() == [7]


def test_permuted_classes_keep_the_profile() -> None:
    plain = Imbalance(0.05).sizes(np.full(10, 5000), stream())
    permuted = [Imbalance(0.05, permute_classes=True).sizes(np.full(10, 5000), stream(seed)) for seed in (0, 1)]
    assert sorted(permuted[0], reverse=True) == plain.tolist() != permuted[0].tolist() != permuted[1].tolist()


def test_a_class_that_would_vanish_is_refused() -> None:
    with pytest.raises(DataError, match=r"imbalance_gamma = 0\.05: the smallest class has 19 samples .* raise"):
        Imbalance(0.05).sizes(np.array([30, 19]), stream())
    with pytest.raises(DataError, match="the smallest class has 0 samples"):
        Imbalance(1.0).keep(np.array([0, 0]), 2, stream())


@bounded
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    gamma=st.floats(0.01, 1),
    profile=st.sampled_from(["exp", "step"]),
    permute=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_stays(sizes: list[int], gamma: float, profile: str, permute: bool, seed: int) -> None:
    labels = stream(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    tail = Imbalance(gamma, profile, permute)  # type: ignore[arg-type]
    if gamma * min(sizes) < 1 and len(sizes) > 1:
        with pytest.raises(DataError, match=r"raise partition\.imbalance_gamma"):
            tail.keep(labels, len(sizes), stream(seed))
        return
    kept = tail.keep(labels, len(sizes), stream(seed))
    assert kept.dtype == np.int64 and (np.diff(kept) > 0).all() and kept[-1] < len(labels)
    counts = np.bincount(labels[kept], minlength=len(sizes))
    assert counts.max() == min(sizes) and (counts <= sizes).all()
    if len(sizes) > 1:
        assert abs(counts.min() / counts.max() - gamma) <= 1 / counts.max()
    if not permute:
        assert (np.diff(counts) <= 0).all()
    assert np.array_equal(kept, tail.keep(labels, len(sizes), stream(seed)))


def test_minority_classes_of_mnist_and_of_equal_classes() -> None:
    assert minority_classes(MNIST) == (0, 4, 5, 6, 8)
    assert minority_classes(np.full(10, 7)) == ()
    # 5 // 2 = 2 of them; of the four with 3 samples those with larger numbers.
    assert minority_classes(np.array([3, 3, 9, 3, 3])) == (3, 4)
    # fedmlp.md, facts 4 and 15; a class that nobody holds is the smallest.
    assert minority_classes(np.array([5000, 4629, 4286, 3968, 3674, 3401, 3149, 2916, 2700, 2500])) == (5, 6, 7, 8, 9)
    assert minority_classes(np.array([5421, 5019, 4647, 4302, 3983, 3688, 3415, 3161, 2927, 2710])) == (5, 6, 7, 8, 9)
    assert minority_classes(np.array([7, 0, 9])) == (1,)


def test_other_fractions() -> None:
    """⌊0.29·100⌋ = 29, though 0.29·100 is 28.999... in binary; none at 0, all at 1."""
    counts = np.arange(100, 0, -1)
    assert minority_classes(counts, 0.29) == tuple(range(71, 100))
    assert minority_classes(counts, 0.0) == ()
    assert minority_classes(counts, 1.0) == tuple(range(100))


def test_a_partition_of_a_long_tail(with_labels: Callable[..., Dataset]) -> None:
    """60 in each of 3 classes, gamma 0.25: 60 · 0.25^(0, 1/2, 1) = 60, 30, 15."""
    labels = np.arange(180) % 3
    data = with_labels(labels, np.arange(30) % 3, 3)
    made = make_partition(data, Iid(), num_clients=5, seed=1, imbalance=Imbalance(0.25))
    assert made.class_counts.tolist() == [60, 30, 15] and made.minority_classes == (2,)
    owned = np.concatenate([client.train for client in made.clients])
    assert np.bincount(labels[owned]).tolist() == [60, 30, 15] and made.counts.sum(axis=0).tolist() == [60, 30, 15]
    assert made.parameters["imbalance"] == {"gamma": 0.25, "profile": "exp", "permute_classes": False}
    assert made.test_counts.sum() == 30  # the test set stays as it is
    plain = make_partition(data, Iid(), num_clients=5, seed=1)
    assert plain.class_counts.tolist() == [60] * 3 and plain.minority_classes == ()
    assert plain.parameters["imbalance"] is None and plain.fingerprint != made.fingerprint


def test_tasks_of_a_long_tail_index_the_whole_training_set(with_labels: Callable[..., Dataset]) -> None:
    labels = np.arange(300) % 3
    data = with_labels(labels, np.arange(30) % 3, 3)
    made = make_partition(data, Shards(tasks=4), num_clients=3, seed=1, imbalance=Imbalance(0.5), validation=0.2)
    for client in made.clients:
        assert np.array_equal(np.sort(np.concatenate(client.tasks)), client.train) and len(client.val) > 0
    assert made.task_counts.sum(axis=1).tolist() == made.counts.tolist()


def test_configuration_of_a_long_tail() -> None:
    config = Config.from_mapping({"partition": {"imbalance_gamma": 0.1, "imbalance_profile": "step"}})
    assert config.partition.imbalance == Imbalance(0.1, "step")
    assert Config().partition.imbalance is None
