"""Executors train clients in this process or in long-lived workers: same interface, bytes and errors.

An executor trains a group of stacks and returns results by client id, without repeating existing results. Workers send
replies and clients' states to this process, which alone writes them: reading what workers wrote took longer.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol, TypeVar

from flcore.core.errors import RunError
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.exchange import ClientResult, ExchangeWork, Failure
from flcore.engine.failures import ClientError, LocatedError, client_step
from flcore.engine.local.serial import Trainer
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.evaluation.model_selection import ClientStates
from flcore.evaluation.scoring import EvalRequest, EvalTask
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record

Answer = TypeVar("Answer")

Group = Sequence[Sequence[int]]
"""Stacks of clients that one worker trains one after the other."""

Results = Mapping[int, ClientResult]

Keep = Callable[[int, ClientResult, Record], None]
"""Takes a client's result and its state."""


class StoppedError(LocatedError):
    """Work that was stopped or not started because its executor is closed."""

    def __init__(self) -> None:
        super().__init__("training was stopped")


class Executor(Protocol):
    """Trains groups of stacks; safe to call from several threads."""

    def train(self, work: ExchangeWork, group: Group) -> Results:
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
    drop, stacks = _drops_failures(runner.experiment), deque(list(stack) for stack in group)
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
        for client, outcome in outcomes.items():
            result, client_state = (outcome, Record()) if isinstance(outcome, Failure) else outcome
            if isinstance(result, Failure) and not drop:
                raise ClientError.of(work, client, result)
            keep(client, result, client_state)


def _drops_failures(experiment: Experiment) -> bool:
    return experiment.config.federation.on_client_error == "drop"


class _KeepingExecutor:
    """Keeps results in ``checkpoint``: the object that commits, since it may hold them in memory."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint) -> None:
        self._experiment, self.checkpoint = experiment, checkpoint
        self._results = checkpoint.client_results

    def _keep(self, work: ExchangeWork, client: int, result: ClientResult, client_state: Record) -> None:
        self._results.add(work.number, client, result, client_state, work.run)

    def _missing(self, work: ExchangeWork, group: Group) -> list[list[int]]:
        return self._results.missing(work.number, group, work.run)

    def _collected(self, work: ExchangeWork, group: Group) -> Results:
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

    def train(self, work: ExchangeWork, group: Group) -> Results:
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
    def train(self, work: ExchangeWork, group: Group, keep: Keep) -> None:
        """Train a group on the worker.

        Args:
            work: the exchange, of the group's clients alone. group: of stacks.
            keep: takes every result; also results before an error or a crash.

        Raises:
            WorkerLostError: the worker died. Exception: as raised there.
        """

    shares_scoring: ClassVar[bool] = False
    """True: the worker has :meth:`score`."""

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int], run: str
    ) -> list[Record]:
        """Answer parts of a scoring on the worker.

        Args:
            request: the scoring. parts: of it.
            client_states: of the parts' clients. run: digest of the run's name.

        Raises:
            WorkerLostError: the worker died. Exception: as raised there.
        """
        raise NotImplementedError

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

    def train(self, work: ExchangeWork, group: Group) -> Results:
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
        """Score on the workers, a piece each; return None if they share no disk with this process."""
        if not all(worker.shares_scoring for worker in self._workers.values()):
            return None
        run = self.checkpoint.run
        size = -(-len(parts) // len(self._workers))
        pieces = [parts[start : start + size] for start in range(0, len(parts), size)]

        def answer(piece: Sequence[EvalTask]) -> list[Record]:
            clients = [part.client for part in piece if part.client is not None]
            states = {client: client_states[client] for client in clients if client in client_states}
            try:
                return self.on_worker(lambda worker: worker.score(request, piece, states, run))
            except WorkerLostError:
                return self.on_worker(lambda worker: worker.score(request, piece, states, run))

        try:
            answered = InlineOrchestrator(len(self._workers)).map("score", answer, pieces)
        except WorkerLostError as error:
            raise RunError(f"a worker died twice while it scored, the last one {error}: memory may be short") from error
        return [record for piece in answered for record in piece]

    def _train_twice(self, work: ExchangeWork, group: Group) -> str | None:
        """Train a group, a second time if the worker dies; return how the second worker died, or None."""
        crash = ""
        for _ in range(2):
            missing = self._missing(work, group)
            if not missing:
                return None
            part, keep = work.of([client for stack in missing for client in stack]), partial(self._keep, work)
            try:
                self.on_worker(lambda worker: worker.train(part, missing, keep))  # noqa: B023 - called at once
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
        for client in stack:
            if not _drops_failures(self._experiment):
                raise ClientError.of(work, client, Failure(cause))
            self._keep(work, client, Failure(cause), Record())

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
