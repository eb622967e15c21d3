"""Parallel runs, each a task that is retried after a system error.

The task itself does not retry: it would start its run while another run uses its share of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flcore.core.errors import ProtoflError
from flcore.engine.pool.task import StoppedError
from pipelines.execution.admission import Admission, More
from pipelines.execution.one_run import PlacedRun, PrunedError, was_stopped_by_the_machine
from pipelines.execution.operation import Operation
from pipelines.execution.run_pool import RunPool
from pipelines.execution.steps import Work
from pipelines.runs.cache import Cache


def side_by_side(
    pool: RunPool,
    at_once: int,
    operation: Operation,
    begun: Callable[[PlacedRun], None],
    ended: Callable[[PlacedRun, ProtoflError | None], None],
    *,
    name: Callable[[PlacedRun], str] | None = None,
    runs: Sequence[PlacedRun] = (),
    more: More | None = None,
) -> None:
    """Train runs in parallel, in the order and number of :class:`Admission`, and wait for all of them.

    Args:
        at_once: maximum number at a time.
        begun: called before a run starts.
        ended: called after its end with its error or None, from any thread, before the next run starts. The error is
            a StoppedError if the pool was closed because of another error. Not called if the run will be retried.
        name: of a run's task; None: its method, seed and point.
        runs: known runs. more: returns later ones.
    """
    watcher, delays = operation.watcher, operation.steps.delays

    def attempt(run: PlacedRun) -> ProtoflError | None:
        try:
            for delay in delays:
                error = pool.carry_out(run)
                if not was_stopped_by_the_machine(error):
                    return error
                watcher.say(f"{run.label}: {error}; tried again in {delay:g} s")
                pool.wait(delay)
            return pool.carry_out(run)
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
            if not isinstance(error, StoppedError):  # a stopped run has not ended: the same command resumes it
                watcher.run_ended(run.label)
        return None if isinstance(error, PrunedError | StoppedError) else error  # both are intended

    admission = Admission(runs, Cache.here(), pool, more)
    works = (Work((name or _short)(run), run.directory, partial(work, run)) for run in admission)
    operation.steps.together(works, at_once)


def _short(run: PlacedRun) -> str:
    """Return the method and seed, and in a sweep the point."""
    point = run.label.partition(", ")[2]
    return f"{run.config.method.name}-s{run.config.seed}" + (f" {point}" if point else "")
