"""A partition: the samples that each client trains, validates and tests on, and its form on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flcore.core.errors import Cure, DataError
from flcore.core.text import shorten
from flcore.data.dataset import Dataset
from flcore.data.imbalance import minority_classes
from flcore.data.partitioners.base import Indices
from flcore.io import disk
from flcore.io.files import content_digest, read_json, read_tensors, write_json, write_tensors

_CURE = Cure.DIVIDE_AGAIN
_PARTS = ("train", "val", "test")
_PLAIN = ("fingerprint", "overlap", "parameters", "retries", "source_fingerprint", "test_source")  # as in the manifest


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """One client's samples, each int64 and ascending.

    ``train`` and ``val`` index the dataset's training split, ``test`` the split named by ``Partition.test_source``.
    ``tasks`` divides ``train`` into tasks in their order; empty without tasks. ``task_tests`` are the test samples of
    all classes met up to each task, with ``client_test: task_cumulative``, else empty.
    """

    train: Indices
    val: Indices
    test: Indices
    tasks: tuple[Indices, ...] = ()
    task_tests: tuple[Indices, ...] = ()

    def arrays(self) -> Iterator[tuple[str, Indices]]:
        """Yield key and array of everything stored, such as ``train`` or ``task/03/train``."""
        yield from ((part, getattr(self, part)) for part in _PARTS)
        yield from ((f"task/{number:02d}/train", task) for number, task in enumerate(self.tasks))
        yield from ((f"task/{number:02d}/test", test) for number, test in enumerate(self.task_tests))


@dataclass(frozen=True, eq=False)
class Partition:
    """Every client's samples, and the parameters that made them.

    Attributes:
        counts: int64 [K, C], training samples (after validation was cut) per client and class.
        test_counts: int64 [K, C], test samples likewise.
        test_source: the split that client tests index: the official ``test``, or ``train`` for ``local_split``.
        parameters: the partitioner with its options, long tail, seed, validation and client test.
        retries: discarded attempts of the partitioner. notes: facts about the result in words.
        overlap: clients may share training samples.
        source_fingerprint: of the dataset. fingerprint: sha256 of all else but the version of protofl.
        class_counts: int64 [C], samples of each class before the division, after the long tail if any.
        task_counts: int64 [K, T, C], training samples per client, task and class; T is 0 without tasks.
    """

    clients: tuple[ClientSplit, ...]
    counts: np.ndarray
    test_counts: np.ndarray
    test_source: Literal["test", "train"]
    parameters: Mapping[str, Any]
    retries: int
    notes: tuple[str, ...]
    overlap: bool
    source_fingerprint: str
    version: str
    fingerprint: str = ""
    class_counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    task_counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.int64))

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    @property
    def num_classes(self) -> int:
        return int(self.counts.shape[1])

    @property
    def num_tasks(self) -> int:
        return int(self.task_counts.shape[1])

    @property
    def minority_classes(self) -> tuple[int, ...]:
        """The half of the classes with fewer samples in the training set; none if all have equally many."""
        return minority_classes(self.class_counts)

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Samples per client in ``train``, ``val`` and ``test``."""
        return {part: [len(getattr(client, part)) for client in self.clients] for part in _PARTS}

    def check_matches(self, dataset: Dataset) -> None:
        """Raise DataError for a dataset with another fingerprint, or without some samples or classes."""
        if self.source_fingerprint != dataset.meta.fingerprint:
            raise DataError(
                f"partition: made for other data ({self.source_fingerprint[:8]}) than the prepared {dataset.meta.name} "
                f"({dataset.meta.fingerprint[:8]}); {_CURE}"
            )
        tested = len(dataset.test if self.test_source == "test" else dataset.train)
        fits = self.num_classes == dataset.meta.num_classes
        for key, own in _arrays(self.clients):
            total = tested if key.endswith("test") else len(dataset.train)
            fits = fits and (len(own) == 0 or 0 <= own[0] <= own[-1] < total)
        if not fits:
            raise DataError(f"partition: names samples or classes that {dataset.meta.name} does not have; {_CURE}")

    def save(self, directory: Path) -> None:
        """Write ``indices.safetensors`` and ``manifest.json``; the same content gives the same bytes."""
        disk.remove(directory / "manifest.json", missing_ok=True)  # without it the folder is unfinished
        arrays = {key: torch.from_numpy(array) for key, array in _arrays(self.clients)}
        write_tensors(directory / "indices.safetensors", arrays)
        manifest = _describe(self) | {"fingerprint": self.fingerprint, "protofl_version": self.version}
        write_json(directory / "manifest.json", manifest)

    @classmethod
    def load(cls, directory: Path) -> Partition:
        """Read a directory of :meth:`save`; raise DataError if a file is missing, damaged or of another partition."""
        path = directory / "manifest.json"
        if not path.exists():  # it may be a folder of anything
            raise DataError(f"{directory}: no partition there (manifest.json); {Cure.DIVIDE}")
        manifest = read_json(path, _CURE)
        arrays, _ = read_tensors(directory / "indices.safetensors", _CURE)
        try:
            loaded = _from_manifest(manifest, {key: array.numpy() for key, array in arrays.items()})
            found = fingerprint_of(loaded)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
            reason = shorten(str(error))
            raise DataError(f"{path}: damaged, or does not fit indices.safetensors ({reason}); {_CURE}") from error
        if found != manifest["fingerprint"]:
            raise DataError(f"{path}: content differs from its fingerprint; {_CURE}")
        return loaded


