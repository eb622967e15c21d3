"""Where clients are trained: in this process, or in a pool of long-lived processes. Same interface, same bytes.

An executor is handed a group of clients and returns their results by client id. Results are on disk before they are
returned, and a result found there is not computed again.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from flcore.config import Config
from flcore.engine.checkpoint import Checkpoint, RunState
from flcore.engine.client import Reply, Worker
from flcore.engine.experiment import Experiment
from flcore.errors import ProtoflError, RunError


class Executor(Protocol):
    """Trains groups of clients; safe to call from several threads."""

    def train(self, state: RunState, clients: Sequence[int]) -> Mapping[int, Reply]:
        """Results of the round after ``state.round`` for the given clients."""

    def close(self) -> None:
        """End workers."""


class InlineExecutor:
    """Trains in the calling process, one client at a time."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint) -> None:
        """Build the one worker."""
        self._worker = Worker(experiment)
        self._checkpoint = checkpoint
        self._one_at_a_time = threading.Lock()

    def train(self, state: RunState, clients: Sequence[int]) -> Mapping[int, Reply]:
        """Train the group on this thread."""
        with self._one_at_a_time:
            return {client: _reply(self._worker, self._checkpoint, state, client) for client in clients}

    def close(self) -> None:
        """Nothing to end."""


def _reply(worker: Worker, checkpoint: Checkpoint, state: RunState, client: int) -> Reply:
    """A client's reply in the round after ``state``: the one on disk, else trained now and put there."""
    reply = checkpoint.load_reply(state.round + 1, client)
    if reply is None:
        memory = checkpoint.memory(client, state.memories)
        reply, kept = worker.train(state.round + 1, client, state.server, memory)
        checkpoint.save_reply(state.round + 1, client, reply, kept)
    return reply


class PoolExecutor:
    """Trains in ``workers`` processes that load the data once and live as long as the run.

    Only paths and ids go through the pipes: a worker reads the committed state, once a round, and writes replies. A
    worker that dies is replaced and its group is trained again, once; a second death stops the run.
    """

    def __init__(self, config: Config, prepared: Path, partition: Path, checkpoint: Checkpoint) -> None:
        """Start the processes; they load their data while the caller goes on."""
        self._arguments = (config.to_mapping(), str(prepared), str(partition), str(checkpoint.directory))
        self._checkpoint = checkpoint
        # Not fork: the parent has threads (and perhaps CUDA), which a forked child inherits in an unknown state.
        self._context = multiprocessing.get_context("spawn")
        self._idle: queue.SimpleQueue[_WorkerProcess] = queue.SimpleQueue()
        self._all: list[_WorkerProcess] = []
        for _ in range(config.engine.workers):
            self._add_worker()

    def _add_worker(self) -> None:
        process = _WorkerProcess(self._context, self._arguments)
        self._all.append(process)
        self._idle.put(process)

    def train(self, state: RunState, clients: Sequence[int]) -> Mapping[int, Reply]:
        """Hand the group to the next idle worker and wait for it."""
        for attempt in (1, 2):
            worker = self._idle.get()
            try:
                worker.request((state.round, list(clients)))
            except (EOFError, ConnectionError) as error:
                worker.end()
                self._all.remove(worker)
                self._add_worker()
                if attempt == 2:
                    raise RunError(
                        f"round {state.round + 1}: two workers died training clients {list(clients)}; see their "
                        "output above, or, if there is none, memory was short: try a smaller engine.workers"
                    ) from error
            except ProtoflError:
                self._idle.put(worker)
                raise
            else:
                self._idle.put(worker)
                break
        replies: dict[int, Reply] = {}
        for client in clients:
            reply = self._checkpoint.load_reply(state.round + 1, client)
            if reply is None:
                raise RunError(f"round {state.round + 1}, client {client}: the worker's reply is missing on disk")
            replies[client] = reply
        return replies

    def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            worker.end()


class _WorkerProcess:
    def __init__(self, context: Any, arguments: tuple[Any, ...]) -> None:
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def request(self, message: Any) -> None:
        """Send work and wait; errors of the worker are raised here.

        Raises:
            EOFError: the process died. RunError: training failed.
        """
        self._pipe.send(message)
        failure = self._pipe.recv()
        if failure is not None:
            raise RunError(failure)

    def end(self) -> None:
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, config: Mapping[str, Any], prepared: str, partition: str, directory: str) -> None:
    """A worker's life: load, then answer requests until the parent is gone.

    What the user can mend goes back as a message; anything else ends the process, with its traceback on standard error.
    """
    torch.set_num_threads(1)
    run_config, checkpoint = Config.from_mapping(config), Checkpoint(Path(directory))
    worker: Worker | None = None
    state: RunState | None = None
    while True:
        try:
            last_round, clients = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        failure = None
        try:
            if worker is None:
                worker = Worker(Experiment.open(run_config, Path(prepared), Path(partition)))
            if state is None or state.round != last_round:
                state = checkpoint.read_state()
            for client in clients:
                _reply(worker, checkpoint, state, client)
        except ProtoflError as error:
            failure = str(error)
        pipe.send(failure)
