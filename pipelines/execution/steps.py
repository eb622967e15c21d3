"""Steps of an experiment: plain calls here, tasks in `pipelines/orchestration/prefect_steps.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from flcore.engine.orchestrator import InlineOrchestrator, Orchestrator

Result = TypeVar("Result")


class Work(NamedTuple, Generic[Result]):
    """Work on a run. An error that the function returns marks it as failed; its creator handles the error."""

    name: str
    folder: Path
    function: Callable[[], Result]


class Steps(Orchestrator, Protocol):
    """Runs the steps of an experiment; results must not depend on it."""

    delays: Sequence[float]
    """Seconds before each retry of a run after a system error, such as a full disk; empty if a user is present."""

    def together(self, works: Iterable[Work[Result]], at_once: int) -> list[Result]:
        """Run at most ``at_once`` pieces of work in parallel; return their results, in order.

        Each is requested when there is room, as earlier results may decide which one is next. None may raise an error.
        """


class InlineSteps(InlineOrchestrator):
    """Plain calls, and threads that wait for other processes."""

    delays: Sequence[float] = ()

    def together(self, works: Iterable[Work[Result]], at_once: int) -> list[Result]:
        """Call them on threads; raise the first error, or Ctrl-C, at once, and start nothing more.

        With ``at_once`` 1, call them on this thread.
        """
        if at_once == 1:
            return [work.function() for work in works]
        threads = ThreadPoolExecutor(at_once)
        begun: list[Future[Result]] = []
        running: set[Future[Result]] = set()
        asked = iter(works)
        try:
            while (work := next(asked, None)) is not None:
                begun.append(threads.submit(work.function))
                running.add(begun[-1])
                while len(running) == at_once:
                    running = _after_an_end(running)
            while running:
                running = _after_an_end(running)
            return [future.result() for future in begun]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _after_an_end(running: set[Future[Result]]) -> set[Future[Result]]:
    """Wait until some have ended, raise their errors, and return the others."""
    ended, others = wait(running, return_when=FIRST_COMPLETED)
    for future in ended:
        future.result()
    return others
