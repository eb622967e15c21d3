"""The scheduler of many runs: starts the longest one for which there are cores and memory.

Cores: a run takes one, or one per worker.

Memory: a run's need is known from an earlier run of the same kind, or estimated (:mod:`pipelines.runs.memory`). It
starts when this fits into the free memory, less the memory that active runs will still allocate. If no run is active,
one starts in any case.

Time: of unknown kinds, one run each starts before all others, since its time tells that of its kind; then the longest.
Runs that appear only after others have ended, such as a study's trials, are requested when cores are free, so that
another process can take those that do not fit here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from flcore.config.schema import Config
from flcore.core.host import physical_cores
from pipelines.execution.one_run import PlacedRun
from pipelines.execution.run_pool import RunPool
from pipelines.runs import memory
from pipelines.runs.cache import Cache, Cost, kind_of

_SEEDS_DIFFER = 1.1  # another seed has another largest client
_LOOK_AGAIN_SECONDS = 1.0  # other processes use memory too

More = Callable[[int], Sequence[PlacedRun] | None]
"""Returns at most the given number of new runs; None: there will be no more."""


def most_at_once(runs: Sequence[Config]) -> int:
    """Return the number of processes that runs may need: one per core, or per GPU, and at most one per run."""
    if any(config.engine.device == "cuda" for config in runs):
        return min(max(torch.cuda.device_count(), 1), len(runs))
    return min(physical_cores(), len(runs))


class Admission:
    """An iterator of runs in the order of their start; it waits until the next one may start."""

    def __init__(self, runs: Sequence[PlacedRun], cache: Cache, pool: RunPool, more: More | None = None) -> None:
        """Schedule runs, whose data exist, each once; ``more`` returns later ones."""
        self._cache, self._pool = cache, pool
        self._more = more
        self._cores = physical_cores()
        self._waiting: list[PlacedRun] = []
        self._kinds: dict[str, str] = {}
        self._costs: dict[str, Cost] = {}
        self._await(runs)
        self._begun: set[str] = set()  # kinds
        self._process = memory.peak()  # this process has imported at least everything that training needs
        self._estimates: dict[str, int] = {}
        self._under_way: dict[str, PlacedRun] = {}
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[PlacedRun]:
        """Yield each run when it may start."""
        while True:
            with self._changed:
                while (chosen := self._choose()) is None:
                    if not self._waiting and self._more is None:
                        return
                    self._changed.wait(_LOOK_AGAIN_SECONDS)
                self._waiting = [run for run in self._waiting if run.label != chosen.label]
                self._under_way[chosen.label] = chosen
                self._begun.add(self._kinds[chosen.label])
            yield chosen

    def ended(self, run: PlacedRun) -> None:
        """Free the cores and memory of a run that has ended or failed, and read its cost."""
        with self._changed:
            self._under_way.pop(run.label, None)
            kind = self._kinds[run.label]
            self._costs[kind] = self._cache.cost(kind)
            self._changed.notify()

    def _await(self, runs: Sequence[PlacedRun]) -> None:
        kinds = {run.label: kind_of(run.config) for run in runs}
        self._costs |= {kind: self._cache.cost(kind) for kind in kinds.values()}
        self._kinds |= kinds
        self._waiting += runs

    def _choose(self) -> PlacedRun | None:
        """Return the run to start now; None if none may start yet, or none waits."""
        free = self._cores - sum(map(_cores, self._under_way.values()))
        if self._more is not None and free > len(self._waiting):
            appeared = self._more(free - len(self._waiting))
            self._more = None if appeared is None else self._more
            self._await(appeared or ())
        if not self._waiting:
            return None
        room = memory.free_memory() + self._pool.held_idle() - sum(map(self._to_come, self._under_way.values()))
        for run in sorted(self._waiting, key=self._turn):
            if _cores(run) <= free and self._needs(run) <= room:
                return run
        return None if self._under_way else min(self._waiting, key=self._needs)

    def _turn(self, run: PlacedRun) -> tuple[int, float]:
        """Return a sort key: first kinds that have not started, then kinds without an ended run, then by time."""
        kind = self._kinds[run.label]
        seconds = self._costs[kind].seconds
        if seconds is None:
            return (int(kind in self._begun), 0.0)
        return (2, -seconds)

    def _to_come(self, run: PlacedRun) -> float:
        """Return the bytes that an active run will still allocate."""
        return max(self._needs(run) - self._pool.held_by(run.label), 0.0)

    def _needs(self, run: PlacedRun) -> float:
        """Return the bytes of a run and its workers; each worker may need as much as a whole run."""
        kind = self._kinds[run.label]
        peak = self._costs[kind].peak
        if peak is None and kind not in self._estimates:
            self._estimates[kind] = memory.estimate(run.config, run.inputs, self._process)
        each = self._estimates[kind] if peak is None else _SEEDS_DIFFER * peak
        return each * (1 + run.config.engine.worker_count)


def _cores(run: PlacedRun) -> int:
    return max(run.config.engine.worker_count, 1)
