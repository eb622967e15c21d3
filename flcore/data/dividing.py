"""Making a partition: the training, validation and test samples of every client, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from flcore.core.errors import DataError
from flcore.core.rng import numpy_stream
from flcore.data.client_holdout import ClientTest, few_shot, label_slices, own_group, proportional, stratified_cut
from flcore.data.dataset import Dataset, Split
from flcore.data.imbalance import Imbalance
from flcore.data.partition import ClientSplit, Partition, fingerprint_of, is_ascending
from flcore.data.partitioners.base import Assignment, HeldOut, Indices, Partitioner, merge_indices
from flcore.data.tasks import cumulative_tests
from flcore.version import VERSION


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
    imbalance: Imbalance | None = None,
) -> Partition:
    """Divide ``dataset`` among clients and hold out test and validation samples.

    Owners, test samples and validation samples come from separate random streams: validation does not change the
    owners.

    Args:
        partitioner: divides the training samples.
        seed: the experiment's seed.
        validation: share of each client's training samples to hold out, stratified (by task, if there are tasks); every
            class and task keeps a sample.
        client_test: ``label_slices``, ``proportional``, ``few_shot`` or ``own_group`` of the official test split, or
            ``local_split`` of each client's own training samples (data.md, part 3). ``task_cumulative`` is
            ``label_slices`` with, for every task, the samples of the classes met so far.
        test_fraction: share that ``local_split`` holds out, at least one sample.
        test_shots: samples per class for ``few_shot``.
        imbalance: a long tail to give the training set first.

    Raises:
        DataError: the request cannot be met.
    """
    for key, share in (("validation", validation), ("test_fraction", test_fraction)):
        if not 0 <= share < 1:
            raise ValueError(f"{key} = {share}: must be >= 0 and < 1")
    labels, num_classes = dataset.train.labels.numpy(), dataset.meta.num_classes
    assignment, pool = _assign(dataset, partitioner, num_clients, seed, imbalance)
    _check_protocol(assignment, client_test, validation)
    held_out = assignment.held_out or HeldOut(None, None, "train" if client_test == "local_split" else "test")
    test_labels = (dataset.train if held_out.test_source == "train" else dataset.test).labels.numpy()

    # A client's samples as the list of its tasks; one that has no tasks is a list of one.
    parts = [[own] for own in assignment.clients] if assignment.tasks is None else assignment.tasks
    vals, tests = held_out.val, held_out.test
    if tests is None and client_test == "local_split":
        rngs = (numpy_stream(seed, "partition-test", client) for client in range(num_clients))
        parts, tests = _set_aside(parts, labels, test_fraction, rngs, at_least_one=True)
    if vals is None:
        rngs = (numpy_stream(seed, "partition-validation", client) for client in range(num_clients))
        parts, vals = _set_aside(parts, labels, validation, rngs)
    trains = [merge_indices(own) for own in parts]
    counts = _class_counts(trains, labels, num_classes)
    if tests is None and client_test == "own_group":
        tests = own_group(trains, _groups(dataset.train), _groups(dataset.test))
    if tests is None:
        drawn = _tested_images(dataset, partitioner, trains)
        rng = numpy_stream(seed, "partition-test")
        tests = [drawn[own] for own in _official_tests(client_test, counts, test_labels[drawn], test_shots, rng)]

    task_stream_error: list[list[Indices]] = [[] for _ in parts]
    tasks = task_stream_error if assignment.tasks is None else parts
    task_counts = np.stack([_class_counts(own, labels, num_classes) for own in tasks])
    task_tests = [
        cumulative_tests(test, test_labels, own) if client_test == "task_cumulative" else ()
        for test, own in zip(tests, task_counts, strict=True)
    ]
    made = Partition(
        clients=tuple(
            ClientSplit(train, val, test, tuple(own), cumulative)
            for train, val, test, own, cumulative in zip(trains, vals, tests, tasks, task_tests, strict=True)
        ),
        counts=counts,
        test_counts=_class_counts(tests, test_labels, num_classes),
        test_source=held_out.test_source,
        parameters={
            "client_test": client_test if held_out.test is None else "imported",
            "imbalance": None if imbalance is None else dataclasses.asdict(imbalance),
            "name": partitioner.name,
            "num_clients": num_clients,
            "options": partitioner.options(),
            "seed": seed,
            "test_fraction": test_fraction,
            "test_shots": test_shots,
            "validation": validation,
        },
        retries=assignment.retries,
        notes=(*assignment.notes, *_test_notes(tests, held_out.test_source)),
        overlap=assignment.overlap,
        source_fingerprint=dataset.meta.fingerprint,
        version=VERSION,
        class_counts=np.bincount(labels[pool], minlength=num_classes),
        task_counts=task_counts,
    )
    return dataclasses.replace(made, fingerprint=fingerprint_of(made))


def _assign(
    dataset: Dataset, partitioner: Partitioner, num_clients: int, seed: int, imbalance: Imbalance | None
) -> tuple[Assignment, Indices]:
    """Return the checked division of the training samples, and the samples that were to be divided."""
    labels = dataset.train.labels.numpy()
    groups = None if dataset.train.groups is None else dataset.train.groups.numpy()
    if imbalance is None:
        assignment = partitioner.split(labels, num_clients, numpy_stream(seed, "partition"), groups)
        _check(assignment, num_clients, len(labels), len(dataset.test))
        return assignment, np.arange(len(labels))
    pool = imbalance.keep(labels, dataset.meta.num_classes, numpy_stream(seed, "partition-imbalance"))
    assignment = partitioner.split(
        labels[pool], num_clients, numpy_stream(seed, "partition"), None if groups is None else groups[pool]
    )
    if assignment.held_out is not None:
        raise DataError("partition.imbalance_gamma: an imported division is of all samples; set it to null")
    _check(assignment, num_clients, len(pool), len(dataset.test))
    return (
        dataclasses.replace(
            assignment,
            clients=[pool[own] for own in assignment.clients],
            tasks=None if assignment.tasks is None else [[pool[task] for task in own] for own in assignment.tasks],
        ),
        pool,
    )


def _check_protocol(assignment: Assignment, client_test: ClientTest, validation: float) -> None:
    """Refuse tests and validation that this division does not allow, with what to change."""
    held_out = assignment.held_out
    if held_out is not None and held_out.val is not None and validation > 0:
        raise DataError(f"partition.validation = {validation:g}: the imported division has its own; set it to 0")
    if assignment.overlap and client_test == "local_split":
        raise DataError("partition.client_test = local_split: clients share samples and would train on test samples")
    if assignment.tasks is None and client_test == "task_cumulative":
        raise DataError(
            "partition.client_test = task_cumulative: clients have no tasks; use shards or dirichlet with "
            "partition.tasks above 1"
        )


def _set_aside(
    parts: list[list[Indices]],
    labels: np.ndarray,
    fraction: float,
    rngs: Iterable[np.random.Generator],
    *,
    at_least_one: bool = False,
) -> tuple[list[list[Indices]], list[Indices]]:
    """Take ``fraction`` of every part of every client: the remaining parts, and the samples taken by client."""
    if fraction == 0 and not at_least_one:
        return parts, [np.empty(0, dtype=np.int64) for _ in parts]
    kept, aside = [], []
    for own, rng in zip(parts, rngs, strict=True):
        pairs = [stratified_cut(part, labels, fraction, rng, at_least_one=at_least_one) for part in own]
        kept.append([stays for stays, _ in pairs])
        aside.append(merge_indices([taken for _, taken in pairs]))
    return kept, aside


def _groups(split: Split) -> np.ndarray:
    if split.groups is None:
        raise DataError(
            "partition.client_test = own_group: the dataset has no groups; use one that names writers or users"
        )
    return split.groups.numpy()


def _tested_images(dataset: Dataset, partitioner: Partitioner, trains: list[Indices]) -> Indices:
    """Return the official test samples that clients are tested on.

    All, but with ``by_group`` only the drawn groups', which also test the global model
    (:mod:`flcore.evaluation.eval_data`).
    """
    if partitioner.name != "by_group" or dataset.train.groups is None or dataset.test.groups is None:
        return np.arange(len(dataset.test))
    (drawn,) = own_group([merge_indices(trains)], dataset.train.groups.numpy(), dataset.test.groups.numpy())
    return drawn


def _official_tests(
    protocol: ClientTest, counts: np.ndarray, test_labels: np.ndarray, shots: int, rng: np.random.Generator
) -> list[Indices]:
    if protocol in ("label_slices", "task_cumulative"):
        return label_slices(counts, test_labels, rng)
    if protocol == "few_shot":
        return few_shot(counts, test_labels, shots, rng)
    return proportional(counts, test_labels, rng)


def _test_notes(tests: Sequence[Indices], test_source: str) -> list[str]:
    notes = []
    without = [f"{client:04d}" for client, test in enumerate(tests) if len(test) == 0]
    if without:
        # A few by name: a large population may have thousands, and `test` in each client's entry says the same.
        named = ", ".join(without[:8]) + (", ..." if len(without) > 8 else "")
        notes.append(f"{len(without)} clients have no test samples: {named}")
    used = np.concatenate(tests)
    if len(np.unique(used)) < len(used):
        notes.append(f"samples of the {test_source} split test several clients")
    return notes


def _class_counts(parts: Sequence[Indices], labels: np.ndarray, num_classes: int) -> np.ndarray:
    """int64 [parts, C]."""
    rows = [np.bincount(labels[part], minlength=num_classes) for part in parts]
    return np.array(rows, dtype=np.int64).reshape(len(rows), num_classes)


def _check(assignment: Assignment, num_clients: int, total: int, test_total: int) -> None:
    """Refuse a division that breaks its own promises: a mistake of a partitioner or a file must not become a result."""
    owners = np.zeros(total, dtype=np.int64)
    if len(assignment.clients) != num_clients:
        raise DataError(f"partitioner made {len(assignment.clients)} clients instead of {num_clients}")
    for client, own in enumerate(assignment.clients):
        if len(own) == 0:
            raise DataError(f"client {client:04d} has no training samples; use fewer clients or more data")
        for task, part in enumerate([] if assignment.tasks is None else assignment.tasks[client]):
            if len(part) == 0:
                raise DataError(
                    f"client {client:04d}, task {task:02d} has no training samples, and each task is trained on; use "
                    "fewer tasks, or give it some"
                )
        _check_indices(own, total, f"client {client:04d}")
        owners[own] += 1
    held_out = assignment.held_out
    if held_out is not None:
        _check_held_out(held_out, owners, total, test_total)
    if not assignment.overlap and owners.max() > 1:
        raise DataError(f"training sample {owners.argmax()} has {owners.max()} owners; clients must be disjoint")
    if assignment.complete and owners.min() < 1:
        raise DataError(f"training sample {owners.argmin()} has no owner, although all samples were to be used")


def _check_held_out(held_out: HeldOut, owners: np.ndarray, total: int, test_total: int) -> None:
    """Check imported validation and test samples; validation samples count as owned from here on."""
    is_trained = owners > 0
    for client, own in enumerate(held_out.val or []):
        _check_indices(own, total, f"client {client:04d}, val")
        if is_trained[own].any():
            raise DataError(f"client {client:04d}: val sample {own[is_trained[own]][0]} is also a training sample")
        owners[own] += 1
    of_train = held_out.test_source == "train"
    for client, own in enumerate(held_out.test or []):
        _check_indices(own, total if of_train else test_total, f"client {client:04d}, test")
        if of_train and (owners[own] > 0).any():
            sample = own[owners[own] > 0][0]
            raise DataError(f"client {client:04d}: test sample {sample} is also a training or validation sample")


def _check_indices(indices: Indices, total: int, where: str) -> None:
    if not is_ascending(indices) or (len(indices) and (indices[0] < 0 or indices[-1] >= total)):
        raise DataError(f"{where}: indices repeat, are out of order or beyond the {total} samples")
