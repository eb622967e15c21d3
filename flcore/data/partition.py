"""A partition: which client trains, validates and tests on which samples, checked when made, and its form on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flcore import __version__
from flcore.data.client_test import ClientTest, few_shot, label_slices, proportional, stratified_cut
from flcore.data.dataset import Dataset
from flcore.data.files import content_bytes, read_json, read_tensors, write_json, write_tensors
from flcore.data.partitioners.base import Assignment, Indices, Partitioner
from flcore.errors import DataError
from flcore.rng import numpy_stream

_CURE = "delete the folder and run the partition stage again"
_PARTS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """One client's samples, each int64 and ascending.

    ``train`` and ``val`` index the dataset's training split, ``test`` the split named by ``Partition.test_source``.
    ``tasks`` divides ``train`` into tasks in the order they are met; empty where there are no tasks.
    """

    train: Indices
    val: Indices
    test: Indices
    tasks: tuple[Indices, ...] = ()

    def arrays(self) -> Iterator[tuple[str, Indices]]:
        """Key and array of everything stored, such as ``train`` or ``task/03/train``."""
        yield from ((part, getattr(self, part)) for part in _PARTS)
        yield from ((f"task/{number:02d}/train", task) for number, task in enumerate(self.tasks))


@dataclass(frozen=True, eq=False)
class Partition:
    """Every client's samples with how they came about.

    Attributes:
        clients: by client number.
        counts: int64 [K, C], training samples (after validation was cut) per client and class.
        test_counts: int64 [K, C], test samples likewise.
        test_source: the split that client tests index: the official ``test``, or ``train`` for ``local_split``.
        parameters: the partitioner with its options, seed, validation and client test.
        retries: attempts that the partitioner threw away.
        notes: facts about the result in words.
        overlap: clients may share training samples.
        source_fingerprint: fingerprint of the dataset.
        version: version of protofl that made it.
        fingerprint: sha256 of all of the above but the version.
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

    @property
    def num_clients(self) -> int:
        """Number of clients, K."""
        return len(self.clients)

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return int(self.counts.shape[1])

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Samples per client in ``train``, ``val`` and ``test``."""
        return {part: [len(getattr(client, part)) for client in self.clients] for part in _PARTS}

    def check_matches(self, dataset: Dataset) -> None:
        """Refuse a dataset that this partition was not made for.

        Raises:
            DataError: the fingerprints differ.
        """
        if self.source_fingerprint != dataset.meta.fingerprint:
            raise DataError(
                f"partition: made for other data ({self.source_fingerprint[:8]}) than the prepared {dataset.meta.name} "
                f"({dataset.meta.fingerprint[:8]}); run the partition stage again"
            )

    def save(self, directory: Path) -> None:
        """Write ``indices.safetensors`` and ``manifest.json``; the same content gives the same bytes."""
        (directory / "manifest.json").unlink(missing_ok=True)  # without it the folder is unfinished
        arrays = {key: torch.from_numpy(array.copy()) for key, array in _arrays(self.clients)}
        write_tensors(directory / "indices.safetensors", arrays)
        manifest = _describe(self) | {"fingerprint": self.fingerprint, "protofl_version": self.version}
        write_json(directory / "manifest.json", manifest)

    @classmethod
    def load(cls, directory: Path) -> Partition:
        """Read what :meth:`save` wrote and compare manifest and indices.

        Raises:
            DataError: a file is missing or damaged, or the two do not belong together.
        """
        path = directory / "manifest.json"
        manifest = read_json(path, _CURE)
        arrays = read_tensors(directory / "indices.safetensors", _CURE)
        try:
            loaded = _from_manifest(manifest, {key: array.numpy() for key, array in arrays.items()})
            found = _fingerprint(loaded)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: damaged or not of indices.safetensors beside it ({error}); {_CURE}") from error
        if found != manifest["fingerprint"]:
            raise DataError(f"{path}: content differs from its fingerprint; {_CURE}")
        return loaded


def make_partition(
    dataset: Dataset,
    partitioner: Partitioner,
    *,
    num_clients: int,
    seed: int,
    validation: float = 0.0,
    client_test: ClientTest = "label_slices",
    test_fraction: float = 0.2,
    test_shots: int = 15,
) -> Partition:
    """Divide ``dataset`` among clients and set test and validation samples aside.

    Owners, test samples and validation samples come from separate random streams: switching validation on does not
    change who owns what.

    Args:
        dataset: the prepared data.
        partitioner: who owns which training sample.
        num_clients: how many clients.
        seed: the experiment's seed.
        validation: share of each client's training samples to set aside, stratified; at least one sample stays.
        client_test: ``label_slices``, ``proportional`` or ``few_shot`` of the official test split, or ``local_split``
            of each client's own training samples (data.md, part 3).
        test_fraction: share that ``local_split`` sets aside, at least one sample.
        test_shots: samples per class for ``few_shot``.

    Raises:
        DataError: the request cannot be met.
    """
    for key, share in (("validation", validation), ("test_fraction", test_fraction)):
        if not 0 <= share < 1:
            raise ValueError(f"{key} = {share}: must be >= 0 and < 1")
    labels, test_labels = dataset.train.labels.numpy(), dataset.test.labels.numpy()
    groups = None if dataset.train.groups is None else dataset.train.groups.numpy()
    assignment = partitioner.split(labels, num_clients, numpy_stream(seed, "partition"), groups)
    _check(assignment, num_clients, len(labels))
    if assignment.overlap and client_test == "local_split":
        raise DataError("partition.client_test = local_split: clients share samples and would train on test samples")

    num_classes = dataset.meta.num_classes
    owned, tests = assignment.clients, None
    if client_test == "local_split":
        streams = [numpy_stream(seed, "partition-test", client) for client in range(num_clients)]
        pairs = [
            stratified_cut(own, labels, test_fraction, rng, at_least_one=True)
            for own, rng in zip(owned, streams, strict=True)
        ]
        owned, tests = [kept for kept, _ in pairs], [aside for _, aside in pairs]
    pairs = [
        stratified_cut(own, labels, validation, numpy_stream(seed, "partition-validation", client))
        for client, own in enumerate(owned)
    ]
    counts = _class_counts([kept for kept, _ in pairs], labels, num_classes)
    if tests is None:
        rng = numpy_stream(seed, "partition-test")
        tests = _official_tests(client_test, counts, test_labels, test_shots, rng)
    test_source: Literal["test", "train"] = "train" if client_test == "local_split" else "test"

    clients = tuple(
        ClientSplit(kept, aside, test, _tasks(assignment, client, kept))
        for client, ((kept, aside), test) in enumerate(zip(pairs, tests, strict=True))
    )
    made = Partition(
        clients=clients,
        counts=counts,
        test_counts=_class_counts(tests, labels if test_source == "train" else test_labels, num_classes),
        test_source=test_source,
        parameters={
            "client_test": client_test,
            "name": partitioner.name,
            "num_clients": num_clients,
            "options": dataclasses.asdict(partitioner),
            "seed": seed,
            "test_fraction": test_fraction,
            "test_shots": test_shots,
            "validation": validation,
        },
        retries=assignment.retries,
        notes=(*assignment.notes, *_test_notes(tests, test_source)),
        overlap=assignment.overlap,
        source_fingerprint=dataset.meta.fingerprint,
        version=__version__,
    )
    return dataclasses.replace(made, fingerprint=_fingerprint(made))


def _official_tests(
    protocol: ClientTest, counts: np.ndarray, test_labels: np.ndarray, shots: int, rng: np.random.Generator
) -> list[Indices]:
    if protocol == "label_slices":
        return label_slices(counts, test_labels, rng)
    if protocol == "few_shot":
        return few_shot(counts, test_labels, shots, rng)
    return proportional(counts, test_labels, rng)


def _test_notes(tests: Sequence[Indices], test_source: str) -> list[str]:
    notes = []
    without = [f"{client:04d}" for client, test in enumerate(tests) if len(test) == 0]
    if without:
        notes.append(f"{len(without)} clients have no test samples: {', '.join(without)}")
    used = np.concatenate(tests)
    if len(np.unique(used)) < len(used):
        notes.append(f"samples of the {test_source} split test several clients")
    return notes


def _tasks(assignment: Assignment, client: int, train: Indices) -> tuple[Indices, ...]:
    """The client's tasks without the samples that were set aside."""
    if assignment.tasks is None:
        return ()
    return tuple(np.intersect1d(task, train, assume_unique=True) for task in assignment.tasks[client])


