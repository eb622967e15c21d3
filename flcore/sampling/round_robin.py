"""All clients in turn: no client takes part a second time before every other one has taken part once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flcore.core.rng import numpy_stream
from flcore.sampling.base import Sampler


@dataclass(frozen=True)
class RoundRobin(Sampler):
    """Round t takes places (t - 1)·m to t·m - 1, modulo K, of an order of the clients that the seed draws once.

    Neighbours in the numbering, which a partition may have made alike, are then no neighbours in the order.
    """

    name: ClassVar[str] = "round_robin"
    summary: ClassVar[str] = "all clients in turn, in an order drawn once"

    def sample(self, count: int, sizes: Mapping[int, int], round_number: int, seed: int) -> Sequence[int]:
        """Take the next ``count`` clients of the order."""
        order = numpy_stream(seed, "cohort order").permutation(list(sizes))
        return [int(order[place % len(order)]) for place in range((round_number - 1) * count, round_number * count)]
