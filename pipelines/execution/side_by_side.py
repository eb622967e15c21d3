"""Runs side by side, each a piece of work that is tried again where the machine has stopped it.

Trying again is no task's own business: a task would begin its run while another one has the room that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flcore.core.errors import ProtoflError
from flcore.engine.pool.task import StoppedError
from pipelines.execution.admission import Admission, More
from pipelines.execution.one_run import PlacedRun, PrunedError, was_stopped_by_the_machine
from pipelines.execution.operation import Operation
from pipelines.execution.run_pool import RunPool, ThisProcess
from pipelines.runs.cache import Cache


def side_by_side(
    pool: RunPool | ThisProcess,
    at_once: int,
    operation: Operation,
    begun: Callable[[PlacedRun], None],
    ended: Callable[[PlacedRun, ProtoflError | None], None],
    *,
    name: Callable[[PlacedRun], str] | None = None,
    runs: Sequence[PlacedRun] = (),
    more: More | None = None,
    restart: bool | Callable[[PlacedRun], bool] = False,
) -> None:
    """Carry out runs side by side, in the order and as many as :class:`Admission` says, and wait for all of them.

    Args:
        pool: carries them out. at_once: so many at most.
        operation: shows them as pieces of work, and is told how far they are.
        begun: called before a run begins.
        ended: called when it has, well or with what went wrong; with a StoppedError where the pool was closed, by
            somebody who has an error of its own. From any thread, before anything else begins instead. A run that the
            machine stopped has not ended while the steps have another try for it.
        name: of a run as a piece of work; None: its method, seed and point.
        runs: those that are there. more: those that appear later.
        restart: throw away checkpoints that cannot be used; of all runs, or of which.
    """
    watcher, delays = operation.watcher, operation.steps.delays

    def attempt(run: PlacedRun) -> ProtoflError | None:
        try:
            for delay in delays:
                error = pool.carry_out(run, restart=restart(run) if callable(restart) else restart)
                if not was_stopped_by_the_machine(error):
                    return error
                watcher.say(f"{run.label}: {error}; tried again in {delay:g} s")
                pool.wait(delay)
            return pool.carry_out(run, restart=restart(run) if callable(restart) else restart)
        except StoppedError as stopped:
            return stopped

    def work(run: PlacedRun) -> ProtoflError | None:
        begun(run)
        error: ProtoflError | None = None
        try:
            error = attempt(run)
            ended(run, error)
        finally:
            admission.ended(run)
            if not isinstance(error, StoppedError):  # it has not ended: the same command goes on with it
                watcher.run_ended(run.label)
        return None if isinstance(error, PrunedError | StoppedError) else error  # both intended

    admission = Admission(runs, Cache.here(), pool, more)
    operation.steps.together((((name or _short)(run), partial(work, run)) for run in admission), at_once)


def _short(run: PlacedRun) -> str:
    """Its method and seed, and of a sweep its point."""
    point = run.label.partition(", ")[2]
    return f"{run.config.method.name}-s{run.config.seed}" + (f" {point}" if point else "")
