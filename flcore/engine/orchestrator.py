"""How the pieces of a round are carried out: simply called, or shown, timed and retried by somebody's orchestrator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
T = TypeVar("T")


class Orchestrator(Protocol):
    """Carries out rounds and their pieces; results must not depend on it."""

    def round(self, number: int, pieces: Sequence[str], function: Callable[[], T]) -> T:
        """Carry out a round; its pieces come to :meth:`call` and :meth:`map` meanwhile.

        Args:
            number: of the round.
            pieces: their names, in order.
            function: the rest of the round; what a call of it left undone, another one does.
        """

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Carry out one named piece of work."""

    def map(self, name: str, function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Carry out one named piece of work per item, perhaps at the same time; results in the order of the items."""


class InlineOrchestrator:
    """Plain calls; of mapped work as many at the same time as there are workers to wait for."""

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers

    def round(self, number: int, pieces: Sequence[str], function: Callable[[], T]) -> T:
        return function()

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def map(self, name: str, function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Call it for each item; results in the order of the items.

        The first error, or Ctrl-C, is raised at once: nothing new is begun, and what is under way is left to whoever
        closes the workers.
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
