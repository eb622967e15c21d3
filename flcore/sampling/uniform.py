"""Every client alike, without replacement: the default, and what FedAvg's analysis assumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flcore.core.rng import numpy_stream
from flcore.sampling.base import Sampler


@dataclass(frozen=True)
class Uniform(Sampler):
    """All sets of ``count`` clients are equally likely."""

    name: ClassVar[str] = "uniform"
    summary: ClassVar[str] = "every client alike, without replacement"

    def sample(self, count: int, sizes: Mapping[int, int], round_number: int, seed: int) -> Sequence[int]:
        """Draw ``count`` clients."""
        return numpy_stream(seed, "cohort", round_number).choice(list(sizes), count, replace=False).tolist()
