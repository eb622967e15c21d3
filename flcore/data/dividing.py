"""Making a partition: the training, validation and test samples of every client, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from flcore.core.errors import DataError
from flcore.core.rng import numpy_stream
from flcore.data.dataset import Dataset
from flcore.data.imbalance import Imbalance
from flcore.data.partition import ClientSplit, Partition, fingerprint_of, is_ascending
from flcore.data.partitioners.base import (
    Assignment,
    HeldOut,
    Indices,
    Partitioner,
    collect,
    indices_by_class,
    merge_indices,
    split_by_shares,
)
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
        partitioner: divides the training samples. seed: the experiment's.
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

    def set_aside(
        parts: list[list[Indices]], fraction: float, stream: str, at_least_one: bool = False
    ) -> tuple[list[list[Indices]], list[Indices]]:
        """Take ``fraction`` of each part: the remaining parts, and the samples taken by client."""
        if fraction == 0 and not at_least_one:
            return parts, [np.empty(0, dtype=np.int64) for _ in parts]
        remaining, taken = [], []
        for client, tasks in enumerate(parts):
            rng = numpy_stream(seed, stream, client)
            pairs = [stratified_cut(task, labels, fraction, rng, at_least_one=at_least_one) for task in tasks]
            remaining.append([stays for stays, _ in pairs])
            taken.append(merge_indices([leaves for _, leaves in pairs]))
        return remaining, taken

    # The tasks of each client; without tasks all samples are one.
    parts = [[samples] for samples in assignment.clients] if assignment.tasks is None else assignment.tasks
    vals, tests = held_out.val, held_out.test
    if tests is None and client_test == "local_split":
        parts, tests = set_aside(parts, test_fraction, "partition-test", at_least_one=True)
    if vals is None:
        parts, vals = set_aside(parts, validation, "partition-validation")
    trains = [merge_indices(tasks) for tasks in parts]
    counts = _class_counts(trains, labels, num_classes)
    if tests is None:
        tests = _official_tests(dataset, partitioner, trains, counts, client_test, test_shots, seed)
    tasks = [[] for _ in parts] if assignment.tasks is None else parts
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
    labels, pool = dataset.train.labels.numpy(), np.arange(len(dataset.train))
    if imbalance is not None:
        pool = imbalance.keep(labels, dataset.meta.num_classes, numpy_stream(seed, "partition-imbalance"))
    groups = None if dataset.train.groups is None else dataset.train.groups.numpy()[pool]
    made = partitioner.split(labels[pool], num_clients, numpy_stream(seed, "partition"), groups)
    if imbalance is not None and made.held_out is not None:
        raise DataError("partition.imbalance_gamma: an imported division is of all samples; set it to null")
    _check(made, num_clients, len(pool), len(dataset.test))
    tasks = None if made.tasks is None else [[pool[task] for task in own] for own in made.tasks]
    return dataclasses.replace(made, clients=[pool[own] for own in made.clients], tasks=tasks), pool


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


def _official_tests(
    dataset: Dataset,
    partitioner: Partitioner,
    trains: list[Indices],
    counts: np.ndarray,
    protocol: ClientTest,
    shots: int,
    seed: int,
) -> list[Indices]:
    """Return the samples of the official test split by client.

    With ``by_group`` only the drawn groups', which also test the global model (:mod:`flcore.evaluation.eval_data`).
    """
    groups = None
    if dataset.train.groups is not None and dataset.test.groups is not None:
        groups = dataset.train.groups.numpy(), dataset.test.groups.numpy()
    if protocol == "own_group":
        if groups is None:
            raise DataError(
                "partition.client_test = own_group: the dataset has no groups; use one that names writers or users"
            )
        return own_group(trains, *groups)
    drawn = np.arange(len(dataset.test))
    if partitioner.name == "by_group" and groups is not None:
        (drawn,) = own_group([merge_indices(trains)], *groups)
    labels, rng = dataset.test.labels.numpy()[drawn], numpy_stream(seed, "partition-test")
    if protocol == "few_shot":
        tests = few_shot(counts, labels, shots, rng)
    else:
        tests = (proportional if protocol == "proportional" else label_slices)(counts, labels, rng)
    return [drawn[test] for test in tests]


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
    if assignment.held_out is not None:
        _check_held_out(assignment.held_out, owners, total, test_total)
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


ClientTest = Literal["label_slices", "proportional", "few_shot", "own_group", "local_split", "task_cumulative"]


def label_slices(counts: np.ndarray, pool: np.ndarray, rng: np.random.Generator) -> list[Indices]:
    """Cut each class's test pool into K equal slices; client k gets slice k of its classes (FedGen, FedPA).

    A slice has floor(n / K) of the n test samples of the class; the rest is unused. ``counts`` int [K, C] are training
    samples, ``pool`` int64 [M] labels of the test split; ``rng`` shuffles each class once. Returns disjoint ascending
    indices into the test split.
    """
    num_clients = len(counts)

    def share(c: int, indices: Indices, holders: np.ndarray) -> list[Indices]:
        size = len(indices) // num_clients
        return [indices[k * size : (k + 1) * size] for k in holders]

    return _per_class(counts, pool, rng, share)


def few_shot(counts: np.ndarray, pool: np.ndarray, shots: int, rng: np.random.Generator) -> list[Indices]:
    """Give ``shots`` test samples of every class that a client trains on, as for FedProto and GFPL.

    Blocks are disjoint while a class's pool lasts, then start again; otherwise as :func:`label_slices`.
    """

    def share(c: int, indices: Indices, holders: np.ndarray) -> list[Indices]:
        size = min(shots, len(indices))
        return [indices[np.arange(k * size, (k + 1) * size) % max(len(indices), 1)] for k in range(len(holders))]

    return _per_class(counts, pool, rng, share)


def proportional(counts: np.ndarray, pool: np.ndarray, rng: np.random.Generator) -> list[Indices]:
    """Divide the whole test pool, each class as its training samples are; otherwise as :func:`label_slices`.

    A class without training samples stays unused.
    """

    def share(c: int, indices: Indices, holders: np.ndarray) -> list[Indices]:
        held = counts[holders, c]
        return split_by_shares(indices, held / held.sum()) if len(holders) else []

    return _per_class(counts, pool, rng, share)


def own_group(trains: Sequence[Indices], groups: np.ndarray, test_groups: np.ndarray) -> list[Indices]:
    """Return per client the ascending indices of the official test samples of the groups that it trains on (LEAF).

    ``trains`` are indices into the training split; ``groups`` int64 [N] and ``test_groups`` int64 [M].
    """
    return [np.flatnonzero(np.isin(test_groups, np.unique(groups[train]))) for train in trains]


def _per_class(
    counts: np.ndarray,
    pool: np.ndarray,
    rng: np.random.Generator,
    share: Callable[[int, Indices, np.ndarray], list[Indices]],
) -> list[Indices]:
    """Distribute each class's shuffled pool by ``share`` among the clients that hold the class."""
    pieces: list[tuple[int, Indices]] = []
    for c, indices in enumerate(indices_by_class(pool, counts.shape[1])):
        holders = np.flatnonzero(counts[:, c])
        # Shuffled, because files are not in random order: the first half of MNIST's test set is easier than the second.
        pieces += zip(holders, share(c, rng.permutation(indices), holders), strict=True)
    return collect(len(counts), pieces)


