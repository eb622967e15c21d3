"""Partitions by one rule: equal parts, shards (FedMLP), groups, dominant classes (FedPG) (data.md, part 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.partitioners.base import (
    Assignment,
    Indices,
    Partitioner,
    check_request,
    collect,
    indices_by_class,
    merge_indices,
    split_by_shares,
)


@dataclass(frozen=True)
class Iid(Partitioner, name="iid"):
    """Equal random parts: every client sees the same distribution.

    Disjoint; all samples are used; sizes differ by at most 1.
    """

    stratified: bool = param(False, "give every client the same share of each class, to within one sample")

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        check_request(labels, num_clients)
        if self.stratified:
            deck = np.concatenate([rng.permutation(indices) for indices in indices_by_class(labels)])
        else:
            deck = rng.permutation(len(labels))
        # Dealing one by one, also across class borders, keeps class counts and sizes within one sample of each other.
        return Assignment([np.sort(deck[client::num_clients]).astype(np.int64) for client in range(num_clients)])


@dataclass(frozen=True)
class Shards(Partitioner, name="shards"):
    """Samples sorted by label, cut into shards that are dealt at random (FedAvg, FedMLP).

    ``shards`` equal shards go to each task. Disjoint over tasks and clients, all samples used; task sizes differ by at
    most ``shards``. A task has at most 2 · shards classes if every class is at least as large as a shard.
    """

    shards: int = param(2, "shards of each task", low=1)
    tasks: int = param(1, "tasks of each client, met one after the other", low=1)

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        check_request(labels, num_clients, min_size=self.shards * self.tasks)
        ordered = np.concatenate([rng.permutation(indices) for indices in indices_by_class(labels)])
        pieces = np.array_split(ordered, num_clients * self.tasks * self.shards)
        dealt = rng.permutation(len(pieces)).reshape(num_clients, self.tasks, self.shards)
        tasks = [[merge_indices([pieces[shard] for shard in task]) for task in client] for client in dealt]
        clients = [merge_indices(own) for own in tasks]
        return Assignment(clients, tasks=tasks if self.tasks > 1 else None)


@dataclass(frozen=True)
class ByGroup(Partitioner, name="by_group"):
    """Natural: one client per writer, user or site of the dataset, or per several merged.

    Groups are drawn by chance and never divided.
    """

    min_size: int = param(10, "groups with fewer samples than this are dropped", low=1)
    merge: int = param(1, "groups that are merged into one client", low=1)

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        check_request(labels, num_clients)
        if groups is None:
            raise DataError(
                "partition.name = by_group: the dataset has no groups; use one that names writers or users, or images "
                "by site (data.name=imagefolder with data.layout=sites or csv)"
            )
        identifiers, sizes = np.unique(groups, return_counts=True)
        eligible = identifiers[sizes >= self.min_size]
        needed = num_clients * self.merge
        if needed > len(eligible):
            raise DataError(
                f"partition.num_clients = {num_clients}: needs {needed} groups of at least {self.min_size} samples; "
                f"the dataset has {len(eligible)}; the largest number possible is {len(eligible) // self.merge}"
            )
        # Drawn, then put in order of identifier: client numbers follow the dataset's own order.
        chosen = np.sort(rng.choice(eligible, size=needed, replace=False)).reshape(num_clients, self.merge)
        members = np.split(np.argsort(groups, kind="stable"), np.cumsum(sizes)[:-1])
        clients = [merge_indices([members[place] for place in np.searchsorted(identifiers, group)]) for group in chosen]
        note = f"by_group: {needed} of {len(identifiers)} groups used, {len(identifiers) - len(eligible)} are too small"
        return Assignment(clients, complete=needed == len(identifiers), notes=(note,))


@dataclass(frozen=True)
class Dominant(Partitioner, name="dominant"):
    """Every client has one dominant class (FedPG: 95 % of its samples).

    Class c gives ``share`` of its samples to its main clients (k mod C = c) and the rest evenly to all others: with K =
    q · C clients each of the q main clients gets share/q. Disjoint, all samples used. The code published with VHL
    re-normalises otherwise and loses the dominance for q > 1; that is not copied.
    """

    share: float = param(0.95, "share of a class that goes to its main clients", above=0, below=1)

    def refusal(self, num_clients: int, num_classes: int | None) -> str | None:
        if num_classes is None or (num_classes > 1 and num_clients % num_classes == 0):
            return None
        step = max(num_classes, 2)
        return (
            f"partition.num_clients = {num_clients}: a dominant class per client needs a multiple of the "
            f"{num_classes} classes (at least 2); use {step * max(1, round(num_clients / step))} clients"
        )

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        by_class = self._by_class(labels, num_clients)
        pieces: list[tuple[int, Indices]] = []
        for c, indices in enumerate(by_class):
            is_main = np.arange(num_clients) % len(by_class) == c
            mains = int(is_main.sum())
            shares = np.where(is_main, self.share / mains, (1 - self.share) / (num_clients - mains))
            pieces += enumerate(split_by_shares(rng.permutation(indices), shares))
        clients = collect(num_clients, pieces)
        for client, own in enumerate(clients):
            if len(own) == 0:
                raise DataError(f"client {client} would get no samples; lower partition.num_clients or use more data")
        return Assignment(clients)
