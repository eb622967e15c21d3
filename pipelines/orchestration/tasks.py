"""The tasks of an experiment, under the names of the algorithm's steps.

Inputs of a task are JSON: names, numbers, folders. They are shown on its page and in its name. The call that computes
is passed beside them, because it holds tensors and open files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import Constant, RunInput, State
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.states import Completed
from prefect.task_engine import run_task_sync
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from flcore.core.errors import ProtoflError
from pipelines.execution.one_run import is_of_the_machine, was_stopped_by_the_machine
from pipelines.runs.cache import Cache

P = ParamSpec("P")
Result = TypeVar("Result")

RETRY_DELAYS_SECONDS = (2.0, 20.0, 200.0)
"""A full disk or a remote file system may have recovered by then."""


class TaskCall(Generic[Result]):
    """A call in this process, and its result."""

    def __init__(self, function: Callable[..., Result], *arguments: Any) -> None:
        self._function = partial(function, *arguments)
        self._results: list[Result] = []

    def __call__(self) -> Result:
        """Call the function; raise an error that it returns, so that the task fails."""
        result = self._function()
        self._results = [result]
        if isinstance(result, ProtoflError):
            raise result
        return result

    def result(self, state: State[Any]) -> Result:
        """Return the function's result, or raise its error; ``state`` is the final one of its task."""
        if not self._results:
            state.result()  # raises
        return self._results[0]


def worth_retrying(failed: Task[..., Any], run: Any, state: State[Any]) -> bool:
    """Return whether a system error (a full disk) failed the task, rather than the configuration or a bug."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, ProtoflError):
        return was_stopped_by_the_machine(error)
    return is_of_the_machine(error)


def _step(
    name: str, run_name: str | None = None, *, retries: tuple[float, ...] = RETRY_DELAYS_SECONDS
) -> Callable[[Callable[P, Any]], Task[P, Any]]:
    """Return the decorator of a task; a step may be repeated, because finished work is on disk."""
    return task(
        name=name,
        task_run_name=run_name or name,
        retries=len(retries),
        retry_delay_seconds=list(retries),
        retry_condition_fn=worth_retrying,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


@_step("prepare-data")
def prepare_data(data: dict[str, Any], call: TaskCall[Path]) -> State[Path] | Path:
    """Read, resize and store the images."""
    return _cached(call)


@_step("partition-data", "partition-data, seed {seed}")
def partition_data(prepared: Path, partition: dict[str, Any], seed: int, call: TaskCall[Path]) -> State[Path] | Path:
    """Divide the images among the clients."""
    return _cached(call)


@_step("round", "round {round}: {steps}")
def run_round(round: int, steps: str, call: TaskCall[Any]) -> None:
    """Run a round; alone in a task, because a task costs more than most of its steps."""
    call()


@_step("train-clients", "{step}, round {round}: clients {clients}")
def train_clients(step: str, round: int, clients: str, call: TaskCall[Any]) -> None:
    """Train a group of clients; mapped over the groups of a round."""
    call()


@_step("server-step", "{step}, round {round}")
def run_server_step(step: str, round: int, call: TaskCall[Any]) -> None:
    """Run a server step of the method, such as the aggregation, or evaluate the round."""
    call()


@_step("train-run", "{run}", retries=())  # `side_by_side` retries: a retry here would exceed the share of memory
def train_run(run: str, folder: Path, call: TaskCall[Any]) -> None:
    """Train and evaluate one of several runs."""
    call()


@_step("evaluate", "{step}")
def evaluate_run(step: str, folder: Path, call: TaskCall[Any]) -> None:
    """Evaluate a trained run, or compute figures of papers from it."""
    call()


@_step("report", "{step}")
def write_report(step: str, call: TaskCall[Any]) -> None:
    """Draw the page of a run or of a comparison, and log it."""
    call()


@_step("promote")
def promote_model(folder: Path, reason: str, call: TaskCall[Any]) -> None:
    """Make the model of a run the champion of its registered model."""
    call()


def _cached(call: TaskCall[Path]) -> State[Path] | Path:
    """Return the folder, in the state "Cached" if it existed.

    Prefect's own cache would return a folder that was deleted or damaged since; ours checks it.
    """
    root = Cache.here().root
    before = {(folder, folder.stat().st_ino) for folder in (*root.glob("prepared/*"), *root.glob("partitions/*"))}
    folder = call()
    if (folder, folder.stat().st_ino) not in before:
        return folder
    return Completed(name="Cached", message=f"exists: {folder}", data=folder)


# ---- inputs ------------------------------------------------------------------------------------------------------


def _constants(inputs: Mapping[str, Any]) -> dict[str, set[RunInput]]:
    """Return inputs as Prefect shows them: its engine would record their names without values."""
    return {
        name: {Constant(type=str(value) if isinstance(value, str | Path) else json.dumps(value))}
        for name, value in inputs.items()
        if not isinstance(value, quote)
    }


def run_here(
    step: Task[..., Any], inputs: Mapping[str, Any], call: TaskCall[Any], wait_for: Iterable[Any] = ()
) -> State[Any]:
    """Run a task in this thread, which Ctrl-C and time limits interrupt; return its final state."""
    # `quote`: Prefect would search the call, with all its tensors, for futures.
    parameters = {**inputs, "call": quote(call)}
    return run_task_sync(  # type: ignore[return-value]
        step, parameters=parameters, wait_for=list(wait_for), return_type="state", dependencies=_constants(inputs)
    )


class StepRunner(ThreadPoolTaskRunner[Any]):
    """Runs submitted and mapped tasks on threads, and records the values of their inputs."""

    def submit(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        return super().submit(task, parameters, wait_for, {**(dependencies or {}), **_constants(parameters)})
