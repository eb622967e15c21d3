"""Divisions made elsewhere: what is read, and everything that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flcore.core.errors import DataError
from flcore.data.dataset import Dataset
from flcore.data.dividing import make_partition
from flcore.data.imbalance import Imbalance
from flcore.data.partition import Partition
from flcore.data.partitioners.imported import Imported


@pytest.fixture
def data(with_labels: Callable[..., Dataset]) -> Dataset:
    """Twelve training and six test samples of three classes."""
    return with_labels(np.arange(12) % 3, np.arange(6) % 3, 3)


def imported(tmp_path: Path, content: Any) -> Imported:
    path = tmp_path / "division.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Imported(path=str(path))


def test_training_indices_alone(data: Dataset, tmp_path: Path) -> None:
    made = make_partition(
        data, imported(tmp_path, {"clients": [{"train": [4, 0, 2]}, {"train": [1]}]}), num_clients=2, seed=0
    )
    assert [client.train.tolist() for client in made.clients] == [[0, 2, 4], [1]]
    assert made.parameters["client_test"] == "label_slices" and made.sizes["test"] == [3, 1]
    assert str(tmp_path) not in json.dumps(made.parameters) and len(made.parameters["options"]["sha256"]) == 64


def test_everything_at_once_and_back_from_disk(data: Dataset, tmp_path: Path) -> None:
    clients = [
        {"train": [0, 1, 3], "val": [5], "test": [2, 0], "tasks": [[3], [0, 1]]},
        {"train": [6, 7], "val": [], "test": [0], "tasks": [[7], [6]]},
    ]
    made = make_partition(data, imported(tmp_path, {"clients": clients}), num_clients=2, seed=0)
    made.save(tmp_path / "partition")
    read = Partition.load(tmp_path / "partition")
    assert read.fingerprint == made.fingerprint and read.test_source == "test"
    first = read.clients[0]
    assert (first.train.tolist(), first.val.tolist(), first.test.tolist()) == ([0, 1, 3], [5], [0, 2])
    assert [task.tolist() for task in first.tasks] == [[3], [0, 1]]
    assert read.parameters["client_test"] == "imported"
    assert "samples of the test split test several clients" in read.notes


def test_tests_from_the_training_split(data: Dataset, tmp_path: Path) -> None:
    content = {"clients": [{"train": [0], "test": [1, 2]}, {"train": [3], "test": [4]}], "test_source": "train"}
    made = make_partition(data, imported(tmp_path, content), num_clients=2, seed=0)
    assert made.test_source == "train" and made.test_counts.tolist() == [[0, 1, 1], [0, 1, 0]]


def test_the_same_content_elsewhere_is_the_same_partition(data: Dataset, tmp_path: Path) -> None:
    content = {"clients": [{"train": [0]}, {"train": [3]}]}
    made = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        made.append(make_partition(data, imported(tmp_path / place, content), num_clients=2, seed=0).fingerprint)
    assert made[0] == made[1]


def two(**first: Any) -> dict[str, Any]:
    return {"clients": [{"train": [0, 1]} | first, {"train": [6, 7]} | {key: [] for key in first if key != "train"}]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "division.json: damaged, not readable as JSON; expected"),
        ({}, 'expected {"clients"'),
        ({"clients": []}, 'expected {"clients"'),
        ({"clients": [[0, 1], [2]]}, "client 0: expected"),
        ({"clients": [{"train": [0]}], "seeds": 1}, 'expected {"clients"'),
        ({"clients": [{"train": [0]}]}, "divides among 1 clients; set partition.num_clients=1"),
        (two(train=[0, 12]), "client 0000: .* beyond the 12 samples"),
        (two(train=[]), "client 0000 has no training samples"),
        (two(train=[0, 6]), "training sample 6 has 2 owners"),
        (two(train=[3, 0, 3]), "client 0, train: sample 3 is listed twice"),
        (two(train=[0, -1]), "client 0, train: not a list of whole numbers"),
        (two(train=[0, 1.0]), "not a list of whole numbers"),
        (two(train=[0, True]), "not a list of whole numbers"),
        (two(train="01"), "not a list of whole numbers"),
        (two(trian=[0]), "client 0: expected"),
        (two(val=[1]), "client 0000: val sample 1 is also a training sample"),
        (two(val=[7]), "client 0000: val sample 7 is also a training sample"),
        (two(val=[99]), "client 0000, val: .* beyond the 12"),
        (two(test=[6]), "client 0000, test: .* beyond the 6"),
        (two(test=[6]) | {"test_source": "train"}, "test sample 6 is also a training or validation sample"),
        (two(test=[1]) | {"test_source": "both"}, "test_source = both"),
        (two(tasks=[[0]]), "client 0: its tasks together are not its train"),
        ({"clients": [{"train": [0]}, {"train": [1], "val": []}]}, "client 1 and client 0 differ in having val"),
        ({"clients": [{"train": [0, 1], "tasks": [[0], [1]]}, {"train": [2], "tasks": [[2]]}]}, "client 1 has 1 tasks"),
        (
            {"clients": [{"train": [2, 3], "tasks": [[2], [3]]}, {"train": [0, 1], "tasks": [[0, 1], []]}]},
            "client 0001, task 01 has no training samples, and each task is trained on; use fewer tasks",
        ),
    ],
)
def test_what_is_refused(content: Any, words: str, data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        make_partition(data, imported(tmp_path, content), num_clients=2, seed=0)


def test_shared_samples_need_to_be_announced(data: Dataset, tmp_path: Path) -> None:
    content = two(train=[0, 6]) | {"overlap": True}
    assert make_partition(data, imported(tmp_path, content), num_clients=2, seed=0).overlap


def test_what_does_not_go_with_an_import(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"partition\.validation = 0\.2: the imported division has its own"):
        make_partition(data, imported(tmp_path, two(val=[5])), num_clients=2, seed=0, validation=0.2)
    with pytest.raises(DataError, match="imported division is of all samples"):
        make_partition(data, imported(tmp_path, two()), num_clients=2, seed=0, imbalance=Imbalance(1.0))
    with pytest.raises(DataError, match=r"partition\.path is not set"):
        make_partition(data, Imported(), num_clients=2, seed=0)
    with pytest.raises(DataError, match=r"nowhere\.json: not found; expected"):
        make_partition(data, Imported(path=str(tmp_path / "nowhere.json")), num_clients=2, seed=0)
