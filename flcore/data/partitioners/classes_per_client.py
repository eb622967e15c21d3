"""Every client holds the same number of classes (data.md, section 2.3; FedPG's two-class division)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from flcore.data.partitioners.base import Assignment, Indices, Partitioner, check_request, indices_by_class, joined
from flcore.errors import DataError
from flcore.params import param


@dataclass(frozen=True)
class ClassesPerClient(Partitioner):
    """Each class is cut into equal parts and each client is dealt parts of ``classes`` distinct classes.

    ``parts``: K · classes / C parts per class, dealt at random and repaired by swaps; all samples are used and every
    class has exactly that many owners. ``nbench`` (NIID-Bench's "#label"): client i has class i mod C and random
    others, so that the number of owners varies from class to class; a class without owner stays unused.
    """

    name: ClassVar[str] = "classes_per_client"
    summary: ClassVar[str] = "every client holds exactly so many classes (FedPG: two)"

    classes: int = param(2, "classes of each client", low=1)
    rule: Literal["parts", "nbench"] = param(
        "parts", "parts: every class at equally many clients; nbench: as in NIID-Bench"
    )

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        """Divide the samples; see :meth:`Partitioner.split`."""
        check_request(labels, num_clients)
        by_class = indices_by_class(labels)
        if self.classes > len(by_class):
            raise DataError(f"partition.classes = {self.classes}: the dataset has only {len(by_class)} classes")
        deal = self._deal_parts if self.rule == "parts" else self._deal_nbench
        hands = deal(num_clients, len(by_class), rng)
        return _hand_out(by_class, hands, rng)

    def _deal_parts(self, num_clients: int, num_classes: int, rng: np.random.Generator) -> list[list[int]]:
        parts, rest = divmod(num_clients * self.classes, num_classes)
        if rest:
            raise DataError(
                f"partition.classes = {self.classes}: {num_clients} clients x {self.classes} is not a multiple of "
                f"{num_classes} classes; use a multiple of {num_classes // np.gcd(num_classes, self.classes)} clients"
            )
        deck = rng.permutation(np.repeat(np.arange(num_classes), parts))
        hands = [[int(c) for c in hand] for hand in deck.reshape(num_clients, self.classes)]
        for hand in hands:
            while len(set(hand)) < len(hand):
                _swap_one(hand, hands, rng)
        return hands

    def _deal_nbench(self, num_clients: int, num_classes: int, rng: np.random.Generator) -> list[list[int]]:
        hands = []
        for client in range(num_clients):
            sure = client % num_classes
            others = np.delete(np.arange(num_classes), sure)
            hands.append([sure, *map(int, rng.choice(others, size=self.classes - 1, replace=False))])
        return hands


def _swap_one(hand: list[int], hands: list[list[int]], rng: np.random.Generator) -> None:
    """Exchange one part of a class that ``hand`` holds twice; the number of duplicates over all hands goes down.

    A hand without that class always exists, since a class has at most as many parts as there are clients. A part of it
    may be taken if its class is new to ``hand``, or a duplicate where it comes from; every such hand has either.
    """
    twice = next(c for c in hand if hand.count(c) > 1)
    candidates = [
        (other, position)
        for other in hands
        if twice not in other
        for position, c in enumerate(other)
        if c not in hand or other.count(c) > 1
    ]
    other, position = candidates[int(rng.integers(len(candidates)))]
    mine = hand.index(twice)
    hand[mine], other[position] = other[position], hand[mine]


def _hand_out(by_class: list[Indices], hands: list[list[int]], rng: np.random.Generator) -> Assignment:
    owned: list[list[Indices]] = [[] for _ in hands]
    unused = []
    for c, indices in enumerate(by_class):
        owners = [client for client, hand in enumerate(hands) if c in hand]
        if not owners:
            unused.append(c)
            continue
        if len(indices) < len(owners):
            raise DataError(
                f"class {c} has {len(indices)} training samples for {len(owners)} clients; "
                "lower partition.num_clients or partition.classes, or raise data.limit_per_class"
            )
        for client, piece in zip(owners, np.array_split(rng.permutation(indices), len(owners)), strict=True):
            owned[client].append(piece)
    notes = (f"classes without owner: {', '.join(map(str, unused))}",) if unused else ()
    return Assignment([joined(parts) for parts in owned], complete=not unused, notes=notes)
