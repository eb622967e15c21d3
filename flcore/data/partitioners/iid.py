"""IID: a shuffled deck dealt to the clients (data.md, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flcore.core.params import param
from flcore.data.partitioners.base import Assignment, Partitioner, check_request, indices_by_class


@dataclass(frozen=True)
class Iid(Partitioner):
    """Equal random parts; disjoint, all samples used, sizes differ by at most 1."""

    name: ClassVar[str] = "iid"
    summary: ClassVar[str] = "equal random parts: every client sees the same distribution"

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