def _class_counts(parts: Sequence[Indices], labels: np.ndarray, num_classes: int) -> np.ndarray:
    return np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts]).astype(np.int64)


def _check(assignment: Assignment, num_clients: int, total: int) -> None:
    """Refuse an assignment that breaks its own promises: a partitioner's mistake must not become a result.

    Raises:
        DataError: naming the client.
    """
    owners = np.zeros(total, dtype=np.int64)
    if len(assignment.clients) != num_clients:
        raise DataError(f"partitioner made {len(assignment.clients)} clients instead of {num_clients}")
    for client, own in enumerate(assignment.clients):
        if len(own) == 0:
            raise DataError(f"client {client:04d} has no training samples; use fewer clients or more data")
        if not _is_ascending(own) or own[0] < 0 or own[-1] >= total:
            raise DataError(f"client {client:04d}: indices repeat, are out of order or beyond the {total} samples")
        owners[own] += 1
    if not assignment.overlap and owners.max() > 1:
        raise DataError(f"training sample {owners.argmax()} has {owners.max()} owners; clients must be disjoint")
    if assignment.complete and owners.min() < 1:
        raise DataError(f"training sample {owners.argmin()} has no owner, although all samples were to be used")


def _is_ascending(indices: Indices) -> bool:
    return indices.dtype == np.int64 and bool((np.diff(indices) > 0).all())