def stratified_cut(
    indices: Indices, labels: np.ndarray, fraction: float, rng: np.random.Generator, *, at_least_one: bool = False
) -> tuple[Indices, Indices]:
    """Hold out ``fraction`` of a client's samples, class by class.

    The number is ``fraction`` · n rounded half up; each class gives floor(``fraction`` · n_c), and the classes with the
    largest remainders one more. The last sample of a class is never taken: a client's set of classes does not change.

    ``indices`` are one client's samples, ascending; ``labels`` are of the whole split. ``at_least_one`` takes one
    sample even if every class has only one, if there are two samples or more. Returns the samples that stay, always
    one or more, and the ones held out, both ascending.
    """
    classes = labels[indices]
    sizes = np.bincount(classes) if len(classes) else np.zeros(1, dtype=np.int64)
    take = _quotas(sizes, fraction, at_least_one)
    drawn = [rng.permutation(indices[classes == c])[: take[c]] for c in np.flatnonzero(take)]
    if not drawn and at_least_one and len(indices) > 1:
        drawn = [rng.choice(indices, size=1)]
    chosen = merge_indices(drawn)
    return np.setdiff1d(indices, chosen, assume_unique=True), chosen


def _quotas(sizes: np.ndarray, fraction: float, at_least_one: bool) -> np.ndarray:
    exact = fraction * sizes
    # The guard makes 0.1 · 30 three, although the product is a little less in binary.
    take: np.ndarray = np.minimum(np.floor(exact + 1e-9).astype(np.int64), np.maximum(sizes - 1, 0))
    target = max(int(np.floor(fraction * sizes.sum() + 0.5 + 1e-9)), int(at_least_one))
    for c in np.argsort(take - exact, kind="stable"):
        if take.sum() < target and take[c] < sizes[c] - 1:
            take[c] += 1
    return take
