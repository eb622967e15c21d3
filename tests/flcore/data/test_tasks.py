"""Task streams: schedules, classes that arrive, test sets that grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.core.errors import DataError
from flcore.data.dataset import Dataset
from flcore.data.dividing import make_partition
from flcore.data.partition import Partition
from flcore.data.partitioners.dirichlet import Dirichlet
from flcore.data.partitioners.simple import Iid, Shards
from flcore.data.tasks import TaskSchedule, cumulative_tests, new_classes, task_of_round

bounded = settings(max_examples=60, deadline=None, derandomize=True)


def test_schedules_by_hand() -> None:
    assert [task_of_round(r, "cyclic", 3, 7) for r in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert [task_of_round(r, "blocked", 3, 7) for r in range(1, 8)] == [0, 0, 0, 1, 1, 2, 2]
    # FedMLP: 250 rounds, 5 tasks, 50 rounds each.
    assert [task_of_round(r, "blocked", 5, 250) for r in (1, 50, 51, 250)] == [0, 0, 1, 4]


@bounded
@given(rounds=st.integers(1, 60), tasks=st.integers(1, 60), schedule=st.sampled_from(("cyclic", "blocked")))
def test_every_task_gets_its_share_of_rounds(rounds: int, tasks: int, schedule: TaskSchedule) -> None:
    if tasks > rounds:
        with pytest.raises(ValueError, match="every task needs a round"):
            task_of_round(1, schedule, tasks, rounds)
        return
    met = [task_of_round(r, schedule, tasks, rounds) for r in range(1, rounds + 1)]
    lengths = np.bincount(met, minlength=tasks)
    assert lengths.min() >= 1 and np.ptp(lengths) <= 1
    if schedule == "blocked":
        assert met == sorted(met)


@pytest.mark.parametrize("number", [0, 11])
def test_rounds_are_counted_from_one(number: int) -> None:
    with pytest.raises(ValueError, match="must be from 1 to 10"):
        task_of_round(number, "cyclic", 2, 10)


def test_new_classes_by_hand() -> None:
    counts = np.array([[0, 2, 1, 0], [3, 1, 0, 0], [0, 0, 4, 0], [0, 0, 0, 1]])
    assert new_classes(counts) == [(1, 2), (0,), (), (3,)]


def test_cumulative_tests_by_hand() -> None:
    """Labels of the client's test samples 3, 5, 6, 8: 0, 1, 2, 1; tasks bring class 1, then 0, then nothing new."""
    labels = np.array([9, 9, 9, 0, 9, 1, 2, 9, 1])
    counts = np.zeros((3, 10), dtype=np.int64)
    counts[0, 1] = counts[1, 0] = counts[2, 1] = 5
    found = cumulative_tests(np.array([3, 5, 6, 8]), labels, counts)
    assert [part.tolist() for part in found] == [[5, 8], [3, 5, 8], [3, 5, 8]]


@pytest.mark.parametrize("partitioner", [Shards(tasks=4), Dirichlet(variant="plain", tasks=4)], ids=["shards", "dda"])
def test_task_cumulative_tests_of_a_partition(
    partitioner: Shards | Dirichlet, with_labels: Callable[..., Dataset], tmp_path: Path
) -> None:
    test_labels = np.arange(200) % 10
    data = with_labels(np.arange(800) % 10, test_labels, 10)
    made = make_partition(data, partitioner, num_clients=5, seed=0, client_test="task_cumulative", validation=0.1)
    slices = make_partition(data, partitioner, num_clients=5, seed=0, client_test="label_slices", validation=0.1)
    for client, plain, counts in zip(made.clients, slices.clients, made.task_counts, strict=True):
        assert np.array_equal(client.test, plain.test) and plain.task_tests == ()
        assert np.array_equal(client.task_tests[-1], client.test)
        for t, test in enumerate(client.task_tests):
            classes = set(np.flatnonzero(counts[: t + 1].sum(axis=0)))
            assert set(test_labels[test]) == classes
            assert t == 0 or set(client.task_tests[t - 1]) <= set(test)
    made.save(tmp_path)
    read = Partition.load(tmp_path)
    assert read.num_tasks == 4 and np.array_equal(read.task_counts, made.task_counts)
    for a, b in zip(read.clients, made.clients, strict=True):
        assert [key for key, _ in a.arrays()] == [key for key, _ in b.arrays()]
        assert "task/03/test" in dict(a.arrays())
        assert all(np.array_equal(x, y) for x, y in zip(a.task_tests, b.task_tests, strict=True))


def test_task_cumulative_needs_tasks(with_labels: Callable[..., Dataset]) -> None:
    with pytest.raises(
        DataError, match=r"clients have no tasks; use shards or dirichlet with partition\.tasks above 1"
    ):
        make_partition(
            with_labels(np.arange(40) % 2, np.arange(8) % 2, 2), Iid(), num_clients=2, seed=0,
            client_test="task_cumulative",
        )  # fmt: skip


def test_validation_leaves_every_task_its_classes(with_labels: Callable[..., Dataset]) -> None:
    data = with_labels(np.arange(200) % 10, np.arange(20) % 10, 10)
    whole = make_partition(data, Dirichlet(alpha=0.3, variant="plain", tasks=3), num_clients=4, seed=0)
    cut = make_partition(data, Dirichlet(alpha=0.3, variant="plain", tasks=3), num_clients=4, seed=0, validation=0.5)
    assert np.array_equal(whole.task_counts > 0, cut.task_counts > 0)
    assert cut.task_counts.sum() < whole.task_counts.sum()


def test_sharding_as_fedmlp_has_it(with_labels: Callable[..., Dataset]) -> None:
    """CIFAR-10's 50,000 labels, 100 tasks of 2 shards of 250: 500 each, at most 4 classes, about 2.0 and 6.6 (2.5)."""
    data = with_labels(np.arange(50_000) % 10, np.arange(1000) % 10, 10)
    per_task, per_client = [], []
    for seed in range(5):
        made = make_partition(data, Shards(shards=2, tasks=5), num_clients=20, seed=seed)
        assert (made.task_counts.sum(axis=2) == 500).all() and (made.task_counts > 0).sum(axis=2).max() <= 4
        per_task.append((made.task_counts > 0).sum(axis=2).mean())
        per_client.append((made.counts > 0).sum(axis=1).mean())
    assert np.mean(per_task) == pytest.approx(1.9, abs=0.1)  # two of 200 shards are of one class with probability 0.096
    assert np.mean(per_client) == pytest.approx(6.6, abs=0.3)
