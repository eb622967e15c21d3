"""Workers as processes of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flcore.config.schema import Config
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import TurnRunner
from flcore.engine.failures import located, packed, unpacked
from flcore.engine.numerics import set_numerics, single_thread
from flcore.engine.pool.child import Child
from flcore.engine.pool.executors import PoolExecutor, WorkerHandle, WorkerLostError
from flcore.engine.pool.groups import Group, Keep, StoppedError, train_group
from flcore.engine.pool.wire import packed_result, receive_values, send_values, unpacked_result
from flcore.engine.pool.workers import device_of, worker_count
from flcore.engine.replies import Result
from flcore.engine.run_state import RunState
from flcore.engine.turns import Reply
from flcore.evaluation.scoring import Part, Request, Scorer
from flcore.experiment.experiment import EngineChoice, Experiment
from flcore.experiment.provenance import refuse_edited_code
from flcore.io.records import Record

_SECONDS_BETWEEN_LOOKS = 1


def local_pool(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> PoolExecutor:
    """A pool of processes on this machine.

    Ids go out through the pipes and replies come back. A worker reads the committed state from disk, once a leg, and
    its clients' memories, which it writes there itself. The data are mapped from the prepared files, so all processes
    share their pages.
    """
    config = experiment.config
    choice = astuple(experiment.chosen)
    arguments = (config.to_mapping(), choice, str(prepared), str(partition), str(checkpoint.directory))
    return PoolExecutor(lambda place: _Process(place, arguments), worker_count(config.engine), experiment, checkpoint)


class _Process(WorkerHandle):
    shares_scoring = True

    def __init__(self, place: int, arguments: tuple[Any, ...]) -> None:
        self._at_work = threading.Lock()
        self._process = Child(_serve, place, *arguments)
        self._pipe = self._process.pipe

    def train(self, state: RunState, group: Group, keep: Keep) -> None:
        self._ask("train", state.legs, [list(stack) for stack in group], keep=keep)

    def score(self, folder: Path, number: int, request: Request, part: Part) -> dict[str, Tensor]:
        answers = self._ask("score", str(folder), number, request, part)
        return {name: torch.from_numpy(values) for name, values in answers.items()}

    def _ask(self, what: str, *arguments: Any, keep: Keep = lambda client, result, memory: None) -> Any:
        """Send a request; on the way to its answer come results."""
        with self._at_work:
            self._told(partial(self._pipe.send, (what, *arguments)))
            while True:
                kind, *content = self._told(self._next)
                if kind == "answer":
                    break
                client, described, size = content
                values = self._told(partial(receive_values, self._pipe, size))
                try:
                    keep(client, unpacked_result(described, values), None)
                except BaseException:
                    self._process.kill()  # it would go on to send what nobody asks for any more
                    raise
        error, answer = content
        if error is not None:
            raise unpacked(error)
        return answer

    def _next(self) -> Any:
        while not self._pipe.poll(_SECONDS_BETWEEN_LOOKS):
            # A process that it started itself may hold its end of the pipe open.
            if not self._process.is_alive and not self._pipe.poll():
                raise EOFError
        return self._pipe.recv()

    def _told(self, speak: Callable[[], Any]) -> Any:
        """What comes of using the pipe, unless it is broken; what keeping a result raises is no death of a worker's."""
        try:
            return speak()
        except (EOFError, OSError) as broken:
            raise WorkerLostError(self._process.ended(_SECONDS_BETWEEN_LOOKS)) from broken

    def dismiss(self) -> None:
        if self._at_work.acquire(blocking=False):
            self._pipe.close()
            self._at_work.release()
        else:
            self._process.kill()  # what it has answered is here

    def end(self) -> None:
        self._process.end()
        self._pipe.close()


def _serve(pipe: Connection, place: int, *arguments: Any) -> None:
    """A worker's life: answer requests until the parent is gone. What goes wrong goes back as a message."""
    worker = _Worker(place, *arguments)
    while True:
        try:
            what, *arguments = pipe.recv()
        except (EOFError, OSError):
            return
        error: Mapping[str, Any] | None = None
        answer: Mapping[str, Any] | None = None
        try:
            if what == "train":
                legs, group = arguments
                worker.train(legs, group, pipe)
            else:
                folder, number, request, part = arguments
                answer = worker.score(folder, number, request, part)
        except StoppedError:
            return
        except Exception as raised:
            error = packed(raised)
        try:
            pipe.send(("answer", error, answer))
        except OSError:
            return  # the parent is gone


class _Worker:
    """What a worker process keeps between requests; loaded with the first one, whose errors go back like any."""

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
        self._checkpoint = Checkpoint(Path(folder))
        self._runner: TurnRunner | None = None
        self._state: RunState | None = None
        self._scorer: Scorer | None = None
        self._shown: tuple[int, Record, Mapping[int, int]] | None = None

    @cached_property
    def _experiment(self) -> Experiment:
        config = Config.from_mapping(self._config)
        refuse_edited_code(config)
        prepare_process(self._place, config.engine.precision)
        return Experiment.open(config, *self._data, choice=self._choice)

    def score(self, folder: str, number: int, request: Request, part: Part) -> dict[str, Any]:
        with located("scoring"):
            if self._scorer is None:
                self._scorer = Scorer(self._experiment)
            if self._shown is None or self._shown[0] != number:
                self._shown = (number, *self._checkpoint.shown(Path(folder)))
            _, server, legs = self._shown
            memories = partial(self._checkpoint.memory, memories=legs)
            answers = self._scorer.answer(request, part, server, memories)
            return {name: values.numpy() for name, values in answers.items()}

    def train(self, legs: int, group: Group, pipe: Connection) -> None:
        with located("a worker's start"):
            if self._runner is None:
                self._runner = TurnRunner(self._experiment)
        if self._state is None or self._state.legs != legs:
            self._state = self._checkpoint.read_state()
        state = self._state

        def send(client: int, result: Result, memory: Record | None) -> None:
            if isinstance(result, Reply) and result.remembers and memory is not None:
                self._checkpoint.turns.save_memory(state.legs + 1, client, memory, state.run.digest)
            described, pieces = packed_result(result)
            pipe.send(("result", client, described, sum(map(len, pieces))))
            send_values(pipe, pieces)

        memories = partial(self._checkpoint.memory, memories=state.memories)
        # Between a request and its answer the parent says nothing: whatever can be read is the pipe's end.
        train_group(self._runner, state, group, memories, pipe.poll, send)


def prepare_process(place: int, precision: str) -> None:
    """One intra-op thread; and of several GPUs the one that falls to this worker."""
    single_thread()
    set_numerics(precision)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1:
        torch.cuda.set_device(device_of(place, devices))
