"""Client samplers choose the clients of a round, as pure functions of seed, round and clients' sizes."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flcore.core.registry import Named


@dataclass(frozen=True)
class Sampler(Named, abc.ABC):
    """A rule that chooses the clients of a round. Its options are fields made with ``flcore.core.params.param``.

    Simulated drop-out, oversampling and deadlines come after it and are the same for every sampler.
    """

    @abc.abstractmethod
    def sample(self, count: int, sizes: Mapping[int, int], round_number: int, seed: int) -> Sequence[int]:
        """Return the clients that a round invites, in any order.

        The answer depends on the arguments alone: a round is sampled more than once, and without the rounds before it.

        Args:
            count: clients wanted, from 1 to all; fewer may be returned, not more.
            sizes: client id to n_k, its training samples; ids ascending.
            round_number: from 1.
            seed: of the run, for :func:`flcore.core.rng.numpy_stream`.
        """

    def loaded(self) -> Self:
        """Return the sampler with the content of files that it names in their place, so that a run is complete.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        return self

    def identity(self) -> dict[str, Any]:
        """Return the options as they name a run."""
        return dataclasses.asdict(self)

    def refusal(self, num_clients: int) -> str | None:
        """Return why clients 0 to ``num_clients`` - 1 cannot be sampled, with a cure; None: they can."""
        return None
