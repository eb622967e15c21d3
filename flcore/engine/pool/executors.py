"""Executors train clients in this process or in long-lived workers: same interface, bytes and errors.

An executor trains a group of stacks and returns results by client id, without repeating existing results. Workers send
replies and clients' states to this process, which alone writes them: reading what workers wrote took longer.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from flcore.core.errors import RunError
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.exchange import ClientResult, ExchangeWork, Failure, Results, unpack_results
from flcore.engine.failures import ClientError
from flcore.engine.local.serial import Trainer
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.task import (
    Group,
    Request,
    ScoreRequest,
    StateOf,
    StoppedError,
    TrainRequest,
    drops_failures,
    train_group,
)
from flcore.evaluation.scoring import EvalRequest, EvalTask
from flcore.experiment.experiment import Experiment
from flcore.io.records import Payloads, Record, unpack_records

Answer = TypeVar("Answer")

Receive = Callable[[dict[str, Any], Tensor], None]
"""Takes a packed result and its values, uint8 [n]; results come in order."""


class Executor(Protocol):
    """Trains groups of stacks; safe to call from several threads."""

    def train(self, work: ExchangeWork, group: Group) -> Mapping[int, ClientResult]:
        """Return the results of an exchange for the clients of a group.

        Raises:
            RunError: a client failed and ``federation.on_client_error`` is ``stop``; or the executor is closed.
        """

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int]
    ) -> Sequence[Record] | None:
        """Return the answers to the parts of a scoring, in order; None if the caller should score itself.

        Args:
            request: the scoring. parts: of it.
            client_states: client to the exchange that left its state.
        """

    def close(self) -> None:
        """Stop workers and running work on other threads."""


class _KeepingExecutor:
    """Keeps results in ``checkpoint``: the object that commits, since it may hold them in memory."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint) -> None:
        self._experiment, self.checkpoint = experiment, checkpoint
        self._results = checkpoint.client_results

    def _keep(self, work: ExchangeWork, results: Results) -> None:
        self._results.add(work.number, results, work.run)

    def _missing(self, work: ExchangeWork, group: Group) -> list[list[int]]:
        return self._results.missing(work.number, group, work.run)

    def _collected(self, work: ExchangeWork, group: Group) -> Mapping[int, ClientResult]:
        """Return the results of a group; raise RunError if one is missing."""
        results: dict[int, ClientResult] = {}
        clients = [client for stack in group for client in stack]
        for client, result in self._results.load_all(work.number, clients, work.run).items():
            if result is None:
                raise ClientError.of(work, client, Failure("the worker's reply is missing"))
            results[client] = result
        return results


# ---- in this process ---------------------------------------------------------------------------------------------


class InlineExecutor(_KeepingExecutor):
    """Trains in the calling process, one stack at a time."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint, trainer: Trainer | None = None) -> None:
        """Build the one worker; ``trainer`` replaces the run's own."""
        super().__init__(experiment, checkpoint)
        self._runner = ClientRunner(experiment, trainer)
        self._one_at_a_time = threading.Lock()
        self._closed = False

    def train(self, work: ExchangeWork, group: Group) -> Mapping[int, ClientResult]:
        """Train the group on this thread."""
        with self._one_at_a_time:
            client_states = partial(self.checkpoint.client_state, client_states=work.client_states)
            missing, keep = self._missing(work, group), partial(self._keep, work)
            train_group(self._runner, work, missing, client_states, lambda: self._closed, keep)
            return self._collected(work, group)

    def score(self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int]) -> None:
        """Return None: the caller is in the same process."""

    def close(self) -> None:
        self._closed = True


# ---- by workers --------------------------------------------------------------------------------------------------


class WorkerLostError(Exception):
    """A worker died at work; says how."""


class WorkerHandle(ABC):
    """A pool's handle of a long-lived worker."""

    @abstractmethod
    def run(self, request: Request, records: Sequence[Payloads], receive: Receive) -> None:
        """Run a request on the worker.

        Args:
            request: with its records.
            receive: takes every result; also results before an error or a crash.

        Raises:
            WorkerLostError: the worker died. Exception: as raised there.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ask an idle worker to exit; kill a busy one. Do not wait."""

    @abstractmethod
    def join(self) -> None:
        """Wait until the stopped or dead worker has exited."""


