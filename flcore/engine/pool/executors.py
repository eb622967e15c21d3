"""Executors train clients in this process or in long-lived workers: same interface, bytes and errors.

An executor is handed a group, that is some stacks of clients, and returns their results by client id. A result that is
there already is not computed again. This process keeps all results, in memory and on the disk, as ``engine.durability``
says: workers that write replies for this process to read took longer than sending them.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol, TypeVar

from flcore.core.errors import RunError
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.failures import failed
from flcore.engine.local.serial import Trainer
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.groups import (
    Group,
    Keep,
    ReplyStore,
    Results,
    StoppedError,
    drops_failures,
    train_group,
)
from flcore.engine.turns import ClientResult, Failure, LegWork, leg_of
from flcore.evaluation.scoring import EvalRequest, EvalTask
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record

Answer = TypeVar("Answer")


class Executor(Protocol):
    """Trains groups of stacks; safe to call from several threads."""

    def train(self, work: LegWork, group: Group) -> Results:
        """Return the results of an exchange for the clients of a group.

        Raises:
            RunError: a client failed and ``federation.on_client_error`` is ``stop``; or the executor is closed.
        """

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int]
    ) -> Sequence[Record] | None:
        """Return the answers to the parts of a scoring, in order; None if the caller should score itself.

        Args:
            request: what is scored. parts: of it, with what answers are made from.
            client_states: client to the exchange that left what it remembers.
        """

    def close(self) -> None:
        """Stop workers and running work on other threads."""


# ---- in this process ---------------------------------------------------------------------------------------------


class InlineExecutor:
    """Trains in the calling process, one stack at a time."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint, trainer: Trainer | None = None) -> None:
        """Build the one worker.

        Args:
            experiment: the run.
            checkpoint: its folder; the very object that commits, since it may hold results in memory.
            trainer: of local training; None: the run's own.
        """
        self._runner = ClientRunner(experiment, trainer)
        self._checkpoint = checkpoint
        self._keeper = ReplyStore(experiment, checkpoint)
        self._one_at_a_time = threading.Lock()
        self._closed = False

    def train(self, work: LegWork, group: Group) -> Results:
        """Train the group on this thread."""
        with self._one_at_a_time:
            todo = self._keeper.missing(work, group)
            client_states = partial(self._checkpoint.client_state, client_states=work.client_states)
            keep = partial(self._keeper.keep, work)
            train_group(self._runner, work, todo, client_states, lambda: self._closed, keep)
            return collected(self._keeper, work, group, self._runner.experiment)

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int]
    ) -> Sequence[Record] | None:
        """Return None: the caller is in the same process."""
        return None

    def close(self) -> None:
        self._closed = True


# ---- by workers --------------------------------------------------------------------------------------------------


class WorkerLostError(Exception):
    """A worker died while it had work; says how."""


class WorkerHandle(ABC):
    """A long-lived worker somewhere, as a pool sees it."""

    @abstractmethod
    def train(self, work: LegWork, group: Group, keep: Keep) -> None:
        """Have a group trained.

        Args:
            work: the exchange, of the group's clients alone. group: of stacks.
            keep: is handed every result; also those that came before an error, or a death.

        Raises:
            WorkerLostError: the worker died. Exception: what was raised there, as it would be raised here.
        """

    shares_scoring: ClassVar[bool] = False
    """True: the worker has :meth:`score`."""

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int], run: str
    ) -> list[Record]:
        """Answer parts of a scoring.

        Args:
            request: what is scored. parts: of it.
            client_states: of the parts' clients. run: digest of the run's name.

        Raises:
            WorkerLostError: the worker died. Exception: what was raised there, as it would be raised here.
        """
        raise NotImplementedError

    @abstractmethod
    def dismiss(self) -> None:
        """Have the worker leave; if it is at work, at once."""

    @abstractmethod
    def end(self) -> None:
        """See to it that the worker, dismissed or dead, is gone."""


