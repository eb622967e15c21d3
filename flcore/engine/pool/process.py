"""Workers as processes of this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flcore.config.schema import Config
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.failures import pack_error, unpack_error
from flcore.engine.pool.child import WorkerProcess
from flcore.engine.pool.executors import PoolExecutor, Receive, WorkerHandle, WorkerLostError
from flcore.engine.pool.task import Request, StoppedError, Worker
from flcore.experiment.experiment import Experiment
from flcore.io.records import Payloads, pack_records, unpack_records

_SECONDS_BETWEEN_LOOKS = 1

_AT_ONCE = 512  # pieces in one system call; systems take 1,024


def local_pool(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> PoolExecutor:
    """Return a pool of processes on this machine.

    Messages, states and replies travel through pipes. The data are mapped from the prepared files, so all processes
    share their pages.
    """
    config = experiment.config
    arguments = (config.to_mapping(), str(prepared), str(partition))
    return PoolExecutor(lambda number: _Process(number, arguments), config.engine.worker_count, experiment, checkpoint)


class _Process(WorkerHandle):
    def __init__(self, number: int, arguments: tuple[Any, ...]) -> None:
        self._at_work = threading.Lock()
        self._process = WorkerProcess(_serve, number, *arguments)
        self._pipe = self._process.pipe

    def run(self, request: Request, records: Sequence[Payloads], receive: Receive) -> None:
        with self._at_work:
            packed, pieces = pack_records(records)
            self._use_pipe(partial(self._pipe.send, (request, packed, sum(map(len, pieces)))))
            self._use_pipe(partial(send_values, self._pipe, pieces))
            while True:
                kind, *content = self._use_pipe(self._next)
                if kind == "answer":
                    break
                packed, size = content
                values = self._use_pipe(partial(receive_values, self._pipe, size))
                try:
                    receive(packed, values)
                except BaseException:
                    self._process.kill()  # its later answers have no reader
                    raise
        (error,) = content
        if error is not None:
            raise unpack_error(error)

    def _next(self) -> Any:
        while not self._pipe.poll(_SECONDS_BETWEEN_LOOKS):
            # A child of the worker may hold its end of the pipe open.
            if not self._process.is_alive and not self._pipe.poll():
                raise EOFError
        return self._pipe.recv()

    def _use_pipe(self, function: Callable[[], Any]) -> Any:
        """Call a function of the pipe; raise WorkerLostError if it is broken."""
        try:
            return function()
        except (EOFError, OSError) as broken:
            raise WorkerLostError(self._process.exit_status(_SECONDS_BETWEEN_LOOKS)) from broken

    def stop(self) -> None:
        if self._at_work.acquire(blocking=False):
            self._pipe.close()
            self._at_work.release()
        else:
            self._process.kill()  # its answers have arrived

    def join(self) -> None:
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, number: int, config: Mapping[str, Any], prepared: str, partition: str) -> None:
    """Answer requests until the parent exits; send errors back as messages."""
    worker = Worker(number, lambda: Experiment.open(Config.from_mapping(config), Path(prepared), Path(partition)))

    def send(packed: dict[str, Any], pieces: list[memoryview]) -> None:
        pipe.send(("result", packed, sum(map(len, pieces))))
        send_values(pipe, pieces)

    while True:
        error: Mapping[str, Any] | None = None
        try:
            request, packed, size = pipe.recv()
            records = unpack_records(packed, receive_values(pipe, size))
        except (EOFError, OSError):
            return
        try:
            # Between a request and its answer the parent is silent: readable means that the pipe is closed.
            worker.run(request, records, pipe.poll, send)
        except StoppedError:
            return
        except Exception as raised:
            error = pack_error(raised)
        try:
            pipe.send(("answer", error))
        except OSError:
            return  # the parent has exited


# ---- through a pipe ----------------------------------------------------------------------------------------------


def send_values(pipe: Connection, pieces: list[memoryview]) -> None:
    """Write pieces to the pipe directly: as messages they would be joined and copied twice.

    The 45 MB of a ResNet-18 take a third of the time.
    """
    rest = [piece for piece in pieces if len(piece)]
    while rest:
        sent, whole = os.writev(pipe.fileno(), rest[:_AT_ONCE]), 0
        while whole < len(rest) and sent >= len(rest[whole]):
            sent -= len(rest[whole])
            whole += 1
        rest = rest[whole:]
        if sent:
            rest[0] = rest[0][sent:]


def receive_values(pipe: Connection, size: int) -> Tensor:
    """Read the values of :func:`send_values`, uint8 [size].

    Raises:
        EOFError: the other end was closed. OSError: likewise.
    """
    values = torch.empty(size, dtype=torch.uint8)
    rest = values.numpy().data
    while len(rest):
        read = os.readv(pipe.fileno(), [rest])
        if read == 0:
            raise EOFError
        rest = rest[read:]
    return values
