"""Where a run stands between two legs, and whose it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from flcore.engine.turns import Place
from flcore.errors import listed
from flcore.messages import Size
from flcore.records import Record

Traffic = Mapping[str, Size]
"""Cost of messages by kind."""


@dataclass(frozen=True)
class RunName:
    """What a checkpoint belongs to: a run and the code that carries it out, since other code would mix two runs.

    Attributes:
        run: names configuration, data and partition.
        code: SHA-256 of every source file that the run uses, by module.
    """

    run: str
    code: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Both in one short word."""
        return hashlib.sha256(json.dumps([self.run, dict(self.code)], sort_keys=True).encode()).hexdigest()[:16]

    def difference(self, other: RunName) -> str | None:
        """How the run called ``other`` differs from this one, for people; None where it does not."""
        if self.run != other.run:
            return "another run: its configuration, data or partition differ"
        modules = self.code.keys() | other.code.keys()
        changed = sorted(module for module in modules if self.code.get(module) != other.code.get(module))
        return f"this run as other code carried it out; since then changed: {listed(changed)}" if changed else None


@dataclass(frozen=True)
class RunState:
    """A run between two legs.

    Attributes:
        round: the last complete round; 0 before the first.
        server: what the server holds.
        memories: client id to the leg (counted over the run, from 1) that left its current memory.
        up: cumulative cost of all replies by kind. down: of all broadcasts.
        steps: mini-batches trained on, by all clients together.
        leg: complete legs of the round after ``round``.
        legs: complete legs of the run.
        evaluated: records in the history.
        failures: (round, client, cause) of every client left out because it failed.
        simulated_seconds: since the start, where clients' speeds are simulated.
        run: names the run and the code.
        facts: what server stages measured in the legs of the round under way.
        scored: scores of states that the round under way has passed through, by label.
    """

    round: int
    server: Record
    memories: Mapping[int, int] = field(default_factory=dict)
    up: Traffic = field(default_factory=dict)
    down: Traffic = field(default_factory=dict)
    steps: int = 0
    leg: int = 0
    legs: int = 0
    evaluated: int = 0
    failures: tuple[tuple[int, int, str], ...] = ()
    simulated_seconds: float = 0.0
    run: RunName = field(default_factory=lambda: RunName(""))
    facts: Mapping[str, float] = field(default_factory=dict)
    scored: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """The leg to do next."""
        return Place(self.round + 1, self.leg)
