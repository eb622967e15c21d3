"""Requests to workers, the same for processes and Ray actors: to train a group, or to answer tasks of a scoring.

A request comes with its clients' messages and states, as bytes. A worker has the data and the configuration, and sees
nothing else of the server or of the run's folder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from flcore.engine.client import ClientRunner
from flcore.engine.exchange import ExchangeWork, Failure, Results, pack_results
from flcore.engine.failures import ClientError, LocatedError, client_step, error_context
from flcore.engine.numerics import set_numerics, single_thread
from flcore.evaluation.model_selection import ClientStates
from flcore.evaluation.scoring import Answerer, EvalRequest, EvalTask
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import refuse_edited_code
from flcore.io.records import Payloads, Record, pack_records
from flcore.methods.types import MODEL

Group = Sequence[Sequence[int]]
"""Stacks of clients that one worker trains one after the other."""

Keep = Callable[[Results], None]
"""Takes the results of a stack."""

Send = Callable[[dict[str, Any], list[memoryview]], None]
"""Takes a packed result and its values: of a stack, or of a scoring's task."""

StateOf = Callable[[int], Payloads]
"""Client id → its state, for sending."""


@dataclass(frozen=True)
class TrainRequest:
    """Train a group.

    Attributes:
        work: the exchange, without messages and states. group: of stacks.
        clients: of the group. with_state: of these, in the order of their messages and states.
    """

    work: ExchangeWork
    group: Group
    clients: Sequence[int]
    with_state: Sequence[int]

    @classmethod
    def of(cls, work: ExchangeWork, group: Group, state_of: StateOf) -> tuple[TrainRequest, list[Payloads]]:
        """Return the request and its records."""
        clients = [client for stack in group for client in stack]
        with_state = [client for client in clients if client in work.client_states]
        request = cls(replace(work, received={}, client_states={}), group, clients, with_state)
        return request, [*(work.received[client] for client in clients), *map(state_of, with_state)]


@dataclass(frozen=True)
class ScoreRequest:
    """Answer tasks of a scoring.

    Attributes:
        request: the scoring. tasks: of it, without records. with_state: clients with states, in order.
    """

    request: EvalRequest
    tasks: Sequence[EvalTask]
    with_state: Sequence[int]

    @classmethod
    def of(
        cls, request: EvalRequest, tasks: Sequence[EvalTask], client_states: Mapping[int, int], state_of: StateOf
    ) -> tuple[ScoreRequest, list[Payloads]]:
        """Return the request and its records: two of each task, then states."""
        clients = [task.client for task in tasks if task.client is not None]
        with_state = [client for client in clients if client in client_states]
        bare = [replace(task, known=Record(), model=None) for task in tasks]
        known: list[Payloads] = []
        for task in tasks:
            known += task.known, {MODEL: task.model} if task.model else {}
        return cls(request, bare, with_state), [*known, *map(state_of, with_state)]


Request = TrainRequest | ScoreRequest


class Worker:
    """A worker's state: the experiment, loaded with the first request."""

    def __init__(self, number: int, load: Callable[[], Experiment]) -> None:
        """Load nothing yet; ``load`` opens the experiment."""
        self._number, self._load = number, load

    @cached_property
    def _experiment(self) -> Experiment:
        experiment = self._load()
        refuse_edited_code(experiment.config)
        _prepare_process(self._number, experiment.config.engine.precision)
        return experiment

    @cached_property
    def _runner(self) -> ClientRunner:
        with error_context("a worker's start"):
            return ClientRunner(self._experiment)

    @cached_property
    def _answerer(self) -> Answerer:
        return Answerer(self._experiment)

    def run(self, request: Request, records: Sequence[Record], stopped: Callable[[], bool], send: Send) -> None:
        """Run a request and send every result as soon as it exists.

        Args:
            request: with its records. stopped: as for :func:`train_group`. send: takes results.
        """
        rest = iter(records)
        if isinstance(request, TrainRequest):
            work = replace(request.work, received=dict(zip(request.clients, rest, strict=False)))
            state_of = _states(request.with_state, rest)

            def keep(results: Results) -> None:
                send(*pack_results(results))

            train_group(self._runner, work, request.group, state_of, stopped, keep)
            return
        with error_context("scoring"):
            known = list(islice(rest, 2 * len(request.tasks)))
            state_of = _states(request.with_state, rest)
            for number, task in enumerate(request.tasks):
                whole = replace(task, known=known[2 * number], model=known[2 * number + 1].get(MODEL))
                send(*pack_records([self._answerer.answer(request.request, whole, state_of)]))


def _states(clients: Sequence[int], records: Iterator[Record]) -> ClientStates:
    states = dict(zip(clients, records, strict=True))
    return lambda client: states.get(client, Record())


def _prepare_process(number: int, precision: str) -> None:
    """Set one intra-op thread and the numerics; choose the worker's GPU if there are several."""
    single_thread()
    set_numerics(precision)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1:
        torch.cuda.set_device(number % devices)


# ---- training ----------------------------------------------------------------------------------------------------


class StoppedError(LocatedError):
    """Work that was stopped or not started because its executor is closed."""

    def __init__(self) -> None:
        super().__init__("training was stopped")


def train_group(
    runner: ClientRunner,
    work: ExchangeWork,
    group: Group,
    client_states: ClientStates,
    stopped: Callable[[], bool],
    keep: Keep,
) -> None:
    """Train a group and hand over every stack's results as soon as they exist.

    If ``federation.on_client_error`` is ``drop``, the clients of a failed stack are trained one by one.

    Args:
        runner: trains stacks. work: the exchange. group: of stacks.
        client_states: client id to its state.
        stopped: whether to stop; called before and after every stack.
        keep: takes results.

    Raises:
        RunError: a client failed and ``federation.on_client_error`` is ``stop``, or the machine lacks disk or memory.
        StoppedError: ``stopped`` was true.
    """
    drop, stacks = drops_failures(runner.experiment), deque(list(stack) for stack in group)
    while stacks:
        stack = stacks.popleft()
        if stopped():
            raise StoppedError
        try:
            with client_step(work, stack, ""):
                outcomes = runner.train(work, stack, client_states)
        except ClientError as error:
            if not drop or error.is_the_machines:
                raise
            if len(stack) > 1:  # the failing client is unknown, and each gives the same bytes alone
                stacks.extendleft([client] for client in reversed(stack))
                continue
            outcomes = {stack[0]: error.failure}
        if stopped():  # another run may have begun in this folder
            raise StoppedError
        failures = {client: outcome for client, outcome in outcomes.items() if isinstance(outcome, Failure)}
        results = {client: outcome for client, outcome in outcomes.items() if not isinstance(outcome, Failure)}
        keep(results | {client: (failure, Record()) for client, failure in failures.items() if drop})
        for client, failure in failures.items() if not drop else ():
            raise ClientError.of(work, client, failure)


def drops_failures(experiment: Experiment) -> bool:
    """Return whether a failed client is left out of its round."""
    return experiment.config.federation.on_client_error == "drop"
