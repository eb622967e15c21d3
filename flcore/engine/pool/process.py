"""Workers as processes of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flcore.config.schema import Config
from flcore.engine.checkpoint import CURE, Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.failures import error_context, pack_error, unpack_error
from flcore.engine.numerics import set_numerics, single_thread
from flcore.engine.pool.child import WorkerProcess
from flcore.engine.pool.executors import PoolExecutor, WorkerHandle, WorkerLostError
from flcore.engine.pool.groups import Group, Keep, StoppedError, train_group
from flcore.engine.pool.wire import (
    packed_result,
    receive_values,
    send_values,
    split_parts,
    unpacked_result,
    whole_parts,
)
from flcore.engine.pool.workers import device_of, worker_count
from flcore.engine.turn_results import TurnResults
from flcore.engine.turns import ClientResult, LegWork, Reply
from flcore.evaluation.scoring import Answerer, EvalRequest, EvalTask
from flcore.experiment.experiment import EngineChoice, Experiment
from flcore.experiment.provenance import refuse_edited_code
from flcore.io.records import Record, pack_records, unpack_records

_SECONDS_BETWEEN_LOOKS = 1


def local_pool(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> PoolExecutor:
    """A pool of processes on this machine.

    Ids and messages go out through the pipes and replies come back. A worker reads its clients' memories from disk, and
    writes them there itself. The data are mapped from the prepared files, so all processes share their pages.
    """
    config = experiment.config
    choice = astuple(experiment.chosen)
    arguments = (config.to_mapping(), choice, str(prepared), str(partition), str(checkpoint.directory))
    return PoolExecutor(lambda place: _Process(place, arguments), worker_count(config.engine), experiment, checkpoint)


class _Process(WorkerHandle):
    shares_scoring = True

    def __init__(self, place: int, arguments: tuple[Any, ...]) -> None:
        self._at_work = threading.Lock()
        self._process = WorkerProcess(_serve, place, *arguments)
        self._pipe = self._process.pipe

    def train(self, work: LegWork, group: Group, keep: Keep) -> None:
        def kept(client: int, described: Any, values: Tensor) -> None:
            keep(client, unpacked_result(described, values), None)

        stacks = [list(stack) for stack in group]
        self._ask("train", (replace(work, received={}), stacks, list(work.received)), work.received.values(), kept)

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int], run: str
    ) -> list[Record]:
        found: list[Record] = []
        records, bare = split_parts(parts)
        self._ask(
            "score",
            (request, bare, client_states, run),
            records,
            lambda place, described, values: found.append(unpack_records(described, values)[0]),
        )
        return found

    def _ask(
        self, what: str, arguments: Any, records: Iterable[Record], keep: Callable[[int, Any, Tensor], None]
    ) -> None:
        """Send a request with records; ``keep`` takes the results that come before its answer."""
        with self._at_work:
            described, pieces = pack_records(list(records))
            self._told(partial(self._pipe.send, (what, arguments, described, sum(map(len, pieces)))))
            self._told(partial(send_values, self._pipe, pieces))
            while True:
                kind, *content = self._told(self._next)
                if kind == "answer":
                    break
                place, described, size = content
                values = self._told(partial(receive_values, self._pipe, size))
                try:
                    keep(place, described, values)
                except BaseException:
                    self._process.kill()  # its later answers have no reader
                    raise
        (error,) = content
        if error is not None:
            raise unpack_error(error)

    def _next(self) -> Any:
        while not self._pipe.poll(_SECONDS_BETWEEN_LOOKS):
            # A process that it started itself may hold its end of the pipe open.
            if not self._process.is_alive and not self._pipe.poll():
                raise EOFError
        return self._pipe.recv()

    def _told(self, speak: Callable[[], Any]) -> Any:
        """Use the pipe; a broken one means that the worker has died. Errors of keeping a result pass."""
        try:
            return speak()
        except (EOFError, OSError) as broken:
            raise WorkerLostError(self._process.ended(_SECONDS_BETWEEN_LOOKS)) from broken

    def dismiss(self) -> None:
        if self._at_work.acquire(blocking=False):
            self._pipe.close()
            self._at_work.release()
        else:
            self._process.kill()  # its answers have arrived

    def end(self) -> None:
        self._process.end()
        self._pipe.close()


def _serve(pipe: Connection, place: int, *arguments: Any) -> None:
    """A worker's life: answer requests until the parent is gone. What goes wrong goes back as a message."""
    worker = _Worker(place, *arguments)
    while True:
        error: Mapping[str, Any] | None = None
        try:
            what, asked, described, size = pipe.recv()
            records = unpack_records(described, receive_values(pipe, size))
        except (EOFError, OSError):
            return
        try:
            if what == "train":
                worker.train(pipe, records, *asked)
            else:
                worker.score(pipe, records, *asked)
        except StoppedError:
            return
        except Exception as raised:
            error = pack_error(raised)
        try:
            pipe.send(("answer", error))
        except OSError:
            return  # the parent is gone


class _Worker:
    """The state of a worker process between requests, loaded with the first one.

    Of the run's folder it knows what its clients keep, and nothing that the server holds.
    """

    def __init__(
        self,
        place: int,
        config: Mapping[str, Any],
        choice: tuple[bool, bool, bool],
        prepared: str,
        partition: str,
        folder: str,
    ) -> None:
        self._place, self._config, self._choice = place, config, EngineChoice(*choice)
        self._data = Path(prepared), Path(partition)
        self._turns = TurnResults(Path(folder), CURE, 0.0, time.monotonic)
        self._runner: ClientRunner | None = None

    @cached_property
    def _experiment(self) -> Experiment:
        config = Config.from_mapping(self._config)
        refuse_edited_code(config)
        prepare_process(self._place, config.engine.precision)
        return Experiment.open(config, *self._data, choice=self._choice)

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
            remembered = partial(self._memory, client_states, run)
            for place, part in enumerate(whole_parts(parts, records)):
                _send(pipe, place, *pack_records([self._answerer.answer(request, part, remembered)]))

    def train(
        self, pipe: Connection, records: Sequence[Record], work: LegWork, group: Group, clients: Sequence[int]
    ) -> None:
        with error_context("a worker's start"):
            if self._runner is None:
                self._runner = ClientRunner(self._experiment)
        work = replace(work, received=dict(zip(clients, records, strict=True)))

        def send(client: int, result: ClientResult, client_state: Record | None) -> None:
            if isinstance(result, Reply) and result.has_state and client_state is not None:
                self._turns.save_client_state(work.number, client, client_state, work.run)
            _send(pipe, client, *packed_result(result))

        client_states = partial(self._memory, work.client_states, work.run)
        # Between a request and its answer the parent is silent: readable means that the pipe is closed.
        train_group(self._runner, work, group, client_states, pipe.poll, send)

    def _memory(self, client_states: Mapping[int, int], run: str, client: int) -> Record:
        return self._turns.client_state(client_states[client], client, run) if client in client_states else Record()


def _send(pipe: Connection, place: int, described: Any, pieces: list[memoryview]) -> None:
    pipe.send(("result", place, described, sum(map(len, pieces))))
    send_values(pipe, pieces)


def prepare_process(place: int, precision: str) -> None:
    """One intra-op thread; and of several GPUs the one that falls to this worker."""
    single_thread()
    set_numerics(precision)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1:
        torch.cuda.set_device(device_of(place, devices))
