"""The interface of partitioners, and shared functions: cutting, class indices (data.md, section 2.0)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flcore.core.errors import DataError
from flcore.core.registry import Named

Indices = np.ndarray


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Validation and test samples that come with a division instead of being cut: per client, or None.

    ``test_source`` is the split that ``test`` indexes; ``val`` indexes the training split.
    """

    val: list[Indices] | None
    test: list[Indices] | None
    test_source: Literal["test", "train"]


@dataclass(frozen=True, eq=False)
class Assignment:
    """The owners of training samples.

    Attributes:
        clients: per client the indices of its samples, int64 and ascending.
        complete: every sample must have an owner. overlap: a sample may have several.
        retries: discarded attempts.
        notes: facts about the result for readers of the results.
        tasks: per client its indices by task, in order; None without tasks.
        held_out: imported validation and test samples.
    """

    clients: list[Indices]
    complete: bool = True
    overlap: bool = False
    retries: int = 0
    notes: tuple[str, ...] = ()
    tasks: list[list[Indices]] | None = None
    held_out: HeldOut | None = None


@dataclass(frozen=True)
class Partitioner(Named, abc.ABC):
    """A rule that divides training samples among clients. Its options are fields made with ``param``."""

    def options(self) -> dict[str, Any]:
        """Return the options for the manifest."""
        return dataclasses.asdict(self)

    def refusal(self, num_clients: int, num_classes: int | None) -> str | None:
        """Return why this number of clients and classes does not work, with values that would; or None.

        ``num_classes`` is None if only the data will tell.
        """
        return None

    def _by_class(self, labels: np.ndarray, num_clients: int) -> list[Indices]:
        """Return :func:`indices_by_class`; raise DataError for too few samples or a :meth:`refusal`."""
        check_request(labels, num_clients)
        by_class = indices_by_class(labels)
        if (reason := self.refusal(num_clients, len(by_class))) is not None:
            raise DataError(reason)
        return by_class

    @abc.abstractmethod
    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        """Divide the samples, or raise DataError with the reason and what would work.

        ``labels`` int64 [N] are classes from 0; ``rng`` is the only source of randomness; ``groups`` int64 [N] are the
        writer or user of each sample, if the dataset knows it.
        """


def check_request(labels: np.ndarray, num_clients: int, min_size: int = 1) -> None:
    """Refuse no clients, or fewer samples than the clients need, with a number of clients that would work."""
    if num_clients < 1:
        raise DataError(f"partition.num_clients = {num_clients}: at least 1 client is needed")
    if len(labels) < num_clients * max(min_size, 1):
        most = len(labels) // max(min_size, 1)
        raise DataError(
            f"partition.num_clients = {num_clients}: {len(labels)} training samples cannot give every client "
            f"{max(min_size, 1)}; the largest number possible is {most}"
        )


def either(key: str, values: list[int]) -> str:
    """Return alternative settings of a key for a message: ``partition.num_clients=5 or 10``."""
    return f"{key}={' or '.join(map(str, values))}"


def split_by_shares(indices: np.ndarray, shares: np.ndarray) -> list[Indices]:
    """Cut ``indices`` at ``floor(cumsum(shares)[:-1] * len(indices))``; the last part takes the rest.

    For example 10 indices and shares (0.25, 0.25, 0.5) give cumulative shares 0.25, 0.5 and cuts at floor(2.5) = 2 and
    floor(5) = 5, hence parts of 2, 3 and 5. ``shares`` [k] are not negative, with sum 1.
    """
    return np.split(indices, np.cumsum(cut_sizes(len(indices), shares))[:-1])


def cut_sizes(total: int, shares: np.ndarray) -> np.ndarray:
    """Return the sizes of the parts of :func:`split_by_shares` for ``total`` indices, int64 [k]."""
    # The guard prevents a sum of 0.9999999999999999 from giving one sample to a last part with share 0.
    points = np.floor(np.cumsum(shares)[:-1] * total + 1e-9).astype(np.int64)
    return np.diff(points, prepend=0, append=total)


def indices_by_class(labels: np.ndarray, num_classes: int = 0) -> list[Indices]:
    """Return per class the ascending indices of samples in ``labels`` int64 [N], ``num_classes`` or more."""
    order = np.argsort(labels, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(labels, minlength=num_classes))[:-1])


def merge_indices(parts: list[Indices]) -> Indices:
    """Merge disjoint parts into one ascending int64 array; no parts give an empty one."""
    return np.sort(np.concatenate(parts)).astype(np.int64) if parts else np.empty(0, dtype=np.int64)


def collect(num_clients: int, pieces: Iterable[tuple[int, Indices]]) -> list[Indices]:
    """Return the merged pieces of each client from pairs of client and piece."""
    owned: list[list[Indices]] = [[] for _ in range(num_clients)]
    for client, piece in pieces:
        owned[client].append(piece)
    return [merge_indices(parts) for parts in owned]
