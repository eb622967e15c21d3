"""Execution settings of an experiment: its steps, its observer and its follower."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from pipelines.execution.follower import Follower
from pipelines.execution.progress import Watcher
from pipelines.execution.steps import Steps


class PrintTarget(TypedDict):
    """Target of printed tables: a ``terminal`` or a log, and its ``width`` in columns."""

    width: int
    terminal: bool


@dataclass(frozen=True)
class Operation:
    """Execution settings of an experiment.

    Attributes:
        wait: for the follower. restart: discard unusable checkpoints and damaged results.
        command: as typed, for pages; None if another program calls.
    """

    steps: Steps
    watcher: Watcher
    follower: Follower
    wait: bool = True
    restart: bool = False
    console: PrintTarget = field(default_factory=lambda: PrintTarget(width=150, terminal=False))
    command: str | None = None
