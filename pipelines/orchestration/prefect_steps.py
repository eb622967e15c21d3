"""Prefect's way to carry out the steps of a body: as named tasks of the surrounding flow.

Tasks carry the names of the algorithm's steps. They take no arguments: Prefect would look through every tensor for
futures; each is a closure over explicit inputs, and results stay in memory.

Where a run has workers, training is a task per group of clients and each server step one; without workers a task is a
whole round, whose name says its steps, since a task costs more than many a step. Of several runs each is a task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture

from flcore.core.errors import ProtoflError
from flcore.core.host import physical_cores
from flcore.engine.orchestrator import InlineOrchestrator
from pipelines.execution.one_run import is_of_the_machine, was_stopped_by_the_machine
from pipelines.execution.steps import Steps, Work

Item = TypeVar("Item")
Result = TypeVar("Result")

_RETRY_DELAYS_SECONDS = (2.0, 20.0, 200.0)
"""A full disk or a file system that is away may be back then."""


def _worth_retrying(failed: Task[..., Any], run: Any, state: State[Any]) -> bool:
    """Retry what a machine did (a full disk), not what the configuration, the mathematics or a fault of ours did."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, ProtoflError):
        return was_stopped_by_the_machine(error)
    return is_of_the_machine(error)


def _task(
    name: str, work: Callable[[], Result], run_name: str | None = None, delays: Sequence[float] = _RETRY_DELAYS_SECONDS
) -> Task[[], Result]:
    return Task(
        work,
        name=name,
        task_run_name=(run_name or name).replace("{", "{{").replace("}", "}}"),  # else a name with a random ending
        retries=len(delays),
        retry_delay_seconds=list(delays),
        retry_condition_fn=_worth_retrying,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


class PrefectSteps(Steps):
    """Carries out steps as tasks of the surrounding flow. Repeating one is harmless: what is finished is on disk."""

    delays = _RETRY_DELAYS_SECONDS

    def __init__(self, *, whole_rounds: bool) -> None:
        """Say whether a task is a whole round, or each of its pieces."""
        self._whole_rounds = whole_rounds
        self._in_a_round = False

    def round(self, number: int, pieces: Sequence[str], function: Callable[[], Result]) -> Result:
        """One task where rounds are not divided, named for its pieces."""
        if not self._whole_rounds:
            return function()

        def carry_out() -> Result:
            self._in_a_round = True
            try:
                return function()
            finally:
                self._in_a_round = False

        return _task("round", carry_out, f"round {number}: {', '.join(pieces)}")()

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """One task, in this thread."""
        if self._in_a_round:
            return function(*arguments)
        return _task(name, lambda: function(*arguments))()

    def map(self, name: str, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """A task per item on the flow's threads."""
        if self._in_a_round:
            return InlineOrchestrator(physical_cores()).map(name, function, items)
        futures: list[PrefectFuture[Result]] = [_task(name, partial(function, item)).submit() for item in items]
        return [future.result() for future in futures]

    def together(self, works: Iterable[Work[Result]], at_once: int) -> list[Result]:
        """A task per piece of work; the next one appears when another has ended. One at a time is in this thread.

        Whoever made the pieces tries them again: a task that did would begin while another one has its room.
        """
        if at_once == 1:
            return [piece.result_of(_task(name, piece, delays=())) for name, piece in _pieces(works)]
        room = threading.Semaphore(at_once)

        def and_make_room(piece: _Piece[Result]) -> Result:
            try:
                return piece()
            finally:
                room.release()

        begun: list[tuple[_Piece[Result], PrefectFuture[Result]]] = []
        asked = _pieces(works)
        room.acquire()
        while (named := next(asked, None)) is not None:
            name, piece = named
            begun.append((piece, _task(name, partial(and_make_room, piece), delays=()).submit()))
            room.acquire()
        return [piece.result_of(future.result) for piece, future in begun]


class _Piece(Generic[Result]):
    """A piece of work whose task fails with the error that it returns, and nothing else does."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._failed: Result | None = None

    def __call__(self) -> Result:
        result = self._work()
        if isinstance(result, ProtoflError):
            self._failed = result
            raise result
        return result

    def result_of(self, wait: Callable[[], Result]) -> Result:
        """What ``wait`` returns, or the error that was returned."""
        try:
            return wait()
        except ProtoflError:
            if self._failed is None:
                raise
            return self._failed


def _pieces(works: Iterable[Work[Result]]) -> Iterator[tuple[str, _Piece[Result]]]:
    return ((name, _Piece(work)) for name, work in works)
