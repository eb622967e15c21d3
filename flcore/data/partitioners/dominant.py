"""Every client has one dominant class (data.md, section 2.4; FedPG's subset partition with 95 %)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.partitioners.base import (
    Assignment,
    Indices,
    Partitioner,
    check_request,
    indices_by_class,
    merge_indices,
    refuse,
    split_by_shares,
)


@dataclass(frozen=True)
class Dominant(Partitioner):
    """Class c gives ``share`` of its samples to its main clients (k mod C = c) and the rest evenly to all others.

    With K = q · C clients each of the q main clients gets share/q. Disjoint, all samples used. The code published with
    VHL re-normalises otherwise and loses the dominance for q > 1; that is not copied.
    """

    name: ClassVar[str] = "dominant"
    summary: ClassVar[str] = "every client has one dominant class (FedPG: 95 % of its samples)"

    share: float = param(0.95, "share of a class that goes to its main clients", above=0, below=1)

    def refusal(self, num_clients: int, num_classes: int | None) -> str | None:
        if num_classes is None or (num_classes > 1 and num_clients % num_classes == 0):
            return None
        return (
            f"partition.num_clients = {num_clients}: a dominant class per client needs a multiple of the "
            f"{num_classes} classes (at least 2); use {_nearest_multiple(num_classes, num_clients)} clients"
        )

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        check_request(labels, num_clients)
        by_class = indices_by_class(labels)
        num_classes = len(by_class)
        refuse(self, num_clients, num_classes)
        owned: list[list[Indices]] = [[] for _ in range(num_clients)]
        for c, indices in enumerate(by_class):
            shares = self._shares(c, num_clients, num_classes)
            for client, piece in enumerate(split_by_shares(rng.permutation(indices), shares)):
                owned[client].append(piece)
        clients = [merge_indices(parts) for parts in owned]
        _refuse_empty(clients)
        return Assignment(clients)

    def _shares(self, c: int, num_clients: int, num_classes: int) -> np.ndarray:
        is_main = np.arange(num_clients) % num_classes == c
        mains = int(is_main.sum())
        return np.where(is_main, self.share / mains, (1 - self.share) / (num_clients - mains))


def _nearest_multiple(num_classes: int, num_clients: int) -> int:
    step = max(num_classes, 2)
    return step * max(1, round(num_clients / step))


def _refuse_empty(clients: list[Indices]) -> None:
    for client, indices in enumerate(clients):
        if len(indices) == 0:
            raise DataError(f"client {client} would get no samples; lower partition.num_clients or use more data")
