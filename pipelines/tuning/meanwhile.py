"""Runs of a tuned comparison that need not wait for every study: they take the cores that no trial can use.

A study asks for its next trial when an earlier one has ended, so that near their ends studies have fewer trials under
way than there are cores, and the longest study would have the machine alone. Nothing depends on what is begun here:
the comparison carries out later whatever has not finished, and says of a run that fails why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from flcore.config.schema import Config
from flcore.core.errors import ProtoflError
from pipelines.config.grid import PlannedRun
from pipelines.execution.one_run import PlacedRun, fetch, placed
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs

Planned = tuple[PlannedRun, Inputs]


class Meanwhile:
    """Runs in the order in which they may begin, each once."""

    def __init__(
        self,
        home: Path,
        runs: Sequence[Planned] = (),
        then: Callable[[str], Sequence[Planned]] = lambda name: (),
        *,
        copies: bool = True,
    ) -> None:
        """Have runs wait.

        Args:
            home: folder of all of them.
            runs: those that depend on no study, with their data.
            then: those that depend on a study, by its name; they go first.
            copies: as for :class:`~pipelines.execution.operation.Operation`.
        """
        self._copies = copies
        self._home, self._waiting, self._then = home, list(runs), then
        self._ended: set[str] = set()
        self._seen: set[Path] = set()

    @property
    def waiting(self) -> list[Config]:
        """Those that have not begun, without what depends on studies under way."""
        return [run.config for run, _ in self._waiting]

    def study_ended(self, name: str) -> None:
        """No trial of a study is left; told as often as somebody asks."""
        if name not in self._ended:
            self._ended.add(name)
            with suppress(ProtoflError):  # what cannot be run is refused by the comparison
                self._waiting = [*self._then(name), *self._waiting]

    def more(self, room: int) -> list[PlacedRun]:
        """At most so many runs that have not finished; a folder that two rows share is one run."""
        found: list[PlacedRun] = []
        while self._waiting and len(found) < room:
            planned, inputs = self._waiting.pop(0)
            with suppress(ProtoflError):  # likewise
                run = placed(planned.config, inputs, self._home, label=planned.label)
                if run.directory not in self._seen and not fetch(run, Cache.here(), copies=self._copies):
                    found.append(run)
                self._seen.add(run.directory)
        return found
