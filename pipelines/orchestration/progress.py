"""Who is told what a flow is doing: a progress bar on a terminal, lines in a log, or nobody."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINE_EVERY_SECONDS = 10.0


class Watcher(Protocol):
    """Told of stages and rounds."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def rounds(self, label: str, total: int, done: int) -> None:
        """Rounds begin, of which some may be done already."""

    def round(self, number: int, record: Mapping[str, Any] | None) -> None:
        """A round has ended; ``record`` if it was evaluated."""

    def close(self) -> None:
        """Nothing more comes."""


class Silence:
    """Tells nobody."""

    def stage(self, name: str) -> None:
        """Ignore."""

    def rounds(self, label: str, total: int, done: int) -> None:
        """Ignore."""

    def round(self, number: int, record: Mapping[str, Any] | None) -> None:
        """Ignore."""

    def close(self) -> None:
        """Ignore."""


class Lines:
    """A line per stage, and for rounds a line now and then: for logs and pipes."""

    def __init__(self) -> None:
        """Write to standard error."""
        self._label, self._total, self._last = "", 0, 0.0

    def stage(self, name: str) -> None:
        """One line."""
        print(f"{name} ...", file=sys.stderr)

    def rounds(self, label: str, total: int, done: int) -> None:
        """One line."""
        self._label, self._total, self._last = label, total, time.monotonic()
        print(f"{label}: {total} rounds" + (f", {done} done before" if done else ""), file=sys.stderr)

    def round(self, number: int, record: Mapping[str, Any] | None) -> None:
        """A line every ten seconds, and for the last round."""
        now = time.monotonic()
        if number == self._total or (record is not None and now - self._last >= _LINE_EVERY_SECONDS):
            self._last = now
            print(f"{self._label}: round {number}/{self._total}  {brief(record)}", file=sys.stderr)

    def close(self) -> None:
        """Nothing to end."""


class Bars:
    """A progress bar with the latest accuracies: for terminals."""

    def __init__(self, console: Console) -> None:
        """Draw on a console, which is standard error's."""
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[scores]}"), console=console)
        self._task: TaskID | None = None
        self._progress.start()

    def stage(self, name: str) -> None:
        """One line above the bar."""
        self._progress.console.print(f"[dim]{name} ...[/dim]")

    def rounds(self, label: str, total: int, done: int) -> None:
        """A bar."""
        self._task = self._progress.add_task(label, total=total, completed=done, scores="")

    def round(self, number: int, record: Mapping[str, Any] | None) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=number)
            if record is not None:
                self._progress.update(self._task, scores=brief(record))

    def close(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()


def brief(record: Mapping[str, Any] | None) -> str:
    """The scores of a round in a few words."""
    if record is None:
        return ""
    names = {"top1_global": "global", "mean_local": "local"}
    scores = {name: record[key] for key, name in names.items()}
    tasks = record.get("tasks", {})
    scores |= {name: tasks.get(key) for key, name in (("a_loc", "A_loc"), ("a_sel", "A_sel"))}
    return "  ".join(f"{name} {100 * value:.2f} %" for name, value in scores.items() if value is not None)


def watcher_for_standard_error(*, quiet: bool = False) -> Watcher:
    """Bars on a terminal, lines elsewhere."""
    if quiet:
        return Silence()
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal else Lines()


CURRENT: ContextVar[Watcher] = ContextVar("watcher")
"""The watcher of the flows called from here; not a parameter of theirs, since those are stored as JSON."""


def current_watcher() -> Watcher:
    """The watcher in force; lines where nobody set one (deployments)."""
    return CURRENT.get(Lines())
