"""Workers as processes of this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flcore.config.schema import Config
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.client_results import StateFiles
from flcore.engine.exchange import ClientResult, ExchangeWork, pack_result, unpack_result
from flcore.engine.failures import error_context, pack_error, unpack_error
from flcore.engine.numerics import set_numerics, single_thread
from flcore.engine.pool.child import WorkerProcess
from flcore.engine.pool.executors import (
    Group,
    Keep,
    PoolExecutor,
    StoppedError,
    WorkerHandle,
    WorkerLostError,
    train_group,
)
from flcore.evaluation.scoring import Answerer, EvalRequest, EvalTask
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import refuse_edited_code
from flcore.io.records import Record, pack_records, unpack_records
from flcore.methods.types import MODEL

_SECONDS_BETWEEN_LOOKS = 1

_AT_ONCE = 512  # pieces in one system call; systems take 1,024


def local_pool(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> PoolExecutor:
    """Return a pool of processes on this machine.

    Messages, replies and new states travel through pipes; workers read clients' states on the disk. The data are mapped
    from the prepared files, so all processes share their pages.
    """
    config = experiment.config
    arguments = (config.to_mapping(), str(prepared), str(partition), str(checkpoint.directory))
    return PoolExecutor(lambda number: _Process(number, arguments), config.engine.worker_count, experiment, checkpoint)


class _Process(WorkerHandle):
    shares_scoring = True

    def __init__(self, number: int, arguments: tuple[Any, ...]) -> None:
        self._at_work = threading.Lock()
        self._process = WorkerProcess(_serve, number, *arguments)
        self._pipe = self._process.pipe

    def train(self, work: ExchangeWork, group: Group, keep: Keep) -> None:
        def unpack(client: int, packed: Any, values: Tensor) -> None:
            keep(client, *unpack_result(packed, values))

        stacks = [list(stack) for stack in group]
        arguments = replace(work, received={}), stacks, list(work.received)
        self._request("train", arguments, work.received.values(), unpack)

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int], run: str
    ) -> list[Record]:
        answers: list[Record] = []
        records, bare = split_parts(parts)
        self._request(
            "score",
            (request, bare, client_states, run),
            records,
            lambda _, packed, values: answers.append(unpack_records(packed, values)[0]),
        )
        return answers

    def _request(
        self, what: str, arguments: Any, records: Iterable[Record], keep: Callable[[int, Any, Tensor], None]
    ) -> None:
        """Send a request with records; ``keep`` takes the results that come before its answer."""
        with self._at_work:
            packed, pieces = pack_records(list(records))
            self._use_pipe(partial(self._pipe.send, (what, arguments, packed, sum(map(len, pieces)))))
            self._use_pipe(partial(send_values, self._pipe, pieces))
            while True:
                kind, *content = self._use_pipe(self._next)
                if kind == "answer":
                    break
                key, packed, size = content
                values = self._use_pipe(partial(receive_values, self._pipe, size))
                try:
                    keep(key, packed, values)
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


def _serve(pipe: Connection, number: int, *arguments: Any) -> None:
    """Answer requests until the parent exits; send errors back as messages."""
    worker = _Worker(number, *arguments)
    while True:
        error: Mapping[str, Any] | None = None
        try:
            what, request, packed, size = pipe.recv()
            records = unpack_records(packed, receive_values(pipe, size))
        except (EOFError, OSError):
            return
        try:
            if what == "train":
                worker.train(pipe, records, *request)
            else:
                worker.score(pipe, records, *request)
        except StoppedError:
            return
        except Exception as raised:
            error = pack_error(raised)
        try:
            pipe.send(("answer", error))
        except OSError:
            return  # the parent has exited


class _Worker:
    """The state of a worker process, loaded with the first request.

    Of the run's folder it reads clients' states, and nothing of the server's.
    """

    def __init__(
        self,
        number: int,
        config: Mapping[str, Any],
        prepared: str,
        partition: str,
        folder: str,
    ) -> None:
        self._number, self._config = number, config
        self._data = Path(prepared), Path(partition)
        self._states = StateFiles(Path(folder))
        self._runner: ClientRunner | None = None

    @cached_property
    def _experiment(self) -> Experiment:
        config = Config.from_mapping(self._config)
        refuse_edited_code(config)
        prepare_process(self._number, config.engine.precision)
        return Experiment.open(config, *self._data)

    @cached_property
    def _answerer(self) -> Answerer:
        return Answerer(self._experiment)

    def score(
        self,
        pipe: Connection,
        records: Sequence[Record],
        request: EvalRequest,
        parts: Sequence[EvalTask],
        client_states: Mapping[int, int],
        run: str,
    ) -> None:
        with error_context("scoring"):
            state_of = partial(self._client_state, client_states, run)
            for index, part in enumerate(whole_parts(parts, records)):
                _send(pipe, index, *pack_records([self._answerer.answer(request, part, state_of)]))

    def train(
        self, pipe: Connection, records: Sequence[Record], work: ExchangeWork, group: Group, clients: Sequence[int]
    ) -> None:
        with error_context("a worker's start"):
            if self._runner is None:
                self._runner = ClientRunner(self._experiment)
        work = replace(work, received=dict(zip(clients, records, strict=True)))
        self._states.close(but=set(work.client_states.values()))

        def send(client: int, result: ClientResult, client_state: Record) -> None:
            _send(pipe, client, *pack_result(result, client_state))

        state_of = partial(self._client_state, work.client_states, work.run)
        # Between a request and its answer the parent is silent: readable means that the pipe is closed.
        train_group(self._runner, work, group, state_of, pipe.poll, send)

    def _client_state(self, client_states: Mapping[int, int], run: str, client: int) -> Record:
        return self._states.load(client_states[client], client, run) if client in client_states else Record()


def prepare_process(number: int, precision: str) -> None:
    """Set one intra-op thread and the numerics; choose the worker's GPU if there are several."""
    single_thread()
    set_numerics(precision)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1:
        torch.cuda.set_device(number % devices)


# ---- through a pipe ----------------------------------------------------------------------------------------------


def split_parts(parts: Sequence[EvalTask]) -> tuple[list[Record], list[EvalTask]]:
    """Return the records of a scoring's parts, two each, and the parts without them."""
    records = [record for part in parts for record in (part.known, Record({MODEL: part.model} if part.model else {}))]
    return records, [replace(part, known=Record(), model=None) for part in parts]


def whole_parts(parts: Sequence[EvalTask], records: Sequence[Record]) -> list[EvalTask]:
    """Join the results of :func:`split_parts`."""
    pairs = zip(parts, records[::2], records[1::2], strict=True)
    return [replace(part, known=known, model=model.get(MODEL)) for part, known, model in pairs]


def _send(pipe: Connection, key: int, packed: Any, pieces: list[memoryview]) -> None:
    pipe.send(("result", key, packed, sum(map(len, pieces))))
    send_values(pipe, pieces)


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
