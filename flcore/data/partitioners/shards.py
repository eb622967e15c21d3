"""Shards of samples sorted by label, grouped into tasks (data.md, section 2.5; FedMLP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flcore.core.params import param
from flcore.data.partitioners.base import Assignment, Partitioner, check_request, indices_by_class, merge_indices


@dataclass(frozen=True)
class Shards(Partitioner):
    """The samples, sorted by label, are cut into equal shards that are dealt at random, ``shards`` to each task.

    Disjoint over tasks and clients, all samples used; task sizes differ by at most ``shards``. A task has at most
    2 · shards classes if every class is at least as large as a shard.
    """

    name: ClassVar[str] = "shards"
    summary: ClassVar[str] = "samples sorted by label, cut into shards that are dealt at random (FedAvg, FedMLP)"

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
