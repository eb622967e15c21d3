"""How bodies of commands and flows are carried out: plainly here, as tasks in `pipelines/orchestration/flows.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from flcore.engine.orchestrator import InlineOrchestrator, Orchestrator

Result = TypeVar("Result")
Work = tuple[str, Callable[[], Result]]
"""A named piece of work."""


class Steps(Orchestrator, Protocol):
    """Carries out the steps of a body; results must not depend on it."""

    def together(self, works: Sequence[Work[Result]], at_once: int) -> list[Result]:
        """Carry out pieces of work side by side.

        Args:
            works: begun in this order; none of them raises what is not a mistake of ours.
            at_once: so many at a time.

        Returns:
            Their results, in order.
        """


class InlineSteps(InlineOrchestrator):
    """Plain calls, and threads that wait for other processes."""

    def together(self, works: Sequence[Work[Result]], at_once: int) -> list[Result]:
        """Call them on threads; the first error, or Ctrl-C, is raised at once, and nothing new is begun."""
        threads = ThreadPoolExecutor(at_once)
        try:
            return list(threads.map(lambda work: work[1](), works))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
