"""Orchestrators call the parts of a round, and may show, time and retry them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
T = TypeVar("T")


class Orchestrator(Protocol):
    """Calls rounds and their parts; results must not depend on it."""

    def round(self, number: int, pieces: Sequence[str], function: Callable[[], T]) -> T:
        """Call a round, which calls its parts by :meth:`call` and :meth:`map`.

        Args:
            number: of the round.
            pieces: their names, in order.
            function: the rest of the round; a second call continues after the last commit.
        """

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call one named part."""

    def map(self, name: str, function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Call a named part for each item, perhaps in parallel; return results in the order of items."""


class InlineOrchestrator:
    """Plain calls; ``map`` uses one thread per worker."""

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers

    def round(self, number: int, pieces: Sequence[str], function: Callable[[], T]) -> T:
        return function()

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def map(self, name: str, function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Call the function for each item and return results in the order of items.

        The first error, or Ctrl-C, is raised at once and nothing new starts; closing the workers stops running calls.
        """
        if self._workers <= 1:
            return list(map(function, items))
        threads = ThreadPoolExecutor(self._workers)
        try:
            begun = [threads.submit(function, item) for item in items]
            ended, _ = wait(begun, return_when=FIRST_EXCEPTION)
            return [future.result() for future in begun if future in ended]  # all of them, unless one raises
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
