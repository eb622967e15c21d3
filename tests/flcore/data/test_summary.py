"""The table of a partition, its skew by hand, and the stage that makes partitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flcore.config.schema import Config
from flcore.data.dataset import Dataset
from flcore.data.dividing import make_partition
from flcore.data.imbalance import Imbalance
from flcore.data.partitioners.classes_per_client import ClassesPerClient
from flcore.data.partitioners.simple import Shards
from flcore.data.summary import skew, summarise_partition
from pipelines.stages.partition import partition, partition_table
from pipelines.stages.prepare import prepare


def test_table_by_hand(with_labels: Callable[..., Dataset]) -> None:
    """Two clients with a class each: distance 1; |1 - 1/2| + |0 - 1/2| = 1; half of the classes is missing."""
    data = with_labels(np.arange(20) % 2, np.arange(8) % 2, 2)
    made = make_partition(data, ClassesPerClient(classes=1), num_clients=2, seed=0)
    assert summarise_partition(made) == [
        ("clients", "2"),
        ("training samples", "20; per client 10 / 10 / 10"),
        ("classes per client", "1 / 1 / 1 of 2"),
        ("test samples", "per client 2 / 2 / 2"),
        ("missing classes", "50.0 % of all, mean over clients"),
        ("Jensen-Shannon distance", "1.000, mean over pairs of clients (0 to 1)"),
        ("earth mover's distance", "1.000 to all clients together, mean (0 to 2)"),
    ]


def test_table_of_a_long_tail_with_tasks(with_labels: Callable[..., Dataset]) -> None:
    """100, 50 and 25 samples (gamma 0.25), a client with two tasks: all in the first and nothing new, or the like."""
    data = with_labels(np.arange(300) % 3, np.arange(30) % 3, 3)
    made = make_partition(
        data, Shards(shards=1, tasks=2), num_clients=2, seed=0, validation=0.1, imbalance=Imbalance(0.25)
    )
    rows = dict(summarise_partition(made))
    assert rows["samples per class"] == "25 / 50 / 100" and rows["minority classes"] == "2"
    assert rows["tasks per client"] == "2" and rows["new classes by task"].count(",") == 1
    lines = partition_table(made)
    assert len({line.index(rows[name]) for name, line in zip(rows, lines, strict=True)}) == 1


def test_the_stage_divides_for_each_seed_and_leaves_nothing_else(tmp_path: Path) -> None:
    config = Config.from_mapping({"data": {"limit_per_class": 30}, "partition": {"num_clients": 4, "alpha": 1.0}})
    prepare(config, tmp_path / "prepared")
    place = tmp_path / "partitions"
    made = partition(config, [0, 1], tmp_path / "prepared", place)
    assert {path.name for path in place.iterdir()} == {"seed-0", "seed-1"}
    assert made[0].fingerprint != made[1].fingerprint
    files = {path.name: path.read_bytes() for path in (place / "seed-1").iterdir()}
    assert files.keys() == {"indices.safetensors", "manifest.json"}
    partition(config, [1], tmp_path / "prepared", place)
    assert [path.name for path in place.iterdir()] == ["seed-1"]
    assert {path.name: path.read_bytes() for path in (place / "seed-1").iterdir()} == files


# Skew measures against numbers computed by hand.


def test_equal_and_disjoint_clients_are_the_two_ends() -> None:
    """Equal distributions have distance 0; disjoint ones divergence of 1 bit, distance 1."""
    equal = skew(np.array([[5, 5], [50, 50]]))
    assert equal.js_distance == pytest.approx(0, abs=1e-7) and equal.missing_class_share == 0
    disjoint = skew(np.array([[5, 0, 0], [0, 7, 0], [0, 0, 1]]))
    assert disjoint.js_distance == pytest.approx(1) and disjoint.missing_class_share == pytest.approx(2 / 3)


def test_skew_by_hand() -> None:
    """(1, 0) and (1/2, 1/2): the mixture (3/4, 1/4) has entropy 2 - 0.75 log2(3) = 0.811278 bits.

    Divergence 0.811278 - (0 + 1)/2 = 0.311278, distance 0.557923. One of four entries is zero.
    """
    measured = skew(np.array([[4, 0], [3, 3]]))
    assert measured.js_distance == pytest.approx(0.557923, abs=1e-6)
    assert measured.missing_class_share == 0.25


def test_empty_clients_are_left_out_and_one_client_has_no_distance() -> None:
    assert skew(np.array([[4, 0], [0, 0]])).js_distance == 0
    with pytest.raises(ValueError, match="no client"):
        skew(np.zeros((2, 3), dtype=np.int64))
