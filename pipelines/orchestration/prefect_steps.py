"""Runs the steps of an experiment as tasks of the surrounding flow.

Tasks wait for those of the step before, so the graph of a flow run shows the steps in order. A run with workers has a
task per group of clients and per server step; one without has a task per round. Of several runs, each is a task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

from prefect import Task, allow_failure
from prefect.futures import PrefectFuture
from prefect.utilities.annotations import quote

from flcore.config.schema import Config
from flcore.core.host import physical_cores
from flcore.engine.orchestrator import InlineOrchestrator
from pipelines.execution.steps import Steps, Work
from pipelines.orchestration import tasks
from pipelines.orchestration.tasks import TaskCall, run_here

Item = TypeVar("Item")
Result = TypeVar("Result")


class PrefectSteps(Steps):
    """Runs steps as tasks of the surrounding flow."""

    delays = tasks.RETRY_DELAYS_SECONDS

    def __init__(self, *, whole_rounds: bool) -> None:
        """Create the steps; ``whole_rounds``: a round is one task."""
        self._whole_rounds = whole_rounds
        self._in_a_round = False
        self._round = 0
        self._before: list[Any] = []
        """Tasks of the last step."""

    def round(self, number: int, pieces: Sequence[str], function: Callable[[], Result]) -> Result:
        """Run a round as one task, or let its parts be tasks."""
        self._round = number
        if not self._whole_rounds:
            return function()
        self._in_a_round = True
        try:
            return self._run(tasks.run_round, {"round": number, "steps": ", ".join(pieces)}, TaskCall(function))
        finally:
            self._in_a_round = False

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a step as a task in this thread."""
        if self._in_a_round:
            return function(*arguments)
        step, inputs = self._task_of(name, arguments)
        return self._run(step, inputs, TaskCall(function, *arguments))

    def map(self, name: str, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Run a task per group of clients on the flow's threads."""
        groups: list[Any] = list(items)
        if self._in_a_round:
            return InlineOrchestrator(physical_cores()).map(name, function, groups)
        if not groups:
            return []
        calls = [TaskCall(function, group) for group in groups]
        futures = tasks.train_clients.map(
            step=name,
            round=self._round,
            clients=[_spans(chain.from_iterable(group)) for group in groups],
            call=[quote(call) for call in calls],
            wait_for=self._before,
        )
        return self._results(calls, futures)

    def together(self, works: Iterable[Work[Result]], at_once: int) -> list[Result]:
        """Run a task per run; request the next one when another has ended. One at a time is in this thread."""
        before, calls, futures = self._before, list[TaskCall[Result]](), list[PrefectFuture[Any]]()
        if at_once == 1:
            results = []
            self._before = []
            for work in works:
                call = TaskCall(work.function)
                state = run_here(tasks.train_run, {"run": work.name, "folder": work.folder}, call, before)
                self._before.append(allow_failure(state))
                results.append(call.result(state))
            return results
        room = threading.Semaphore(at_once)
        room.acquire()
        for work in works:
            calls.append(TaskCall(work.function))
            future = tasks.train_run.submit(
                work.name, work.folder, quote(calls[-1]), return_state=False, wait_for=before
            )
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
            room.acquire()
        return self._results(calls, futures)

    def _run(self, step: Task[..., Any], inputs: dict[str, Any], call: TaskCall[Result]) -> Result:
        state = run_here(step, inputs, call, self._before)
        self._before = [state]
        return call.result(state)

    def _results(self, calls: Sequence[TaskCall[Result]], futures: Sequence[PrefectFuture[Any]]) -> list[Result]:
        self._before = [allow_failure(future) for future in futures]
        results = []
        for call, future in zip(calls, futures, strict=True):
            future.wait()
            results.append(call.result(future.state))
        return results

    def _task_of(self, name: str, arguments: Sequence[Any]) -> tuple[Task[..., Any], dict[str, Any]]:
        """Return the task of a step, and its inputs."""
        match name, arguments:
            case "prepare-data", (Config() as config,):
                return tasks.prepare_data, {"data": config.to_mapping()["data"]}
            case "partition-data", (Config() as config, prepared):
                section = config.to_mapping()["partition"]
                return tasks.partition_data, {"prepared": prepared, "partition": section, "seed": config.partition_seed}
            case "evaluate" | "analyse", (Config(), _, _, folder, *_):
                return tasks.evaluate_run, {"step": name, "folder": folder}
            case "report" | "compare", ():
                return tasks.write_report, {"step": name}
            case "promote", (folder, _, reason):
                return tasks.promote_model, {"folder": folder, "reason": reason}
        return tasks.run_server_step, {"step": name, "round": self._round}


def _spans(numbers: Iterable[int]) -> str:
    """Return numbers as in ``0-3, 7``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)
