"""Dirichlet label skew (LDA), in the four variants found in published code (data.md, section 2.2).

The papers say "Dirichlet with alpha"; their code differs in whether full clients stop receiving, in the smallest size
and in how much of the data is used. The difference changes results, so that the variant is always recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import Search, param
from flcore.data.partitioners.base import (
    Assignment,
    Indices,
    Partitioner,
    check_request,
    cut_sizes,
    indices_by_class,
    merge_indices,
    split_by_shares,
)

_MIN_SIZE = {"balanced": 10, "plain": 1, "subsampled": 10}
_MIN_SIZE_OF_TASK = 2
_GROUP = 10  # clients that share a slice of the data in the equalised variant
_REDRAWS = 10_000


@dataclass(frozen=True)
class Dirichlet(Partitioner, name="dirichlet"):
    """Label skew: each class is divided by shares drawn from a Dirichlet distribution.

    - ``balanced`` (MOON, FedCSPC, PFLlib, NIID-Bench): a client that has N/K samples gets nothing of further classes.
    - ``plain`` (FederatedScope, used by FedPG): no balancing.
    - ``subsampled`` (FedGen, FedPA): balanced on ``ratio`` of the data; the cap per client also limits each class.
    - ``equalised`` (FedDF, CReFF): balanced in groups of ten clients, then cut again into equal sizes.

    All variants are disjoint; all but ``subsampled`` use every sample. With ``tasks`` above 1 (FedMLP's DDA, which is
    ``plain``; data.md 2.6) the shares are drawn over all K · T tasks, of which client k has k · T to k · T + T - 1; or,
    ``nested``, over clients first and then over each one's tasks.
    """

    alpha: float = param(
        0.5, "concentration: small is skewed, large is close to IID", above=0, search=Search(0.05, 10, True)
    )
    variant: Literal["balanced", "plain", "subsampled", "equalised"] = param(
        "balanced",
        "the code to follow: balanced (MOON, PFLlib), plain (FederatedScope), subsampled (FedGen), equalised (FedDF)",
    )
    min_size: int | None = param(
        None,
        "fewest samples of a client, or of a task; null: 10 (plain: 1, tasks: 2, equalised: half its group's average)",
        low=1,
    )
    ratio: float = param(1.0, "share of the data to use, for the subsampled variant only", above=0, high=1)
    max_tries: int = param(1000, "attempts at meeting min_size before giving up", low=1)
    tasks: int = param(1, "tasks of each client, met one after the other; for plain and balanced", low=1)
    nested: bool = param(False, "with tasks: divide among clients first, then each client's share among its tasks")

    def __post_init__(self) -> None:
        if self.tasks > 1 and self.variant not in ("plain", "balanced"):
            raise ValueError(f"tasks = {self.tasks} needs variant: plain (as in FedMLP) or balanced")
        if self.ratio != 1.0 and self.variant != "subsampled":
            raise ValueError(
                f"ratio = {self.ratio} needs variant: subsampled (the {self.variant} variant uses all data)"
            )

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        if self.tasks > 1:
            return self._with_tasks(labels, num_clients, rng)
        min_size = self.min_size or _MIN_SIZE.get(self.variant, 1)
        check_request(labels, num_clients, min_size)
        if self.variant == "equalised":
            return self._equalised(labels, num_clients, rng)
        by_class = indices_by_class(labels)
        if self.variant == "subsampled":
            return self._subsampled(by_class, num_clients, min_size, rng)
        capacity = len(labels) / num_clients if self.variant == "balanced" else None
        attempt = partial(_divide, by_class, num_clients, self.alpha, capacity, rng)
        clients, retries = self._until(min_size, num_clients, attempt)
        return Assignment([np.sort(client) for client in clients], retries=retries)

    def _with_tasks(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Assignment:
        min_size = self.min_size or _MIN_SIZE_OF_TASK
        check_request(labels, num_clients, self.tasks * min_size)
        by_class = indices_by_class(labels)

        def divide(classes: list[Indices], parts: int) -> list[Indices]:
            capacity = sum(map(len, classes)) / parts if self.variant == "balanced" else None
            return _divide(classes, parts, self.alpha, capacity, rng)

        def attempt() -> list[Indices]:
            if not self.nested:
                return divide(by_class, num_clients * self.tasks)
            clients = divide(by_class, num_clients)
            classes_of = ([own[labels[own] == c] for c in range(len(by_class))] for own in clients)
            return [task for own in classes_of for task in divide(own, self.tasks)]

        flat, retries = self._until(min_size, num_clients, attempt, "task")
        tasks = [[np.sort(task) for task in flat[k * self.tasks : (k + 1) * self.tasks]] for k in range(num_clients)]
        return Assignment([merge_indices(own) for own in tasks], retries=retries, tasks=tasks)

    def _subsampled(
        self, by_class: list[Indices], num_clients: int, min_size: int, rng: np.random.Generator
    ) -> Assignment:
        total = sum(map(len, by_class))
        capacity = self.ratio * total / num_clients

        def attempt() -> list[Indices]:
            order = rng.permutation(len(by_class))
            # The limit per class is the capacity of one *client*, as in FedGen's code: many clients leave much unused.
            kept = [rng.permutation(by_class[c])[: int(min(capacity, self.ratio * len(by_class[c])))] for c in order]
            return _divide(kept, num_clients, self.alpha, capacity, rng)

        clients, retries = self._until(min_size, num_clients, attempt)
        note = f"subsampled: {sum(map(len, clients))} of {total} samples used"
        return Assignment([np.sort(client) for client in clients], complete=False, retries=retries, notes=(note,))

    def _equalised(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Assignment:
        deck = rng.permutation(len(labels)).astype(np.int64)
        sizes = [min(_GROUP, num_clients - first) for first in range(0, num_clients, _GROUP)]
        sequence: list[Indices] = []
        discarded = 0
        for size, part in zip(sizes, split_by_shares(deck, np.array(sizes) / num_clients), strict=True):
            piece, average = np.sort(part), len(part) / size
            by_class = [piece[rows] for rows in indices_by_class(labels[piece])]
            attempt = partial(_divide, by_class, size, self.alpha, average, rng)
            members, retries = self._until(self.min_size or int(average / 2), size, attempt)
            sequence += members
            discarded += retries
        clients = np.array_split(np.concatenate(sequence), num_clients)
        return Assignment([np.sort(client) for client in clients], retries=discarded)

    def _until(
        self, min_size: int, num_clients: int, attempt: Callable[[], list[Indices]], unit: str = "client"
    ) -> tuple[list[Indices], int]:
        """Repeat ``attempt`` until every part has ``min_size`` samples; also return the discarded attempts."""
        best = 0
        for retries in range(self.max_tries):
            clients = attempt()
            smallest = min(map(len, clients))
            if smallest >= min_size:
                return clients, retries
            best = max(best, smallest)
        raise DataError(
            f"partition.alpha = {self.alpha:g}: in {self.max_tries} attempts for {num_clients} clients the smallest "
            f"{unit} never had more than {best} samples, {min_size} are required\n"
            "raise partition.alpha, or lower partition.min_size or partition.num_clients"
        )


def _divide(
    by_class: list[Indices], num_clients: int, alpha: float, capacity: float | None, rng: np.random.Generator
) -> list[Indices]:
    """Return one attempt: per client its samples in order of class. Clients with ``capacity`` samples get no more."""
    sizes = np.zeros(num_clients, dtype=np.int64)
    decks, owners = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for indices in by_class:
        if len(indices) == 0:
            continue
        is_open = np.ones(num_clients, dtype=bool) if capacity is None else sizes < capacity
        gained = cut_sizes(len(indices), _draw_shares(is_open, alpha, rng))
        decks.append(rng.permutation(indices))
        owners.append(np.repeat(np.arange(num_clients), gained))
        sizes += gained
    # One stable sort: 10,000 clients would have 100,000 pieces by client and class.
    order = np.argsort(np.concatenate(owners), kind="stable")
    return np.split(np.concatenate(decks)[order], np.cumsum(sizes)[:-1])


def _draw_shares(is_open: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw Dirichlet shares, 0 for closed clients; again while nothing is left."""
    for _ in range(_REDRAWS):
        shares = np.where(is_open, rng.dirichlet(np.full(len(is_open), alpha)), 0.0)
        total = shares.sum()
        if np.isfinite(total) and total > 0:
            return np.asarray(shares / total)
    raise DataError(
        f"partition.alpha = {alpha:g}: too small to draw shares for {len(is_open)} clients; raise partition.alpha"
    )
