"""Which of many runs begins next: the longest one for which there are cores and memory.

Cores: a run takes one, or as many as it has workers. Workers inside a run wait for one another at every round, so whole
runs come first; where fewer wait than cores are free, each that is worth it (:data:`WORTH_WORKERS` seconds or more,
known from an earlier run) is given its share of the free cores as workers, which changes none of its bytes.

Memory: what a run will take is known from an earlier run of the same kind, or estimated
(:mod:`pipelines.runs.memory`). It begins when that fits into what is free now, less what the runs under way have not
taken yet of theirs. So as many run as fit, small ones beside large ones. If none is under way, one begins in any case.

Some runs appear only when others have ended, as the trials of a study do: they are asked for whenever fewer wait than
cores are free, and no sooner, so that another process can take those that this one has no room for.

Time: what took longest before comes first, so that no long run is left over at the end. Of what was never run, one of
each kind comes before all others: as soon as it has ended, it is known how long its kind takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from flcore.config.schema import Config
from flcore.core.host import physical_cores
from pipelines.execution.one_run import PlacedRun
from pipelines.runs import memory
from pipelines.runs.cache import Cache, Cost, kind_of

WORTH_WORKERS = 20.0
"""Seconds of training; workers take some to start, and of a shorter run that is much."""
_SEEDS_DIFFER = 1.1  # another seed has other data on the largest client
_LOOK_AGAIN_SECONDS = 1.0  # others on this machine take and give back memory too

More = Callable[[int], Sequence[PlacedRun] | None]
"""Asked for at most so many runs that have appeared; None: no more will."""


class Held(Protocol):
    """Who knows what the processes hold that carry out runs (:class:`~pipelines.execution.run_pool.RunPool`)."""

    def held_by(self, label: str) -> int:
        """Bytes that the processes of a run hold."""

    def held_idle(self) -> int:
        """Bytes that the process holds which takes the next run."""


def most_at_once(runs: Sequence[Config]) -> int:
    """How many processes runs may need at the same time: one per core, on GPUs one per GPU, and no more than runs."""
    if any(config.engine.device == "cuda" for config in runs):
        return min(max(torch.cuda.device_count(), 1), len(runs))
    return min(physical_cores(), len(runs))


class Admission:
    """Runs in the order in which they begin: iterating waits until the next one may. It is told which have ended."""

    def __init__(self, runs: Sequence[PlacedRun], cache: Cache, held: Held, more: More | None = None) -> None:
        """Let each of them begin once.

        Args:
            runs: whose data are there.
            cache: knows what earlier ones took.
            held: knows what those under way hold.
            more: those that appear later; None: these are all.
        """
        self._cache, self._held = cache, held
        self._more = more
        self._cores = physical_cores()
        self._waiting: list[PlacedRun] = []
        self._kinds: dict[str, str] = {}
        self._costs: dict[str, Cost] = {}
        self._await(runs)
        self._begun: set[str] = set()  # kinds
        self._process = memory.peak()  # this one has imported at least what training needs
        self._estimates: dict[str, int] = {}
        self._under_way: dict[str, PlacedRun] = {}
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[PlacedRun]:
        """The next run, as soon as it may begin; its configuration may have been given workers."""
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
        """A run has ended, well or not: what it had is free, and what it took is known."""
        with self._changed:
            self._under_way.pop(run.label, None)
            kind = self._kinds[run.label]
            self._costs[kind] = self._cache.cost(kind)
            self._changed.notify()

    def _await(self, runs: Sequence[PlacedRun]) -> None:
        """Have runs wait for their turn."""
        kinds = {run.label: kind_of(run.config) for run in runs}
        self._costs |= {kind: self._cache.cost(kind) for kind in kinds.values()}
        self._kinds |= kinds
        self._waiting += runs

    def _ask_for_more(self, room: int) -> None:
        if self._more is not None and room > 0:
            appeared = self._more(room)
            if appeared is None:
                self._more = None
            else:
                self._await(appeared)

    def _choose(self) -> PlacedRun | None:
        """The run that begins now; None if none may yet, or none waits."""
        free = self._cores - sum(map(_cores, self._under_way.values()))
        self._ask_for_more(free - len(self._waiting))
        if not self._waiting:
            return None
        room = memory.free_memory() + self._held.held_idle() - sum(map(self._to_come, self._under_way.values()))
        share = free // len(self._waiting)
        for run in sorted(self._waiting, key=self._turn):
            for asked in (self._with_workers(run, share), run):
                if _cores(asked) <= free and self._needs(asked) <= room:
                    return asked
        return None if self._under_way else min(self._waiting, key=self._needs)

    def _turn(self, run: PlacedRun) -> tuple[int, float]:
        """Kinds that nobody has begun, then those whose first run has not ended, then by time."""
        kind = self._kinds[run.label]
        seconds = self._costs[kind].seconds
        if seconds is None:
            return (int(kind in self._begun), 0.0)
        return (2, -seconds)

    def _with_workers(self, run: PlacedRun, share: int) -> PlacedRun:
        """The run with a share of the cores as workers, where it has none and is worth it."""
        engine, seconds = run.config.engine, self._costs[self._kinds[run.label]].seconds
        share = min(share, run.config.partition.num_clients)
        is_plain = engine.name == "local" and engine.workers == 0 and engine.device == "cpu"
        if share < 2 or not is_plain or seconds is None or seconds < WORTH_WORKERS:
            return run
        return replace(run, config=replace(run.config, engine=replace(engine, workers=share)))

    def _to_come(self, run: PlacedRun) -> float:
        """Bytes that a run under way has not taken yet."""
        return max(self._needs(run) - self._held.held_by(run.label), 0.0)

    def _needs(self, run: PlacedRun) -> float:
        """Bytes of a run, and of its workers, each of which may take as much as a whole run."""
        kind = self._kinds[run.label]
        peak = self._costs[kind].peak
        if peak is None and kind not in self._estimates:
            self._estimates[kind] = memory.estimate(run.config, run.inputs, self._process)
        each = self._estimates[kind] if peak is None else _SEEDS_DIFFER * peak
        return each * (1 + run.config.engine.worker_count)


def _cores(run: PlacedRun) -> int:
    return max(run.config.engine.worker_count, 1)
