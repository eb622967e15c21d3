"""How the steps of a body are carried out: plainly here, as tasks in `pipelines/orchestration/prefect_steps.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

from flcore.engine.orchestrator import InlineOrchestrator, Orchestrator

Result = TypeVar("Result")
Work = tuple[str, Callable[[], Result]]
"""A named piece of work. An error that it returns says that it failed; whoever made it knows that."""


class Steps(Orchestrator, Protocol):
    """Carries out the steps of a body; results must not depend on it.

    Attributes:
        delays: a run that the machine stopped (a full disk) is tried again after so many seconds each; none: it has
            failed at once, where somebody sits in front of it.
    """

    delays: Sequence[float]

    def together(self, works: Iterable[Work[Result]], at_once: int) -> list[Result]:
        """Carry out pieces of work side by side.

        Args:
            works: begun in this order, each asked for when there is room for it: which one comes next may depend on
                what has ended. None of them raises what is not a mistake of ours.
            at_once: so many at a time.

        Returns:
            Their results, in order.
        """


class InlineSteps(InlineOrchestrator):
    """Plain calls, and threads that wait for other processes."""

    delays: Sequence[float] = ()

    def together(self, works: Iterable[Work[Result]], at_once: int) -> list[Result]:
        """Call them on threads; the first error, or Ctrl-C, is raised at once, and nothing new is begun.

        One at a time is called here.
        """
        if at_once == 1:
            return [work() for _, work in works]
        threads = ThreadPoolExecutor(at_once)
        begun: list[Future[Result]] = []
        running: set[Future[Result]] = set()
        asked = iter(works)
        try:
            while (work := next(asked, None)) is not None:
                begun.append(threads.submit(work[1]))
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