class PoolExecutor(_KeepingExecutor):
    """Trains on workers that load the data once and live as long as the run.

    A worker that dies is replaced and trains the missing results of its group again. After a second crash the stacks
    are tried one by one; a stack that costs two more workers fails. An exception is no crash: it comes back as a
    message, and the worker continues.
    """

    def __init__(
        self, start: Callable[[int], WorkerHandle], workers: int, experiment: Experiment, checkpoint: Checkpoint
    ) -> None:
        """Start the workers.

        Args:
            start: makes the worker with a number from 0 to ``workers`` - 1.
            workers: number of workers.
            experiment: the run. checkpoint: its folder.
        """
        super().__init__(experiment, checkpoint)
        self._start = start
        self._lock, self._closed = threading.Lock(), False
        self._idle: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._workers = {number: start(number) for number in range(workers)}
        for number in range(workers):
            self._idle.put(number)

    def train(self, work: ExchangeWork, group: Group) -> Mapping[int, ClientResult]:
        """Hand the group to the next idle worker and wait for it."""
        if self._train_twice(work, group) is not None:
            for stack in self._missing(work, group):
                crash = self._train_twice(work, [stack])
                if crash is not None:
                    self._give_up(work, stack, crash)
        return self._collected(work, group)

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int]
    ) -> Sequence[Record] | None:
        """Score on the workers, a piece each."""
        size = -(-len(parts) // len(self._workers))
        pieces = [parts[start : start + size] for start in range(0, len(parts), size)]

        def answer(piece: Sequence[EvalTask]) -> list[Record]:
            asked = ScoreRequest.of(request, piece, client_states, self._state_of(client_states))
            try:
                return self._answers(*asked)
            except WorkerLostError:
                return self._answers(*asked)

        try:
            answered = InlineOrchestrator(len(self._workers)).map("score", answer, pieces)
        except WorkerLostError as error:
            raise RunError(f"a worker died twice while it scored, the last one {error}: memory may be short") from error
        return [record for piece in answered for record in piece]

    def _answers(self, request: ScoreRequest, records: Sequence[Payloads]) -> list[Record]:
        answers: list[Record] = []

        def receive(packed: dict[str, Any], values: Tensor) -> None:
            answers.append(unpack_records(packed, values)[0])

        self.on_worker(lambda worker: worker.run(request, records, receive))
        return answers

    def _state_of(self, client_states: Mapping[int, int]) -> StateOf:
        return partial(self.checkpoint.stored_state, client_states=client_states)

    def _train_twice(self, work: ExchangeWork, group: Group) -> str | None:
        """Train a group, a second time if the worker dies; return how the second worker died, or None."""
        crash = ""

        def receive(packed: dict[str, Any], values: Tensor) -> None:
            self._keep(work, unpack_results(packed, values))

        for _ in range(2):
            missing = self._missing(work, group)
            if not missing:
                return None
            request, records = TrainRequest.of(work, missing, self._state_of(work.client_states))
            try:
                self.on_worker(lambda worker: worker.run(request, records, receive))  # noqa: B023 - called at once
                return None
            except WorkerLostError as error:
                crash = str(error)
        return crash

    def on_worker(self, work: Callable[[WorkerHandle], Answer]) -> Answer:
        """Call ``work`` with the next idle worker.

        Raises:
            WorkerLostError: it died and was replaced. StoppedError: the pool is closed.
        """
        number = self._idle.get()
        if number is None:
            self._idle.put(None)  # for the next waiting thread
            raise StoppedError
        try:
            return work(self._worker(number))
        except WorkerLostError:
            self._replace(number)
            raise
        finally:
            self._idle.put(number)

    def _worker(self, number: int) -> WorkerHandle:
        with self._lock:
            if self._closed:
                raise StoppedError
            return self._workers[number]

    def _replace(self, number: int) -> None:
        with self._lock:
            if self._closed:
                raise StoppedError
            self._workers[number].join()
            self._workers[number] = self._start(number)

    def _give_up(self, work: ExchangeWork, stack: Sequence[int], crash: str) -> None:
        cause = (
            f"workers died again and again training it, the last one {crash}; see their output above, or, if there is "
            "none, memory was short: try a smaller engine.workers or engine.stack_size"
        )
        if not drops_failures(self._experiment):
            raise ClientError.of(work, stack[0], Failure(cause))
        self._keep(work, {client: (Failure(cause), Record()) for client in stack})

    def close(self) -> None:
        """Stop all workers; waiting threads get a StoppedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._idle.put(None)
        for worker in self._workers.values():
            worker.stop()
        for worker in self._workers.values():
            worker.join()
