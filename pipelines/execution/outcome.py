"""What a body leaves, and how it ends where runs failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flcore.core.errors import RunError


@dataclass(frozen=True)
class Outcome:
    """What a body leaves.

    Attributes:
        directory: where its results lie.
        report: the page; None where nobody waited for it.
        store: where the runs are logged: what to type, or an address; None where they are not.
        was_finished: nothing had to be trained.
        table: of a comparison, for a terminal. markdown: the same for a page.
        failed: of a comparison, runs that failed, with the reason.
    """

    directory: Path
    report: Path | None = None
    store: str | None = None
    was_finished: bool = False
    table: str = ""
    markdown: str = ""
    failed: Mapping[str, str] | None = None

    @property
    def first_failure(self) -> str:
        """Which run failed first, and why."""
        return ": ".join(next(iter((self.failed or {}).items())))


class FailedRunsError(RunError):
    """Some of many runs failed: each has been told, and marked in the store; what the others gave is written."""
