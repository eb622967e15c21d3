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
from flcore.engine.exchange import Reply
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
        """Describe how the run ``other`` differs from this one; None: it does not."""
        if self.run != other.run:
            return "another run: its configuration, data or partition differ"
        modules = self.code.keys() | other.code.keys()
        changed = sorted(module for module in modules if self.code.get(module) != other.code.get(module))
        return f"this run by other code; changed since then: {listed(changed)}" if changed else None


def exchange_metrics(
    exchange: str, replies: Mapping[int, Reply], steps: Mapping[str, Mapping[str, float]], *, is_cohort: bool
) -> dict[str, Any]:
    """Return one exchange's part of its round's record, as JSON values; see :func:`round_metrics`.

    Args:
        exchange: its name. replies: by client. steps: metrics of the server steps by name, in order.
        is_cohort: whether the clients are the round's training cohort.
    """
    names = sorted({name for reply in replies.values() for name in reply.losses})
    losses = {name: [reply.losses[name] for reply in replies.values() if name in reply.losses] for name in names}
    return {
        "leg": exchange,
        "participants": list(replies) if is_cohort else None,
        "train_loss": {name: float(np.mean(values)) for name, values in losses.items()},
        # One client that blows up inside a round is invisible in means.
        "train_loss_max": {name: max(values) for name, values in losses.items()},
        "server": _joined(reversed(list(steps.items()))),
    }


def round_metrics(exchanges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a round's ``participants``, ``train_loss``, ``train_loss_max`` and ``server``, over its exchanges.

    ``participants`` are the clients of the training cohort that replied. Losses are the mean and the largest value over
    clients. If two exchanges use a name, the first loss and the last server metric keep it; the others are prefixed
    with their exchange.

    Args:
        exchanges: :func:`exchange_metrics` of each, in order.
    """
    cohorts = [exchange["participants"] for exchange in exchanges if exchange["participants"] is not None]
    losses = {
        key: _joined((exchange["leg"], exchange[key]) for exchange in exchanges)
        for key in ("train_loss", "train_loss_max")
    }
    server = _joined((exchange["leg"], exchange["server"]) for exchange in reversed(exchanges))
    return {"participants": cohorts[-1], **losses, **({"server": server} if server else {})}


def _joined(parts: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Merge values by name; a repeated name is prefixed with its part."""
    joined: dict[str, float] = {}
    for origin, values in parts:
        joined |= {f"{origin}.{name}" if name in joined else name: value for name, value in values.items()}
    return joined


@dataclass(frozen=True)
class RunState:
    """A run between two exchanges.

    Attributes:
        round: the last complete round; 0 before the first.
        server: the server's state.
        client_states: by client the exchange (of the run, from 1) that left its state.
        up: cumulative cost of all replies by kind. down: of all broadcasts.
        eval_up: cumulative cost by kind of replies for scoring alone. eval_down: of broadcasts for it.
        steps: mini-batches trained on, by all clients together.
        exchange: complete exchanges of the round after ``round``.
        exchanges: complete exchanges of the run.
        evaluated: records in the history.
        failures: (round, client, cause) of every client dropped since the last record.
        simulated_seconds: since the start, where clients' speeds are simulated.
        run: names the run and the code.
        metrics: of the current round's complete exchanges, see :func:`exchange_metrics`.
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
    metrics: Sequence[Mapping[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int]:
        """The next exchange: its round (1-based) and its index in the round (0-based)."""
        return self.round + 1, self.exchange
