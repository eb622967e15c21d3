"""Samplers that need nothing but sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flcore.core.rng import numpy_stream
from flcore.sampling.base import Sampler


@dataclass(frozen=True)
class Uniform(Sampler, name="uniform"):
    """Every client alike, without replacement.

    All sets of ``count`` clients are equally likely: the default, and the assumption of FedAvg's analysis.
    """

    def sample(self, count: int, sizes: Mapping[int, int], round_number: int, seed: int) -> Sequence[int]:
        """Draw ``count`` clients."""
        return numpy_stream(seed, "cohort", round_number).choice(list(sizes), count, replace=False).tolist()


@dataclass(frozen=True)
class BySize(Sampler, name="by_size"):
    """With probability proportional to a client's samples, without replacement.

    Clients without samples come last.

    The first client is drawn with probability n_k / N, the next one likewise from the rest, and so on (successive
    sampling): the smallest values of E_k / n_k are taken, with exponential E_k (Efraimidis and Spirakis, Information
    Processing Letters 2006).

    The fold still weighs by n_k, so a large client counts twice: it is drawn more often, and it weighs more. This
    biases the global model towards large clients. An unbiased estimate would weigh the drawn clients alike and draw
    them with replacement (Li et al., "On the Convergence of FedAvg on Non-IID Data", ICLR 2020, scheme I).
    """

    def sample(self, count: int, sizes: Mapping[int, int], round_number: int, seed: int) -> Sequence[int]:
        """Draw ``count`` clients."""
        clients, samples = np.array(list(sizes)), np.array(list(sizes.values()), dtype=np.float64)
        waits = numpy_stream(seed, "cohort", round_number).exponential(size=len(clients))
        order = np.where(samples > 0, waits / np.maximum(samples, 1), np.inf)
        return clients[np.argsort(order, kind="stable")[:count]].tolist()


@dataclass(frozen=True)
class RoundRobin(Sampler, name="round_robin"):
    """All clients in turn, in an order drawn once.

    Round t takes places (t - 1)·m to t·m - 1, modulo K, of an order of the clients that the seed draws.

    A random order separates clients with neighbouring ids, which a partition may have made similar.
    """

    def sample(self, count: int, sizes: Mapping[int, int], round_number: int, seed: int) -> Sequence[int]:
        """Take the next ``count`` clients of the order."""
        order = numpy_stream(seed, "cohort order").permutation(list(sizes))
        return [int(order[place % len(order)]) for place in range((round_number - 1) * count, round_number * count)]
