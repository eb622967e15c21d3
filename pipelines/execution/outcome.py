"""The result of an experiment or a comparison, and the error if runs failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flcore.core.errors import RunError


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment or a comparison.

    Attributes:
        report: the page; None without waiting for it.
        store: of the logged runs: what to type, or an address; None if they are not logged.
        was_finished: nothing had to be trained.
        table: for a terminal. markdown: the same for a page. failed: runs that failed, with the reason.
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
        """Return label and reason of the first failed run."""
        return ": ".join(next(iter((self.failed or {}).items())))


class FailedRunsError(RunError):
    """Some of many runs failed: each was reported, and marked in the store; the results of the others are written."""
