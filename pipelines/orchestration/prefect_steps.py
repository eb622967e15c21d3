"""Prefect's way to carry out the steps of a body: as named tasks of the surrounding flow.

Tasks carry the names of the algorithm's steps. They take no arguments, because Prefect would search every tensor for
futures: each is a closure over explicit inputs, and results stay in memory. A task waits for the tasks of the step
before it, so the graph of a flow run shows the steps in order.

Where a run has workers, training is a task per group of clients and each server step one; without workers a task is a
whole round, whose name says its steps, since a task costs more than many a step. Of several runs each is a task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar
from uuid import UUID

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateDetails, StateType
from prefect.context import TaskRunContext
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


class _Ended(State[None]):
    """A task that a later one waits for; without its result, which may be large."""

    @classmethod
    def of(cls, task_run: UUID) -> _Ended:
        """Return the end of a task run."""
        return cls(type=StateType.COMPLETED, state_details=StateDetails(task_run_id=task_run))

    def result(self, *_: Any, **__: Any) -> None:
        """Return nothing: Prefect asks for the result of whatever a task waits for."""


class PrefectSteps(Steps):
    """Carries out steps as tasks of the surrounding flow. Repeating one is harmless: what is finished is on disk."""

    delays = _RETRY_DELAYS_SECONDS

    def __init__(self, *, whole_rounds: bool) -> None:
        """Say whether a task is a whole round, or each of its pieces."""
        self._whole_rounds = whole_rounds
        self._in_a_round = False
        self._ended: list[_Ended] = []
        """The tasks of this step."""

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

        before = self._begin()
        return self._task("round", carry_out, f"round {number}: {', '.join(pieces)}")(wait_for=before)

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """One task, in this thread."""
        if self._in_a_round:
            return function(*arguments)
        before = self._begin()
        return self._task(name, partial(function, *arguments))(wait_for=before)

    def map(self, name: str, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """A task per item on the flow's threads."""
        if self._in_a_round:
            return InlineOrchestrator(physical_cores()).map(name, function, items)
        before = self._begin()
        tasks = [self._task(name, partial(function, item)) for item in items]
        futures: list[PrefectFuture[Result]] = [task.submit(return_state=False, wait_for=before) for task in tasks]
        return [future.result() for future in futures]

    def together(self, works: Iterable[Work[Result]], at_once: int) -> list[Result]:
        """A task per piece of work; the next one appears when another has ended. One at a time is in this thread.

        Whoever made the pieces tries them again: a task that did would begin while another one has its room.
        """
        before = self._begin()
        if at_once == 1:
            tasks = ((self._task(name, piece, delays=()), piece) for name, piece in _pieces(works))
            return [piece.result_of(partial(task, wait_for=before)) for task, piece in tasks]
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
            task = self._task(name, partial(and_make_room, piece), delays=())
            begun.append((piece, task.submit(return_state=False, wait_for=before)))
            room.acquire()
        return [piece.result_of(future.result) for piece, future in begun]

    def _begin(self) -> list[_Ended]:
        """Begin a step; return the tasks of the last one."""
        before, self._ended = self._ended, []
        return before

    def _task(
        self,
        name: str,
        work: Callable[[], Result],
        run_name: str | None = None,
        delays: Sequence[float] = _RETRY_DELAYS_SECONDS,
    ) -> Task[[], Result]:
        def and_note() -> Result:
            result = work()
            context = TaskRunContext.get()
            assert context is not None
            self._ended.append(_Ended.of(context.task_run.id))
            return result

        return Task(
            and_note,
            name=name,
            task_run_name=(run_name or name).replace("{", "{{").replace("}", "}}"),  # else a name with a random ending
            retries=len(delays),
            retry_delay_seconds=list(delays),
            retry_condition_fn=_worth_retrying,
            cache_policy=NO_CACHE,
            persist_result=False,
        )


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