def _arrays(clients: Sequence[ClientSplit]) -> Iterator[tuple[str, Indices]]:
    for number, client in enumerate(clients):
        yield from ((f"client/{number:04d}/{key}", array) for key, array in client.arrays())


def _describe(partition: Partition) -> dict[str, Any]:
    """Return the manifest without fingerprint and version, as JSON values."""
    clients = [
        {
            "class_counts": partition.counts[number].tolist(),
            "id": f"{number:04d}",
            "sizes": {part: len(getattr(client, part)) for part in _PARTS},
            "task_class_counts": partition.task_counts[number].tolist() if client.tasks else [],
            "task_sizes": [len(task) for task in client.tasks],
            "task_test_sizes": [len(test) for test in client.task_tests],
            "test_class_counts": partition.test_counts[number].tolist(),
        }
        for number, client in enumerate(partition.clients)
    ]
    return {
        "class_counts": partition.class_counts.tolist(),
        "clients": clients,
        "minority_classes": list(partition.minority_classes),
        "notes": list(partition.notes),
        "num_classes": partition.num_classes,
        **{key: getattr(partition, key) for key in _PLAIN if key != "fingerprint"},
    }


def fingerprint_of(partition: Partition) -> str:
    """Return the SHA-256 of a partition, indices included, without the version of protofl."""
    return content_digest(_describe(partition), _arrays(partition.clients))


def _from_manifest(manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Partition:
    """Build the partition; raise KeyError, TypeError or ValueError if manifest and indices do not fit together."""
    clients = tuple(_client_from(entry, arrays) for entry in manifest["clients"])
    if not clients or manifest["test_source"] not in ("test", "train"):
        raise ValueError("no clients, or a test_source that is no split")
    expected = {key for key, _ in _arrays(clients)}
    if expected != set(arrays):
        raise ValueError(f"arrays differ: {', '.join(sorted(expected ^ set(arrays))[:3])}")
    shape = (len(clients), manifest["num_classes"])
    counts, test_counts = (
        np.array([entry[key] for entry in manifest["clients"]], dtype=np.int64).reshape(shape)
        for key in ("class_counts", "test_class_counts")
    )
    task_counts = np.array([entry["task_class_counts"] for entry in manifest["clients"]], dtype=np.int64)
    return Partition(
        clients=clients,
        counts=counts,
        test_counts=test_counts,
        notes=tuple(manifest["notes"]),
        version=manifest["protofl_version"],
        class_counts=np.array(manifest["class_counts"], dtype=np.int64),
        task_counts=task_counts.reshape(len(clients), -1, manifest["num_classes"]),
        **{key: manifest[key] for key in _PLAIN},
    )


def _client_from(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ClientSplit:
    prefix = f"client/{entry['id']}"
    parts = {part: arrays[f"{prefix}/{part}"] for part in _PARTS}
    tasks, task_tests = (
        tuple(arrays[f"{prefix}/task/{number:02d}/{part}"] for number in range(len(entry[sizes])))
        for part, sizes in (("train", "task_sizes"), ("test", "task_test_sizes"))
    )
    for key, array in (*parts.items(), *(("task", task) for task in (*tasks, *task_tests))):
        if not is_ascending(array):
            raise ValueError(f"{prefix}/{key} is not int64 in ascending order")
    return ClientSplit(parts["train"], parts["val"], parts["test"], tasks, task_tests)


def is_ascending(indices: Indices) -> bool:
    """Return whether indices are int64, each larger than the one before."""
    return indices.dtype == np.int64 and bool((np.diff(indices) > 0).all())
