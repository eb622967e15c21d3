"""Where clients are trained: in this process, or by long-lived workers. Same interface, same bytes.

An executor is handed a task, that is some stacks of clients, and returns their results by client id. Results are on
disk before they are returned, and a result found there is not computed again.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from flcore.engine.checkpoint import Checkpoint, RunState
from flcore.engine.client import Failure, Reply, Worker, download, failed
from flcore.experiment import Experiment

Task = Sequence[Sequence[int]]
Replies = Mapping[int, Reply | Failure]


class Executor(Protocol):
    """Trains tasks; safe to call from several threads."""

    def train(self, state: RunState, task: Task) -> Replies:
        """Results of the leg after ``state`` for the clients of a task."""

    def close(self) -> None:
        """End workers."""


class InlineExecutor:
    """Trains in the calling process, one stack at a time."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint) -> None:
        """Build the one worker."""
        self._worker = Worker(experiment)
        self._checkpoint = checkpoint
        self._one_at_a_time = threading.Lock()

    def train(self, state: RunState, task: Task) -> Replies:
        """Train the task on this thread."""
        with self._one_at_a_time:
            return train_task(self._worker, self._checkpoint, state, task)

    def close(self) -> None:
        """Nothing to end."""


def train_task(worker: Worker, checkpoint: Checkpoint, state: RunState, task: Task) -> dict[int, Reply | Failure]:
    """Results of a task in the leg after ``state``: those on disk, else trained now and put there.

    Raises:
        RunError: a client failed and ``federation.on_client_error`` is ``stop``.
    """
    leg, drop = state.legs + 1, worker.experiment.config.federation.on_client_error == "drop"
    replies: dict[int, Reply | Failure] = {}
    for stack in task:
        found = {client: checkpoint.load_reply(leg, client, state.run) for client in stack}
        if all(reply is not None for reply in found.values()):
            replies |= {client: reply for client, reply in found.items() if reply is not None}
            continue
        memories = partial(checkpoint.memory, memories=state.memories)
        # A stack with a reply missing is trained whole: the same bytes again for those that are there.
        for client, result in worker.train(state.place, stack, state.server, memories).items():
            if isinstance(result, Failure):
                if not drop:
                    raise failed(state.place, client, result.cause)
                checkpoint.save_failure(leg, client, result, state.run)
                replies[client] = result
            else:
                checkpoint.save_reply(leg, client, *result, state.run)
                replies[client] = result[0]
    return replies


class WorkerLostError(Exception):
    """A worker died while it had work."""


class WorkerHandle(ABC):
    """A long-lived worker somewhere, as a pool sees it."""

    @abstractmethod
    def train(self, state: RunState, task: Task) -> None:
        """Have a task trained and its results on disk.

        Raises:
            WorkerLostError: the worker died. RunError: training failed.
        """

    @abstractmethod
    def end(self) -> None:
        """End the worker, dead or alive."""


class PoolExecutor:
    """Trains on workers that load the data once and live as long as the run.

    A worker that dies is replaced and its task trained again, without what is on disk already; after a second death the
    task's clients are tried one stack at a time, and a stack that costs two more workers is what fails.
    """

    def __init__(
        self, start: Callable[[int], WorkerHandle], workers: int, experiment: Experiment, checkpoint: Checkpoint
    ) -> None:
        """Start the workers; they load their data while the caller goes on.

        Args:
            start: makes the worker in a place from 0 to ``workers`` - 1.
            workers: how many.
            experiment: the run. checkpoint: its folder.
        """
        self._start, self._experiment, self._checkpoint = start, experiment, checkpoint
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._workers = {place: start(place) for place in range(workers)}
        for place in range(workers):
            self._idle.put(place)

    def train(self, state: RunState, task: Task) -> Replies:
        """Hand the task to the next idle worker and wait for it."""
        if not self._try_twice(state, task):
            for stack in task:
                if not self._missing(state, stack) or self._try_twice(state, [stack]):
                    continue
                self._give_up(state, stack)
        return self._collect(state, task)

    def _try_twice(self, state: RunState, task: Task) -> bool:
        """Train a task, once more if the worker dies; False if the second one died too."""
        for _ in range(2):
            place = self._idle.get()
            try:
                self._workers[place].train(state, task)
            except WorkerLostError:
                self._workers[place].end()
                self._workers[place] = self._start(place)
                continue
            else:
                return True
            finally:
                self._idle.put(place)
        return False

    def _missing(self, state: RunState, stack: Sequence[int]) -> bool:
        return any(self._checkpoint.load_reply(state.legs + 1, client, state.run) is None for client in stack)

    def _give_up(self, state: RunState, stack: Sequence[int]) -> None:
        cause = (
            "workers died again and again training it; see their output above, or, if there is none, memory was short: "
            "try a smaller engine.workers or engine.stack_size"
        )
        if self._experiment.config.federation.on_client_error == "stop":
            raise failed(state.place, stack[0], cause)
        for client in stack:
            down = download(state.server, client, self._experiment, state.place)
            self._checkpoint.save_failure(state.legs + 1, client, Failure(cause, down), state.run)

    def _collect(self, state: RunState, task: Task) -> dict[int, Reply | Failure]:
        replies: dict[int, Reply | Failure] = {}
        for client in (client for stack in task for client in stack):
            reply = self._checkpoint.load_reply(state.legs + 1, client, state.run)
            if reply is None:
                raise failed(state.place, client, "the worker's reply is missing on disk")
            replies[client] = reply
        return replies

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.end()
