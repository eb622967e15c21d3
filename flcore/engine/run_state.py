"""The state of a run between two exchanges, and the run's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flcore.core.errors import listed
from flcore.engine.turns import ExchangeId, Reply
from flcore.experiment.traffic import Traffic
from flcore.io.records import Record


@dataclass(frozen=True)
class RunName:
    """A run and its code; a checkpoint of other code is refused.

    Attributes:
        run: names configuration, data and partition.
        code: SHA-256 of every source file that the run uses, by module.
    """

    run: str
    code: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A short hash of both."""
        return hashlib.sha256(json.dumps([self.run, dict(self.code)], sort_keys=True).encode()).hexdigest()[:16]

    def difference(self, other: RunName) -> str | None:
        """Return how the run ``other`` differs from this one, for people; None: it does not."""
        if self.run != other.run:
            return "another run: its configuration, data or partition differ"
        modules = self.code.keys() | other.code.keys()
        changed = sorted(module for module in modules if self.code.get(module) != other.code.get(module))
        return f"this run as other code carried it out; since then changed: {listed(changed)}" if changed else None


def leg_facts(
    exchange: str, replies: Mapping[int, Reply], stages: Mapping[str, Mapping[str, float]], *, is_cohort: bool
) -> dict[str, Any]:
    """Return what one exchange adds to its round's record, as JSON values; see :func:`round_facts`.

    Args:
        leg: its name. replies: by client. stages: facts of the server's steps by name, in order.
        is_cohort: whether the leg's clients are the round's training cohort.
    """
    names = sorted({name for reply in replies.values() for name in reply.losses})
    losses = {name: [reply.losses[name] for reply in replies.values() if name in reply.losses] for name in names}
    return {
        "leg": exchange,
        "participants": list(replies) if is_cohort else None,
        "train_loss": {name: float(np.mean(values)) for name, values in losses.items()},
        # One client that blows up inside a round is invisible in means.
        "train_loss_max": {name: max(values) for name, values in losses.items()},
        "server": _joined(reversed(list(stages.items()))),
    }


def round_facts(exchanges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part of a round's record that its exchanges tell, no exchange hiding another.

    ``participants`` are the clients of the round's training cohort that answered; ``train_loss`` and
    ``train_loss_max`` the mean and the largest value over clients of each loss term; ``server`` the facts of the
    server's steps. If two exchanges use a name, the first loss and the last fact have it, as the round ends with the
    latter; the others get their exchange's name in front.

    Args:
        legs: what :func:`leg_facts` returned for each, in order.
    """
    cohorts = [exchange["participants"] for exchange in exchanges if exchange["participants"] is not None]
    facts = {
        "participants": cohorts[-1],
        **{
            key: _joined((exchange["leg"], exchange[key]) for exchange in exchanges)
            for key in ("train_loss", "train_loss_max")
        },
    }
    server = _joined((exchange["leg"], exchange["server"]) for exchange in reversed(exchanges))
    return {**facts, "server": server} if server else facts


def _joined(parts: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Merge values by name; a repeated name is prefixed with its part."""
    found: dict[str, float] = {}
    for origin, figures in parts:
        found |= {f"{origin}.{name}" if name in found else name: value for name, value in figures.items()}
    return found


@dataclass(frozen=True)
class RunState:
    """A run between two exchanges.

    Attributes:
        round: the last complete round; 0 before the first.
        server: what the server holds.
        client_states: client id to the exchange (counted over the run, from 1) that left its current memory.
        up: cumulative cost of all replies by kind. down: of all broadcasts.
        eval_up: cumulative cost by kind of what clients sent for scoring alone. eval_down: of what they were sent.
        steps: mini-batches trained on, by all clients together.
        leg: complete exchanges of the round after ``round``.
        legs: complete exchanges of the run.
        evaluated: records in the history.
        failures: (round, client, cause) of every client dropped since the last record, which took over those before it.
        simulated_seconds: since the start, where clients' speeds are simulated.
        run: names the run and the code.
        told: parts of the current round's record by complete exchange, see :func:`leg_facts`.
    """

    round: int
    server: Record
    client_states: Mapping[int, int] = field(default_factory=dict)
    up: Traffic = field(default_factory=dict)
    down: Traffic = field(default_factory=dict)
    eval_up: Traffic = field(default_factory=dict)
    eval_down: Traffic = field(default_factory=dict)
    steps: int = 0
    exchange: int = 0
    exchanges: int = 0
    evaluated: int = 0
    failures: tuple[tuple[int, int, str], ...] = ()
    simulated_seconds: float = 0.0
    run: RunName = field(default_factory=lambda: RunName(""))
    told: Sequence[Mapping[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> ExchangeId:
        """The exchange to do next."""
        return ExchangeId(self.round + 1, self.exchange)
