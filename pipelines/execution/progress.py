"""Reports of progress: bars on a terminal, lines in a log, or none. They may be called from any thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipelines.addresses import redact
from pipelines.reporting.formats import plural
from pipelines.runs.standard_error import console, in_commands, tell

if TYPE_CHECKING:
    from rich.console import Console

_LINE_EVERY_SECONDS = 10.0


class Watcher:
    """Receives steps, runs with their rounds, and warnings; this one prints warnings only."""

    def step(self, name: str) -> None:
        """Report the start of a step."""

    def runs(self, total: int, done: int) -> None:
        """Report the start of several runs; ``done`` of them have finished before."""

    def run(self, label: str, rounds: int, done: int) -> None:
        """Report the start of a run; some of its rounds may be complete."""

    def round(self, label: str, number: int, record: Mapping[str, Any] | None) -> None:
        """Report the end of a round; ``record`` if it was evaluated."""

    def run_ended(self, label: str) -> None:
        """Report the end or failure of a run."""

    def say(self, text: str) -> None:
        """Print a line or two that a person should read."""
        tell(f"protofl: {text}")

    def close(self) -> None:
        """End the reports."""


class Lines(Watcher):
    """Prints a line per step and per run, and some of the rounds: for logs and pipes."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write or tell
        self._lock = threading.Lock()
        self._rounds: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._total = self._done = 0

    def step(self, name: str) -> None:
        self._write(f"{name} ...")

    def runs(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        self._write(plural(total, "run") + (f", {done} of them finished before" if done else ""))

    def run(self, label: str, rounds: int, done: int) -> None:
        with self._lock:
            self._rounds[label], self._last[label] = rounds, time.monotonic()
        self._write(f"{label}: {plural(rounds, 'round')}" + (f", {done} done before" if done else ""))

    def round(self, label: str, number: int, record: Mapping[str, Any] | None) -> None:
        """Print a line every ten seconds, and for the last round."""
        with self._lock:
            total, now = self._rounds.get(label, 0), time.monotonic()
            due = number == total or (record is not None and now - self._last.get(label, now) >= _LINE_EVERY_SECONDS)
            if due:
                self._last[label] = now
        if due:
            self._write(f"{label}: round {number}/{total}  {brief(record)}")

    def run_ended(self, label: str) -> None:
        if self._total:
            with self._lock:
                self._done += 1
                done = self._done
            self._write(f"{done} of {self._total} runs have ended")

    def say(self, text: str) -> None:
        self._write(redact(f"protofl: {text}"))


class Bars(Watcher):
    """Progress bars with the latest accuracies: for terminals. Bars of ended runs are removed."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[scores]}", markup=False), console=console)
        self._tasks: dict[str, TaskID] = {}
        self._all: TaskID | None = None
        self._progress.start()

    def step(self, name: str) -> None:
        self._progress.console.print(f"{name} ...", style="dim", markup=False, highlight=False)

    def runs(self, total: int, done: int) -> None:
        self._all = self._progress.add_task("runs", total=total, completed=done, scores="")

    def run(self, label: str, rounds: int, done: int) -> None:
        self._tasks[label] = self._progress.add_task(_plain(label), total=rounds, completed=done, scores="")

    def round(self, label: str, number: int, record: Mapping[str, Any] | None) -> None:
        if label in self._tasks:
            self._progress.update(self._tasks[label], completed=number)
            if record is not None:
                self._progress.update(self._tasks[label], scores=brief(record))

    def run_ended(self, label: str) -> None:
        if self._all is not None:
            self._progress.advance(self._all)
            if label in self._tasks:
                self._progress.remove_task(self._tasks.pop(label))

    def say(self, text: str) -> None:
        self._progress.console.print(
            redact(f"protofl: {in_commands(text)}"), markup=False, highlight=False, soft_wrap=True
        )

    def close(self) -> None:
        self._progress.stop()


def _plain(text: str) -> str:
    """Escape text for a column that reads rich's markup."""
    return text.replace("[", r"\[")


def brief(record: Mapping[str, Any] | None) -> str:
    """Return the scores of a round in a few words."""
    if record is None:
        return ""
    names = {"top1_global": "global", "mean_local": "local"}
    scores = {name: record[key] for key, name in names.items()}
    tasks = record.get("tasks", {})
    scores |= {name: tasks.get(key) for key, name in (("a_loc", "A_loc"), ("a_sel", "A_sel"))}
    return "  ".join(f"{name} {100 * value:.2f} %" for name, value in scores.items() if value is not None)


def watcher_for_standard_error(*, quiet: bool = False) -> Watcher:
    """Return bars on a terminal, lines elsewhere."""
    if quiet:
        return Watcher()
    if not sys.stderr.isatty():
        return Lines()
    return Bars(console(stderr=True))
