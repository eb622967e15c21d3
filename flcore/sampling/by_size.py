"""Clients with more data more often.

The first client is drawn with probability n_k / N, the next one likewise from the rest, and so on (successive
sampling). It is done with one exponential number per client: the smallest values of E_k / n_k are taken (Efraimidis and
Spirakis, Information Processing Letters 2006).

The fold still weighs by n_k, so that a large client counts twice: it is drawn more often, and it weighs more. The
global model is then biased towards large clients. An unbiased estimate would weigh the drawn clients alike and draw
them with replacement (Li et al., "On the Convergence of FedAvg on Non-IID Data", ICLR 2020, scheme I).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flcore.core.rng import numpy_stream
from flcore.sampling.base import Sampler


@dataclass(frozen=True)
class BySize(Sampler):
    """Probability proportional to n_k, without replacement; clients without samples come last."""

    name: ClassVar[str] = "by_size"
    summary: ClassVar[str] = "with probability proportional to a client's samples, without replacement"

    def sample(self, count: int, sizes: Mapping[int, int], round_number: int, seed: int) -> Sequence[int]:
        """Draw ``count`` clients."""
        clients, samples = np.array(list(sizes)), np.array(list(sizes.values()), dtype=np.float64)
        waits = numpy_stream(seed, "cohort", round_number).exponential(size=len(clients))
        order = np.where(samples > 0, waits / np.maximum(samples, 1), np.inf)
        return clients[np.argsort(order, kind="stable")[:count]].tolist()
