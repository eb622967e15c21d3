"""w-way s-shot (data.md, section 2.8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.partitioners.base import Assignment, Partitioner, merge_indices


@dataclass(frozen=True)
class WaysShots(Partitioner, name="ways_shots"):
    """Few-shot: each client has w classes with s samples of each (FedProto, GFPL).

    Client k draws its number of classes, the classes, and one number of samples for each of them. The ``fedproto``
    kinds have the ranges of FedProto's published code: ways in [max(2, w - r), min(C - 1, w + r)]; shots in [s - q + 1,
    s + q] as for CIFAR-10 and FEMNIST, with ``fedproto_mnist`` in [s - q + 1, s + q - 2] (an off-by-one of the code,
    hence q at least 2), with ``fedproto_cifar100`` exactly s. ``uniform`` is symmetric, [m - r, m + r]; ``normal`` is
    rounded N(m, r²); both are clipped to [1, C] for ways and to at least 1 for shots. Not all samples are used. Clients
    are disjoint while the classes last; beyond that samples are reused, with a note, or the request is refused
    (``strict``).
    """

    ways: int = param(3, "mean number of classes per client (w)", low=1)
    shots: int = param(100, "mean number of samples per class and client (s)", low=1)
    ways_spread: int = param(2, "spread of the number of classes (r)", low=0)
    shots_spread: int = param(2, "spread of the number of samples (q)", low=0)
    kind: Literal["fedproto", "fedproto_mnist", "fedproto_cifar100", "uniform", "normal"] = param(
        "fedproto", "how numbers are drawn around their mean; FedProto's code has other shots for MNIST and CIFAR-100"
    )
    strict: bool = param(False, "refuse, instead of using samples twice, when a class is too small")

    def refusal(self, num_clients: int, num_classes: int | None) -> str | None:
        if not self.kind.startswith("fedproto"):
            return None
        if self.kind == "fedproto_mnist" and self.shots_spread == 1:
            return "partition.shots_spread = 1: kind fedproto_mnist needs 0, or 2 and more"
        low, high = self._range_of_ways(math.inf if num_classes is None else num_classes)
        if low <= high:
            return None
        return (
            f"partition.ways = {self.ways}, partition.ways_spread = {self.ways_spread}: no number of classes is in "
            f"[{low}, {high}] with {num_classes or 'any number of'} classes; use partition.kind=uniform or other ways"
        )

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        by_class = self._by_class(labels, num_clients)
        hands = []
        for _ in range(num_clients):
            ways, shots = self._draw_ways(len(by_class), rng), self._draw_shots(rng)
            hands.append((np.sort(rng.choice(len(by_class), size=ways, replace=False)), shots))
        queues = [rng.permutation(indices) for indices in by_class]
        taken = np.zeros(len(by_class), dtype=np.int64)
        clients = []
        for client, (classes, shots) in enumerate(hands):
            pieces = []
            for c in classes.tolist():
                self._check_capacity(client, c, shots, int(taken[c]), len(queues[c]))
                # A queue that wraps around: disjoint until the class is used up, then from the beginning again.
                pieces.append(queues[c][np.arange(taken[c], taken[c] + shots) % len(queues[c])])
                taken[c] += shots
            clients.append(merge_indices(pieces))
        short = [c for c, queue in enumerate(queues) if taken[c] > len(queue)]
        notes = (f"samples used by several clients in classes {', '.join(map(str, short))}",) if short else ()
        return Assignment(clients, complete=False, overlap=bool(short), notes=notes)

    def _range_of_ways(self, num_classes: float) -> tuple[int, int]:
        return max(2, self.ways - self.ways_spread), int(min(num_classes - 1, self.ways + self.ways_spread))

    def _draw_ways(self, num_classes: int, rng: np.random.Generator) -> int:
        if self.kind.startswith("fedproto"):
            low, high = self._range_of_ways(num_classes)
            return int(rng.integers(low, high + 1))
        return int(np.clip(_around(self.ways, self.ways_spread, self.kind, rng), 1, num_classes))

    def _draw_shots(self, rng: np.random.Generator) -> int:
        mean, spread = self.shots, self.shots_spread
        if self.kind == "fedproto_cifar100" or (self.kind.startswith("fedproto") and spread == 0):
            return mean
        if self.kind.startswith("fedproto"):
            low, high = mean - spread + 1, mean + spread - (2 if self.kind == "fedproto_mnist" else 0)
            return max(1, int(rng.integers(low, high + 1)))
        return max(1, _around(self.shots, self.shots_spread, self.kind, rng))

    def _check_capacity(self, client: int, c: int, shots: int, taken: int, size: int) -> None:
        if shots > size:
            raise DataError(
                f"client {client} needs {shots} samples of class {c}, which has {size}; lower partition.shots"
            )
        if self.strict and taken + shots > size:
            raise DataError(
                f"client {client} needs {shots} samples of class {c}, {size - taken} are left; lower "
                "partition.shots or partition.num_clients, or set partition.strict=false to use samples twice"
            )


def _around(mean: int, spread: int, kind: str, rng: np.random.Generator) -> int:
    if kind == "normal":
        return int(np.rint(rng.normal(mean, spread)))
    return int(rng.integers(mean - spread, mean + spread + 1))
