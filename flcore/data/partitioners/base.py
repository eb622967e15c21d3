"""What a partitioner is, and what they share: cutting, class indices, refusals (data.md, section 2.0)."""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from flcore.core.errors import DataError

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
    """Who owns which training sample.

    Attributes:
        clients: per client the indices of its samples, int64 and ascending.
        complete: every sample is promised to have an owner.
        overlap: a sample may have several owners.
        retries: attempts that were thrown away before this one.
        notes: facts about the result that a reader of the results should know.
        tasks: per client its indices by task, in the order the client meets them; None where there are no tasks.
        held_out: validation and test samples that were decided elsewhere.
    """

    clients: list[Indices]
    complete: bool = True
    overlap: bool = False
    retries: int = 0
    notes: tuple[str, ...] = ()
    tasks: list[list[Indices]] | None = None
    held_out: HeldOut | None = None


@dataclass(frozen=True)
class Partitioner(abc.ABC):
    """A rule that divides training samples among clients. Its options are fields made with ``param``."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """What a manifest records of the options: their values."""
        return dataclasses.asdict(self)

    def refusal(self, num_clients: int, num_classes: int | None) -> str | None:
        """Return why so many classes cannot be divided among so many clients, with values that would work; or None.

        Args:
            num_clients: K.
            num_classes: C; None where only the data will tell.
        """
        return None

    @abc.abstractmethod
    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        """Divide the samples.

        Args:
            labels: int64 [N], classes from 0.
            num_clients: how many clients.
            rng: the only source of randomness.
            groups: int64 [N], the writer or user of each sample, where the dataset knows it.

        Raises:
            DataError: the request cannot be met; the message says why and what would work.
        """


def check_request(labels: np.ndarray, num_clients: int, min_size: int = 1) -> None:
    """Refuse what no partitioner can do: no clients, or fewer samples than the clients need.

    Raises:
        DataError: always with a number of clients that would work.
    """
    if num_clients < 1:
        raise DataError(f"partition.num_clients = {num_clients}: at least 1 client is needed")
    if len(labels) < num_clients * max(min_size, 1):
        most = len(labels) // max(min_size, 1)
        raise DataError(
            f"partition.num_clients = {num_clients}: {len(labels)} training samples cannot give every client "
            f"{max(min_size, 1)}; the largest number possible is {most}"
        )


def refuse(partitioner: Partitioner, num_clients: int, num_classes: int) -> None:
    """Raise what :meth:`Partitioner.refusal` says, where the data are read: a configuration may not know the classes.

    Raises:
        DataError: it says something.
    """
    reason = partitioner.refusal(num_clients, num_classes)
    if reason is not None:
        raise DataError(reason)


def either(key: str, values: list[int]) -> str:
    """Return settings of a key as a message has them: ``partition.num_clients=5 or 10``."""
    return f"{key}={' or '.join(map(str, values))}"


def split_by_shares(indices: np.ndarray, shares: np.ndarray) -> list[Indices]:
    """Cut ``indices`` at ``floor(cumsum(shares)[:-1] * len(indices))``; the last part takes the rest.

    The parts are in order, disjoint and cover ``indices``. For example 10 indices and shares (0.25, 0.25, 0.5) give
    cumulative shares 0.25, 0.5 and cuts at floor(2.5) = 2 and floor(5) = 5, hence parts of 2, 3 and 5.

    Args:
        indices: [n].
        shares: [k], not negative, with sum 1.
    """
    return np.split(indices, np.cumsum(cut_sizes(len(indices), shares))[:-1])


def cut_sizes(total: int, shares: np.ndarray) -> np.ndarray:
    """The sizes of the parts that :func:`cut` makes of ``total`` indices, int64 [k]."""
    # The guard keeps a sum of 0.9999999999999999 from handing one sample to a last part whose share is 0.
    points = np.floor(np.cumsum(shares)[:-1] * total + 1e-9).astype(np.int64)
    return np.diff(points, prepend=0, append=total)


def indices_by_class(labels: np.ndarray, num_classes: int = 0) -> list[Indices]:
    """Per class the ascending indices of its samples; classes without samples give empty arrays.

    Args:
        labels: int64 [N].
        num_classes: at least so many classes, also where the last ones have no samples.
    """
    order = np.argsort(labels, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(labels, minlength=num_classes))[:-1])


def merge_indices(parts: list[Indices]) -> Indices:
    """The indices of several disjoint parts as one ascending int64 array; no parts give an empty one."""
    return np.sort(np.concatenate(parts)).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
