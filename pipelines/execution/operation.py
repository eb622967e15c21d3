"""How a body is carried out: by what steps, and who is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from pipelines.execution.follower import Follower
from pipelines.execution.progress import Watcher
from pipelines.execution.steps import Steps


class PrintTarget(TypedDict):
    """What tables are printed for: a ``terminal`` or a log, and its ``width`` in columns."""

    width: int
    terminal: bool


@dataclass(frozen=True)
class Operation:
    """How a body is carried out.

    Attributes:
        steps: carries out its steps.
        watcher: is told how far it is.
        follower: draws and logs run folders, in a subprocess.
        wait: whether a body waits for it.
        copies: whether the results of a run that has finished in another folder are copied, instead of training again.
        console: what tables are printed for.
        command: as typed, for pages; None if another program calls.
    """

    steps: Steps
    watcher: Watcher
    follower: Follower
    wait: bool = True
    copies: bool = True
    console: PrintTarget = field(default_factory=lambda: PrintTarget(width=150, terminal=False))
    command: str | None = None
