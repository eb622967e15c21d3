"""A partition in a dozen lines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flcore.data.tasks import new_classes

if TYPE_CHECKING:  # reports import this module without torch
    from flcore.data.dataset import Dataset
    from flcore.data.partition import Partition


def summarise_partition(partition: Partition) -> list[tuple[str, str]]:
    """Return facts about a partition, as pairs of a name and a value in words.

    Three numbers with slashes are the smallest, the median and the largest. For the measures of skew see
    :class:`flcore.data.summary.Skew`.
    """
    counts, measured = partition.counts, skew(partition.counts)
    rows = [
        ("clients", f"{partition.num_clients}"),
        ("training samples", f"{counts.sum()}; per client {_spread(counts.sum(axis=1))}"),
        ("classes per client", f"{_spread((counts > 0).sum(axis=1))} of {partition.num_classes}"),
    ]
    rows += [
        (f"{name} samples", f"per client {_spread(partition.sizes[part])}")
        for name, part in (("validation", "val"), ("test", "test"))
        if any(partition.sizes[part])
    ]
    rows += [
        ("missing classes", f"{100 * measured.missing_class_share:.1f} % of all, mean over clients"),
        ("Jensen-Shannon distance", f"{measured.js_distance:.3f}, mean over pairs of clients (0 to 1)"),
        ("earth mover's distance", f"{measured.earth_movers_distance:.3f} to all clients together, mean (0 to 2)"),
    ]
    rows += _long_tail_rows(partition) + _task_rows(partition)
    if partition.retries:
        rows.append(("attempts thrown away", str(partition.retries)))
    return rows + [("note", note) for note in partition.notes]


def repeated_images(dataset: Dataset) -> str | None:
    """Return a warning about test images that are also training images; None if there are none."""
    train, test = (
        [hashlib.blake2b(image, digest_size=16).digest() for image in split.images.numpy()]
        for split in (dataset.train, dataset.test)
    )
    trained = set(train)
    count = sum(digest in trained for digest in test)
    if count == 0:
        return None
    which = "test image is a training image" if count == 1 else "test images are training images"
    return f"{dataset.meta.name}: {count} {which} too, pixel for pixel"


def _long_tail_rows(partition: Partition) -> list[tuple[str, str]]:
    sizes, minority = partition.class_counts, partition.minority_classes
    if not minority:
        return []
    rows = [("samples per class", _spread(sizes))]
    if partition.parameters.get("imbalance") is not None:
        rows.append(("minority classes", ", ".join(map(str, minority))))
    return rows


def _task_rows(partition: Partition) -> list[tuple[str, str]]:
    if partition.num_tasks == 0:
        return []
    counts = partition.task_counts
    fresh = np.array([[len(classes) for classes in new_classes(own)] for own in counts])
    return [
        ("tasks per client", str(partition.num_tasks)),
        ("samples per task", _spread(counts.sum(axis=2).ravel())),
        ("classes per task", f"{(counts > 0).sum(axis=2).mean():.1f} on average"),
        ("new classes by task", ", ".join(f"{mean:.1f}" for mean in fresh.mean(axis=0)) + " on average"),
    ]


def _spread(values: Sequence[int] | np.ndarray) -> str:
    return f"{np.min(values)} / {np.median(values):g} / {np.max(values)}"


_MOST_CLIENTS = 1000  # 499,500 pairs


@dataclass(frozen=True)
class Skew:
    """Label skew of a partition.

    ``js_distance`` is the mean over pairs of clients of the Jensen-Shannon distance (square root of the divergence in
    bits, from 0 to 1). ``missing_class_share`` is the mean share of classes that a client lacks.
    ``earth_movers_distance`` is the mean over clients of sum_c |p_k(c) - p(c)|, where p_k is the client's distribution
    and p all clients' together: from 0 to 2 (Zhao et al., 2018).
    """

    js_distance: float
    missing_class_share: float
    earth_movers_distance: float


def skew(counts: np.ndarray) -> Skew:
    """Measure the skew of ``counts``, int [K, C], without empty clients; one client has distance 0.

    Beyond 1,000 clients the Jensen-Shannon distance is of 1,000 of them, always the same ones. Raises ValueError if no
    client has samples.
    """
    held = counts[counts.sum(axis=1) > 0]
    if len(held) == 0:
        raise ValueError("no client has samples")
    shares = held / held.sum(axis=1, keepdims=True)
    together = held.sum(axis=0) / held.sum()
    return Skew(
        js_distance=_mean_js_distance(_at_most(_MOST_CLIENTS, shares)),
        missing_class_share=float((held == 0).mean()),
        earth_movers_distance=float(np.abs(shares - together).sum(axis=1).mean()),
    )


def _at_most(most: int, rows: np.ndarray) -> np.ndarray:
    # Drawn, not every tenth: client numbers and classes are often in step with one another.
    return rows if len(rows) <= most else rows[np.random.default_rng(0).choice(len(rows), size=most, replace=False)]


def _mean_js_distance(shares: np.ndarray) -> float:
    num_clients = len(shares)
    if num_clients < 2:
        return 0.0
    entropy = _entropy(shares)
    total = 0.0
    for k in range(num_clients - 1):  # row by row: all pairs at once would take K² · C numbers
        divergence = _entropy((shares[k] + shares[k + 1 :]) / 2) - (entropy[k] + entropy[k + 1 :]) / 2
        total += float(np.sqrt(np.maximum(divergence, 0)).sum())
    return total / (num_clients * (num_clients - 1) / 2)


def _entropy(shares: np.ndarray) -> np.ndarray:
    entropy: np.ndarray = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=1)
    return entropy
