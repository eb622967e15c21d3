"""Test samples of each client (data.md, part 3), and the stratified cut that holds samples out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from flcore.data.partitioners.base import Indices, collect, indices_by_class, merge_indices, split_by_shares

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
