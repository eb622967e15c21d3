"""Every client holds the same number of classes (data.md, section 2.3; FedPG's two-class division)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.partitioners.base import Assignment, Indices, Partitioner, collect, either


@dataclass(frozen=True)
class ClassesPerClient(Partitioner, name="classes_per_client"):
    """Every client holds the same number of classes (FedPG: two).

    ``parts``: each class is cut into K · classes / C equal parts, dealt at random and repaired by swaps; all samples
    are used and every class has exactly that many owners. ``nbench`` (NIID-Bench's "#label"): client i has class i mod
    C and random others, so that the number of owners varies between classes; a class without owner stays unused.
    """

    classes: int = param(2, "classes of each client", low=1)
    rule: Literal["parts", "nbench"] = param(
        "parts", "parts: every class at equally many clients; nbench: as in NIID-Bench"
    )

    def refusal(self, num_clients: int, num_classes: int | None) -> str | None:
        if num_classes is None:
            return None
        if self.classes > num_classes:
            return f"partition.classes = {self.classes}: the dataset has only {num_classes} classes"
        if self.rule == "nbench" or num_clients * self.classes % num_classes == 0:
            return None
        clients = _nearest(num_clients, num_classes // math.gcd(num_classes, self.classes))
        classes = [
            n for n in _nearest(self.classes, num_classes // math.gcd(num_classes, num_clients)) if n <= num_classes
        ]
        return (
            f"partition.num_clients = {num_clients}, partition.classes = {self.classes}: their product is not a "
            f"multiple of the {num_classes} classes; use {either('partition.num_clients', clients)}, "
            f"{either('partition.classes', classes)}, or partition.rule=nbench"
        )

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        by_class = self._by_class(labels, num_clients)
        deal = self._deal_parts if self.rule == "parts" else self._deal_nbench
        held = _held(deal(num_clients, len(by_class), rng), len(by_class))
        pieces: list[tuple[int, Indices]] = []
        for c, indices in enumerate(by_class):
            owners = np.flatnonzero(held[:, c])
            if len(indices) < len(owners):
                raise DataError(
                    f"class {c} has {len(indices)} training samples for {len(owners)} clients; "
                    "lower partition.num_clients or partition.classes, or raise data.limit_per_class"
                )
            if len(owners):
                pieces += zip(owners, np.array_split(rng.permutation(indices), len(owners)), strict=True)
        unused = np.flatnonzero(held.sum(0) == 0)
        notes = (f"classes without owner: {', '.join(map(str, unused))}",) if len(unused) else ()
        return Assignment(collect(num_clients, pieces), complete=not len(unused), notes=notes)

    def _deal_parts(self, num_clients: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        parts = num_clients * self.classes // num_classes
        deck = rng.permutation(np.repeat(np.arange(num_classes), parts))
        hands = deck.reshape(num_clients, self.classes)
        held = _held(hands, num_classes)
        for client in range(num_clients):
            while held[client].max() > 1:
                _swap_one(client, hands, held, rng)
        return hands

    def _deal_nbench(self, num_clients: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        hands = []
        for client in range(num_clients):
            sure = client % num_classes
            others = np.delete(np.arange(num_classes), sure)
            hands.append([sure, *rng.choice(others, size=self.classes - 1, replace=False)])
        return np.array(hands)


def _nearest(value: int, step: int) -> list[int]:
    """Return the multiples of ``step`` below and above ``value``; the smallest is ``step`` itself."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]


def _held(hands: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the number of parts of each class per client, int64 [K, C], from the classes of their parts, [K, m]."""
    return np.stack([np.bincount(hand, minlength=num_classes) for hand in hands])


def _swap_one(client: int, hands: np.ndarray, held: np.ndarray, rng: np.random.Generator) -> None:
    """Exchange one part of a class that ``client`` holds twice; the number of duplicates over all hands goes down.

    A hand without that class always exists, since a class has at most as many parts as clients. A part of it may be
    taken if its class is new to ``client``, or a duplicate in that hand; every such hand has either.
    """
    hand = hands[client]
    mine = int(np.argmax(held[client, hand] > 1))
    twice = hand[mine]
    is_welcome = (held[client, hands] == 0) | (np.take_along_axis(held, hands, axis=1) > 1)
    others, positions = np.nonzero(is_welcome & (held[:, twice] == 0)[:, None])
    chosen = int(rng.integers(len(others)))
    other, position = others[chosen], positions[chosen]
    new = hands[other, position]
    hands[client, mine], hands[other, position] = new, twice
    for owner, gained, lost in ((client, new, twice), (other, twice, new)):
        held[owner, gained] += 1
        held[owner, lost] -= 1
