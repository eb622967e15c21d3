"""Partitions as artefacts: cuts for validation and tests, checks, the form on disk, and the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flcore.core.errors import Cure, DataError
from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.dividing import ClientTest, few_shot, label_slices, make_partition, proportional, stratified_cut
from flcore.data.imbalance import Imbalance
from flcore.data.partition import Partition
from flcore.data.partitioners.base import Assignment, Partitioner
from flcore.data.partitioners.classes_per_client import ClassesPerClient
from flcore.data.partitioners.dirichlet import Dirichlet
from flcore.data.partitioners.simple import ByGroup, Dominant, Iid, Shards
from flcore.data.partitioners.ways_shots import WaysShots
from flcore.data.sources import SOURCES
from tests.flcore.data.conftest import labelled

bounded = settings(max_examples=25, deadline=None, derandomize=True)

REPOSITORY = Path(__file__).parents[3]

KINDS: dict[str, Partitioner] = {
    "iid": Iid(),
    "iid stratified": Iid(stratified=True),
    "dirichlet balanced": Dirichlet(alpha=0.3),
    "dirichlet plain": Dirichlet(alpha=0.3, variant="plain"),
    "dirichlet subsampled": Dirichlet(alpha=1.0, variant="subsampled", ratio=0.5, min_size=5),
    "dirichlet equalised": Dirichlet(alpha=1.0, variant="equalised"),
    "classes_per_client": ClassesPerClient(),
    "classes_per_client nbench": ClassesPerClient(rule="nbench"),
    "dominant": Dominant(),
    "dirichlet tasks": Dirichlet(alpha=0.3, variant="plain", tasks=3),
    "dirichlet nested tasks": Dirichlet(alpha=1.0, variant="plain", tasks=3, nested=True),
    "shards": Shards(),
    "shards tasks": Shards(tasks=3),
    "ways_shots": WaysShots(shots=20),
    "by_group": ByGroup(),
}
every_kind = pytest.mark.parametrize("kind", KINDS)

# The first 16 digits of `index_hash` for each kind. A change here changes what everyone's seeds mean.
GOLDEN = {
    "iid": "d6636f1caf402316",
    "iid stratified": "e4805707040f00b3",
    "dirichlet balanced": "4e7bb3a774b48d78",
    "dirichlet plain": "5ffab5485984965c",
    "dirichlet subsampled": "a98e845b3a461657",
    "dirichlet equalised": "a61e4932777c8b97",
    "classes_per_client": "fd5854b8988307d1",
    "classes_per_client nbench": "79049262e7f48868",
    "dominant": "a95eabb81a8695c3",
    "dirichlet tasks": "df7986b655364e22",
    "dirichlet nested tasks": "f1c0c4839ebb8e15",
    "shards": "8f01529454a55307",
    "shards tasks": "dd3e50364200ada5",
    "ways_shots": "c389123a1436b5f7",
    "by_group": "1ff0b3a57861ca39",
}


def toy(per_class: int = 60, tests_per_class: int = 30, num_classes: int = 10) -> Dataset:
    """Labels 0, 1, ..., 0, 1, ... and 41 groups of training samples."""
    made = labelled(
        *(np.arange(each * num_classes) % num_classes for each in (per_class, tests_per_class)), num_classes
    )
    grouped = replace(made.train, groups=torch.arange(per_class * num_classes) % 41)
    return replace(made, train=grouped, test=replace(made.test, groups=None))


def index_hash(made: Partition) -> str:
    """sha256 over all index arrays in order, as little-endian 64-bit integers with -1 between arrays."""
    digest = hashlib.sha256()
    for client in made.clients:
        for _, array in client.arrays():
            digest.update(np.append(array, -1).astype("<i8").tobytes())
    return digest.hexdigest()


def all_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@bounded
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    fraction=st.floats(0, 0.95),
    seed=st.integers(0, 100),
    at_least_one=st.booleans(),
)
def test_stratified_cut_properties(labels: list[int], fraction: float, seed: int, at_least_one: bool) -> None:
    indices, own = np.arange(len(labels)), np.array(labels)
    kept, aside = stratified_cut(indices, own, fraction, np.random.default_rng(seed), at_least_one=at_least_one)
    assert np.array_equal(np.sort(np.concatenate([kept, aside])), indices)
    assert len(kept) >= 1 and kept.dtype == aside.dtype == np.int64
    sizes, taken = np.bincount(own), np.bincount(own[aside], minlength=own.max() + 1)
    if len(aside) != 1:
        assert set(own[kept]) == set(own)
        assert (taken <= fraction * sizes + 1).all()
    if at_least_one and len(labels) > 1:
        assert len(aside) >= 1


def test_stratified_cut_by_hand() -> None:
    """Class sizes 10, 5, 1 and a fraction of 0.25: exactly 2.5, 1.25 and 0.25, and 16 · 0.25 = 4 in all.

    Floors are 2, 1, 0; one more goes to class 0, whose remainder 0.5 is the largest. Class 2 keeps its only sample.
    """
    labels = np.repeat([0, 1, 2], [10, 5, 1])
    kept, aside = stratified_cut(np.arange(16), labels, 0.25, np.random.default_rng(0))
    assert np.bincount(labels[aside], minlength=3).tolist() == [3, 1, 0]
    assert np.bincount(labels[kept], minlength=3).tolist() == [7, 4, 1]


def test_validation_does_not_change_who_owns_or_tests_what() -> None:
    without = make_partition(toy(), Dirichlet(alpha=0.5), num_clients=5, seed=3)
    with_it = make_partition(toy(), Dirichlet(alpha=0.5), num_clients=5, seed=3, validation=0.2)
    for a, b in zip(without.clients, with_it.clients, strict=True):
        assert len(a.val) == 0 and len(b.val) > 0
        assert np.array_equal(a.train, np.sort(np.concatenate([b.train, b.val])))
        assert np.array_equal(a.test, b.test)


def test_label_slices_by_hand() -> None:
    """Pool of 7 and 5; K = 3: slices of 2 and 1. Client 0 holds class 0, client 1 both, client 2 class 1: 2, 3, 1."""
    counts = np.array([[5, 0], [1, 9], [0, 4]])
    pool = np.repeat([0, 1], [7, 5])
    parts = label_slices(counts, pool, np.random.default_rng(0))
    assert [np.bincount(pool[part], minlength=2).tolist() for part in parts] == [[2, 0], [2, 1], [0, 1]]
    assert len(np.unique(np.concatenate(parts))) == 6


def test_proportional_uses_the_whole_pool_by_training_shares() -> None:
    """Class 0 is held 3 : 1 by clients 0 and 1, so 8 test samples give 6 and 2; class 1 only by client 1: all 4."""
    counts = np.array([[30, 0], [10, 7], [0, 0]])
    pool = np.repeat([0, 1], [8, 4])
    parts = proportional(counts, pool, np.random.default_rng(0))
    assert [np.bincount(pool[part], minlength=2).tolist() for part in parts] == [[6, 0], [2, 4], [0, 0]]


def test_few_shot_blocks_are_disjoint_while_they_last() -> None:
    """3 clients x 4 shots fit into 12 of class 0; of class 1 there are 5, and two holders need 8: 3 are used twice."""
    counts = np.array([[1, 1], [1, 1], [1, 0]])
    pool = np.repeat([0, 1], [12, 5])
    parts = few_shot(counts, pool, 4, np.random.default_rng(0))
    assert [np.bincount(pool[part], minlength=2).tolist() for part in parts] == [[4, 4], [4, 4], [4, 0]]
    of_class_0 = np.concatenate([part[pool[part] == 0] for part in parts])
    assert len(np.unique(of_class_0)) == 12
    of_class_1 = np.concatenate([part[pool[part] == 1] for part in parts])
    assert len(np.unique(of_class_1)) == 5


def test_local_split_tests_on_the_clients_own_samples() -> None:
    made = make_partition(
        toy(), Iid(stratified=True), num_clients=5, seed=0, client_test="local_split", test_fraction=0.25
    )
    assert made.test_source == "train"
    everything = np.concatenate([np.concatenate([c.train, c.test]) for c in made.clients])
    assert np.array_equal(np.sort(everything), np.arange(600))
    assert made.sizes["test"] == [30] * 5  # 120 samples each


def test_own_group_tests_on_the_official_samples_of_the_clients_writers() -> None:
    """Two groups a client; training and test sample i have group i mod 41, as for writers whose samples were split."""
    data = toy()
    with pytest.raises(DataError, match="own_group: the dataset has no groups"):
        make_partition(data, ByGroup(), num_clients=3, seed=0, client_test="own_group")
    groups = torch.arange(300) % 41
    data = replace(data, test=replace(data.test, groups=groups))
    made = make_partition(data, ByGroup(merge=2), num_clients=3, seed=0, client_test="own_group")
    for client in made.clients:
        writers = set(client.train % 41)
        assert len(writers) == 2
        assert client.test.tolist() == [i for i in range(300) if i % 41 in writers]


@pytest.mark.parametrize("protocol", ["label_slices", "proportional", "few_shot"])
def test_writers_are_tested_on_images_of_the_writers_drawn(protocol: ClientTest) -> None:
    """Of 41 writers six take part: nobody is tested on an image of the others, whom the global model is not told of."""
    data = toy()
    data = replace(data, test=replace(data.test, groups=torch.arange(300) % 41))
    made = make_partition(data, ByGroup(merge=2), num_clients=3, seed=0, client_test=protocol)
    writers = {index % 41 for client in made.clients for index in client.train}
    tested = [index for client in made.clients for index in client.test]
    assert len(writers) == 6 and tested and {index % 41 for index in tested} <= writers


def test_reused_test_samples_and_clients_without_tests_are_noted() -> None:
    reused = make_partition(toy(tests_per_class=5), Iid(), num_clients=4, seed=0, client_test="few_shot", test_shots=2)
    assert "samples of the test split test several clients" in reused.notes
    without = make_partition(toy(tests_per_class=2), Iid(), num_clients=4, seed=0)
    assert without.notes == ("4 clients have no test samples: 0000, 0001, 0002, 0003",)


def test_tasks_divide_the_training_samples_after_validation() -> None:
    made = make_partition(toy(), Shards(tasks=3), num_clients=4, seed=0, validation=0.2)
    for client in made.clients:
        assert len(client.tasks) == 3
        assert np.array_equal(np.sort(np.concatenate(client.tasks)), client.train)


@dataclass(frozen=True)
class Broken(Partitioner):
    name: ClassVar[str] = "broken"
    summary: ClassVar[str] = "hands out whatever the test says"
    clients: tuple[tuple[int, ...], ...] = ()

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        return Assignment([np.array(own, dtype=np.int64) for own in self.clients])


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (((0, 1), ()), "client 0001 has no training samples"),
        (((0, 1), (1, 2)), "sample 1 has 2 owners"),
        (((0, 1), (3, 2)), "client 0001: indices repeat"),
        (((0, 1), (2, 4)), "client 0001: .* beyond the 4"),
        (((0, 1), (3,)), "sample 2 has no owner"),
        (((0, 1, 2, 3),), "1 clients instead of 2"),
    ],
)
def test_a_partitioner_that_breaks_its_promise_is_stopped(clients: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        make_partition(toy(per_class=2, num_classes=2), Broken(clients), num_clients=2, seed=0)


@pytest.mark.parametrize("kind", ["iid", "dirichlet subsampled", "dirichlet nested tasks", "ways_shots"])
def test_round_trip_and_equal_bytes(kind: str, tmp_path: Path) -> None:
    made = make_partition(toy(), KINDS[kind], num_clients=10, seed=7, validation=0.1)
    made.save(tmp_path / "one")
    read = Partition.load(tmp_path / "one")
    read.save(tmp_path / "two")
    again = make_partition(toy(), KINDS[kind], num_clients=10, seed=7, validation=0.1)
    again.save(tmp_path / "three")
    assert all_files(tmp_path / "one") == all_files(tmp_path / "two") == all_files(tmp_path / "three")
    assert read.fingerprint == made.fingerprint and read.sizes == made.sizes and read.parameters == made.parameters
    assert np.array_equal(read.counts, made.counts) and np.array_equal(read.test_counts, made.test_counts)
    for a, b in zip(read.clients, made.clients, strict=True):
        assert all(np.array_equal(x, y) for (_, x), (_, y) in zip(a.arrays(), b.arrays(), strict=True))


def test_files_have_the_names_and_types_of_the_contract(tmp_path: Path) -> None:
    made = make_partition(toy(), Shards(tasks=2), num_clients=3, seed=0)
    made.save(tmp_path)
    assert sorted(all_files(tmp_path)) == ["indices.safetensors", "manifest.json"]
    arrays = load_file(tmp_path / "indices.safetensors")
    keys = [f"client/0002/{part}" for part in ("train", "val", "test", "task/00/train", "task/01/train")]
    assert set(keys) <= set(arrays) and len(arrays) == 15
    assert all(array.dtype == torch.int64 for array in arrays.values())
    assert arrays["client/0002/val"].shape == (0,)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["clients"][2]["id"] == "0002"
    assert manifest["clients"][2]["sizes"] == {part: values[2] for part, values in made.sizes.items()}
    assert manifest["num_classes"] == 10 and manifest["protofl_version"]
    text = (tmp_path / "manifest.json").read_text()
    assert text.endswith("}\n") and text == json.dumps(manifest, sort_keys=True, indent=2) + "\n"


def write_artefacts(folder: Path) -> None:
    data = prepare_dataset(SOURCES["digits"](), size=11, channels=3, limit_per_class=60)
    data.save(folder / "prepared")
    made = make_partition(data, Dirichlet(), num_clients=5, seed=1, validation=0.1)
    made.save(folder / "partition")


@pytest.mark.slow
def test_same_bytes_in_another_process_with_other_threads_and_locale(tmp_path: Path) -> None:
    write_artefacts(tmp_path / "here")
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from test_partition_artefact import write_artefacts; write_artefacts(Path(sys.argv[2]))"
    )
    other = {"OMP_NUM_THREADS": "3", "LC_ALL": "C", "PYTHONHASHSEED": "5", "PYTHONPATH": str(REPOSITORY)}
    arguments = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "there")]
    subprocess.run(arguments, check=True, env=os.environ | other)
    for part in ("prepared", "partition"):
        assert all_files(tmp_path / "here" / part) == all_files(tmp_path / "there" / part)


@every_kind
def test_golden_indices(kind: str) -> None:
    made = make_partition(toy(), KINDS[kind], num_clients=10, seed=7, validation=0.1)
    assert index_hash(made)[:16] == GOLDEN[kind]


def test_golden_indices_of_a_long_tail_with_cumulative_tests() -> None:
    made = make_partition(
        toy(), KINDS["shards tasks"], num_clients=10, seed=7, client_test="task_cumulative",
        imbalance=Imbalance(0.3, permute_classes=True),
    )  # fmt: skip
    assert index_hash(made)[:16] == "0edb9de1ea5ffb86"


def cut_short(folder: Path) -> None:
    content = (folder / "indices.safetensors").read_bytes()
    (folder / "indices.safetensors").write_bytes(content[:-8])


def drop_array(folder: Path) -> None:
    arrays = load_file(folder / "indices.safetensors")
    del arrays["client/0001/val"]
    save_file(arrays, folder / "indices.safetensors")


def move_sample(folder: Path) -> None:
    arrays = load_file(folder / "indices.safetensors")
    arrays["client/0001/train"][-1] += 1
    save_file(arrays, folder / "indices.safetensors")


def spoil_json(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def edit_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"seed": 0', '"seed": 1'))


def drop_key(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["clients"][0]["id"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        (cut_short, "indices.safetensors"),
        (drop_array, "manifest.json"),
        (move_sample, "manifest.json"),
        (spoil_json, "manifest.json"),
        (edit_manifest, "manifest.json"),
        (drop_key, "manifest.json"),
        (lambda folder: (folder / "indices.safetensors").unlink(), "indices.safetensors"),
    ],
)
def test_damage_is_noticed_and_the_file_named(harm: Callable[[Path], None], file: str, tmp_path: Path) -> None:
    make_partition(toy(), Iid(), num_clients=3, seed=0).save(tmp_path)
    harm(tmp_path)
    with pytest.raises(DataError, match=f"{file}: ") as told:
        Partition.load(tmp_path)
    assert Cure.DIVIDE_AGAIN in str(told.value)


def test_a_partition_of_other_data_is_refused() -> None:
    made = make_partition(toy(), Iid(), num_clients=3, seed=0)
    made.check_matches(toy())
    with pytest.raises(DataError, match="divide the data again"):
        made.check_matches(replace(toy(), meta=replace(toy().meta, fingerprint="of other data")))


def test_local_split_is_refused_where_clients_share_samples() -> None:
    with pytest.raises(DataError, match="local_split"):
        make_partition(toy(), WaysShots(shots=50, shots_spread=0), num_clients=10, seed=0, client_test="local_split")