def _arrays(clients: Sequence[ClientSplit]) -> Iterator[tuple[str, Indices]]:
    for number, client in enumerate(clients):
        yield from ((f"client/{number:04d}/{key}", array) for key, array in client.arrays())


def _describe(partition: Partition) -> dict[str, Any]:
    """The manifest without fingerprint and version, as JSON values."""
    clients = [
        {
            "class_counts": partition.counts[number].tolist(),
            "id": f"{number:04d}",
            "sizes": {part: len(getattr(client, part)) for part in _PARTS},
            "task_sizes": [len(task) for task in client.tasks],
            "test_class_counts": partition.test_counts[number].tolist(),
        }
        for number, client in enumerate(partition.clients)
    ]
    return {
        "clients": clients,
        "notes": list(partition.notes),
        "num_classes": partition.num_classes,
        "overlap": partition.overlap,
        "parameters": dict(partition.parameters),
        "retries": partition.retries,
        "source_fingerprint": partition.source_fingerprint,
        "test_source": partition.test_source,
    }


def _fingerprint(partition: Partition) -> str:
    digest = hashlib.sha256(json.dumps(_describe(partition), sort_keys=True).encode())
    for key, array in _arrays(partition.clients):
        for piece in content_bytes(key, array):
            digest.update(piece)
    return digest.hexdigest()


def _from_manifest(manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Partition:
    """The partition that manifest and indices describe together.

    Raises:
        KeyError, TypeError, ValueError: they do not fit together.
    """
    clients = tuple(_client_from(entry, arrays) for entry in manifest["clients"])
    expected = {key for key, _ in _arrays(clients)}
    if expected != set(arrays):
        raise ValueError(f"arrays differ: {', '.join(sorted(expected ^ set(arrays))[:3])}")
    shape = (len(clients), manifest["num_classes"])
    counts, test_counts = (
        np.array([entry[key] for entry in manifest["clients"]], dtype=np.int64).reshape(shape)
        for key in ("class_counts", "test_class_counts")
    )
    return Partition(
        clients=clients,
        counts=counts,
        test_counts=test_counts,
        test_source=manifest["test_source"],
        parameters=manifest["parameters"],
        retries=manifest["retries"],
        notes=tuple(manifest["notes"]),
        overlap=manifest["overlap"],
        source_fingerprint=manifest["source_fingerprint"],
        version=manifest["protofl_version"],
        fingerprint=manifest["fingerprint"],
    )


def _client_from(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ClientSplit:
    prefix = f"client/{entry['id']}"
    parts = {part: arrays[f"{prefix}/{part}"] for part in _PARTS}
    tasks = tuple(arrays[f"{prefix}/task/{number:02d}/train"] for number in range(len(entry["task_sizes"])))
    for key, array in (*parts.items(), *(("task", task) for task in tasks)):
        if not _is_ascending(array):
            raise ValueError(f"{prefix}/{key} is not int64 in ascending order")
    return ClientSplit(parts["train"], parts["val"], parts["test"], tasks)