class PoolExecutor:
    """Trains on workers that load the data once and live as long as the run.

    A worker that dies is replaced and its group trained again, without what it has sent already; after a second death
    the group's clients are tried one stack at a time, and a stack that costs two more workers is what fails. An error
    is no death: it comes back as a message, and the worker lives on.
    """

    def __init__(
        self, start: Callable[[int], WorkerHandle], workers: int, experiment: Experiment, checkpoint: Checkpoint
    ) -> None:
        """Start the workers.

        Args:
            start: makes the worker in a place from 0 to ``workers`` - 1.
            workers: how many.
            experiment: the run. checkpoint: its folder; the very object that commits.
        """
        self._start, self._experiment, self._checkpoint = start, experiment, checkpoint
        self._keeper = ReplyStore(experiment, checkpoint)
        self._lock, self._closed = threading.Lock(), False
        self._idle: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._workers = {place: start(place) for place in range(workers)}
        for place in range(workers):
            self._idle.put(place)

    def train(self, work: LegWork, group: Group) -> Results:
        """Hand the group to the next idle worker and wait for it."""
        if self._deaths(work, group):
            for stack in self._keeper.missing(work, group):
                deaths = self._deaths(work, [stack])
                if deaths:
                    self._give_up(work, stack, deaths[-1])
        return collected(self._keeper, work, group, self._experiment)

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int]
    ) -> Sequence[Record] | None:
        """Hand out the parts in as many pieces as there are workers; None where these share no disk with this process.

        What a piece's parts share is sent once.
        """
        if not all(worker.shares_scoring for worker in self._workers.values()):
            return None
        run = self._checkpoint.flush(client_states)
        size = -(-len(parts) // len(self._workers))
        pieces = [parts[start : start + size] for start in range(0, len(parts), size)]

        def answer(piece: Sequence[EvalTask]) -> list[Record]:
            clients = [part.client for part in piece if part.client is not None]
            own = {client: client_states[client] for client in clients if client in client_states}
            try:
                return self.on_worker(lambda worker: worker.score(request, piece, own, run))
            except WorkerLostError:
                return self.on_worker(lambda worker: worker.score(request, piece, own, run))

        try:
            answered = InlineOrchestrator(len(self._workers)).map("score", answer, pieces)
        except WorkerLostError as error:
            raise RunError(f"a worker died twice while it scored, the last one {error}: memory may be short") from error
        return [found for piece in answered for found in piece]

    def _deaths(self, work: LegWork, group: Group) -> list[str]:
        """Have a group trained, a second time if the worker dies; how workers died where both did, else nothing."""
        deaths: list[str] = []
        keep = partial(self._keeper.keep, work)
        for _ in range(2):
            todo = self._keeper.missing(work, group)
            if not todo:
                return []
            own = work.of([client for stack in todo for client in stack])
            try:
                self.on_worker(partial(_train, work=own, group=todo, keep=keep))
            except WorkerLostError as error:
                deaths.append(str(error))
            else:
                return []
        return deaths

    def on_worker(self, work: Callable[[WorkerHandle], Answer]) -> Answer:
        """Have something done by the next idle worker.

        Raises:
            WorkerLostError: it died, and another one has taken its place. StoppedError: the pool is closed.
        """
        place = self._idle.get()
        if place is None:
            self._idle.put(None)  # for the next waiting thread
            raise StoppedError
        try:
            return work(self._worker(place))
        except WorkerLostError:
            self._replace(place)
            raise
        finally:
            self._idle.put(place)

    def _worker(self, place: int) -> WorkerHandle:
        with self._lock:
            if self._closed:
                raise StoppedError
            return self._workers[place]

    def _replace(self, place: int) -> None:
        with self._lock:
            if self._closed:
                raise StoppedError
            self._workers[place].end()
            self._workers[place] = self._start(place)

    def _give_up(self, work: LegWork, stack: Sequence[int], death: str) -> None:
        cause = (
            f"workers died again and again training it, the last one {death}; see their output above, or, if there is "
            "none, memory was short: try a smaller engine.workers or engine.stack_size"
        )
        for client in stack:
            if not drops_failures(self._experiment):
                raise failed(work.place, leg_of(self._experiment, work.place).name, client, Failure(cause))
            self._keeper.keep(work, client, Failure(cause), None)

    def close(self) -> None:
        """Stop all workers; threads that wait for one get a StoppedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._idle.put(None)
        for worker in self._workers.values():
            worker.dismiss()
        for worker in self._workers.values():
            worker.end()


def _train(worker: WorkerHandle, work: LegWork, group: Group, keep: Keep) -> None:
    worker.train(work, group, keep)


def collected(keeper: ReplyStore, work: LegWork, group: Group, experiment: Experiment) -> dict[int, ClientResult]:
    """By client what was kept of a group.

    Raises:
        RunError: of somebody nothing was.
    """
    results: dict[int, ClientResult] = {}
    for client, result in keeper.found(work, [client for stack in group for client in stack]).items():
        if result is None:
            exchange = leg_of(experiment, work.place).name
            raise failed(work.place, exchange, client, Failure("the worker's reply is missing"))
        results[client] = result
    return results
