"""A pool of long-lived processes; each trains one whole run at a time.

Runs of a comparison are independent, so filling the cores with runs wastes nothing, while workers inside a run wait for
one another at every round. A run's bytes do not depend on the process, the time or the other runs.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError
from flcore.core.loaded_code import EditedError
from flcore.engine.pool.child import WorkerProcess, end_with_parent
from flcore.engine.pool.task import StoppedError
from flcore.engine.rounds import Observers
from flcore.experiment.provenance import refuse_edited_code
from pipelines.execution.one_run import PlacedRun, PrunedError, carry_out, is_of_the_machine
from pipelines.execution.progress import Watcher
from pipelines.runs import memory
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs
from pipelines.runs.provenance import source

_TRIES = 2  # a run resumes after its process was killed, which costs only time
_PLAIN = (ConfigError, DataError, EditedError, PrunedError)
_SECONDS_TO_DIE = 5
_TOLD = ("top1_global", "mean_local", "tasks")
_STOP = "stop"

Prune = Callable[[str], bool]
"""Called with a run's label after each of its rounds; True stops the run with a :class:`PrunedError`."""


class RunPool:
    """Processes that train runs; they end with this one, however it ends."""

    def __init__(self, size: int, watcher: Watcher, prune: Prune | None = None) -> None:
        """Create the pool of at most ``size`` processes; each starts when a run needs it.

        A run that ``prune`` stops may have trained further rounds by then.
        """
        self._size, self._watcher, self._prune = size, watcher, prune
        self._idle: list[_Worker] = []
        self._at: dict[str, _Worker] = {}
        self._all: list[_Worker] = []
        self._changed = threading.Condition(threading.RLock())
        self._closed = False

    def __enter__(self) -> RunPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def carry_out(self, run: PlacedRun) -> ProtoflError | None:
        """Train a run and wait for its end; called from as many threads as there are processes.

        Returns:
            Its error, or None; a RunError if its process was killed twice.

        Raises:
            StoppedError: the pool was closed.
        """
        try:
            refuse_edited_code(run.config)
        except EditedError as error:
            return error
        worker = self._take(run.label)
        try:
            failure = self._try_on(worker, run)
        except BaseException:  # of a watcher: the process trains on, and its messages would pass for the next run's
            worker = self._at.pop(run.label)
            worker.end()
            with self._changed:
                self._all.remove(worker)
                self._changed.notify()
            raise
        with self._changed:
            self._idle.append(self._at.pop(run.label))
            self._changed.notify()
        return failure

    def _try_on(self, worker: _Worker, run: PlacedRun) -> ProtoflError | None:
        """Train a run in a process, and again in a new one if that was killed."""
        for _ in range(_TRIES):
            try:
                return worker.carry_out(run, self._watcher, self._prune)
            except _DiedError as error:
                death = str(error)
                worker = self._new(worker.place)
                self._at[run.label] = worker
        return RunError(
            f"{run.label}: the process that carried it out was ended from outside ({death}), perhaps because "
            "memory was short; the same command resumes where it stopped"
        )

    def wait(self, seconds: float) -> None:
        """Wait before a run is tried again; StoppedError: the pool was closed."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, seconds):
                raise StoppedError

    def held_by(self, label: str) -> int:
        """Return the bytes of a run's process and its workers; 0 before it has one."""
        worker = self._at.get(label)
        return 0 if worker is None else memory.resident(worker.number)

    def held_idle(self) -> int:
        """Return the bytes of the process that gets the next run; 0 if it must be started."""
        with self._changed:
            return memory.resident(self._idle[-1].number) if self._idle else 0

    def close(self) -> None:
        """End the processes; their runs can be resumed from disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in self._all:
                worker.end()

    def _take(self, label: str) -> _Worker:
        """Return a process for a run: an idle one, a new one, or the first to become idle."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._idle or len(self._all) < self._size)
            free = set(range(self._size)) - {worker.place for worker in self._all}
            self._at[label] = self._idle.pop() if self._idle else self._new(min(free, default=0))
            return self._at[label]

    def _new(self, place: int) -> _Worker:
        """Start a process, under the lock: else it would survive a concurrent `close`."""
        with self._changed:
            if self._closed:
                raise StoppedError
            worker = _Worker(place)
            self._all = [other for other in self._all if other.place != place] + [worker]
        return worker


class _DiedError(Exception):
    """A worker's process has ended."""


class _Worker:
    """A process of the pool."""

    def __init__(self, place: int) -> None:
        self.place = place
        self._process = WorkerProcess(_work, place, source(sys.argv, os.environ)["name"])
        self._pipe, self.number = self._process.pipe, self._process.pid

    def carry_out(self, run: PlacedRun, watcher: Watcher, prune: Prune | None) -> ProtoflError | None:
        with self._alive():
            self._pipe.send(_as_values(run))
        while True:
            with self._alive():  # only around this pipe: a watcher has its own
                kind, *content = self._pipe.recv()
            if kind == "ended":
                error, is_system = content
                if is_system:
                    error.__cause__ = OSError(str(error))  # for is_of_the_machine: pickle drops the cause
                return error
            getattr(watcher, kind)(*content)
            if kind == "round" and prune is not None and prune(content[0]):
                with self._alive():
                    self._pipe.send(_STOP)

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise _DiedError(self._process.exit_status(_SECONDS_TO_DIE)) from error

    def end(self) -> None:
        self._process.join(terminate=True)


def _as_values(run: PlacedRun) -> dict[str, Any]:
    """Return a run as plain values: the worker rebuilds it after loading its plug-ins."""
    return {
        "config": run.config.to_mapping(),
        "folders": [str(run.inputs.prepared), str(run.inputs.partition), str(run.directory)],
        "others": [run.hash, run.code, run.label, run.restart],
    }


def run_error(cause: Exception) -> RunError:
    """Return the error of a run that failed by another one, such as that of a full disk or a read-only folder."""
    if isinstance(cause, OSError):
        text = f"{cause.filename or 'a file'}: {cause.strerror or cause}; mend that, and repeat the command to resume"
    else:
        text = f"{type(cause).__name__}: {cause}"
    error = RunError(text, "".join(traceback.format_exception(cause)))
    error.__cause__ = cause
    return error


# ---- in the worker -----------------------------------------------------------------------------------------------


def _work(pipe: Connection, place: int, command: str) -> None:
    """Train runs of a command until the pipe closes."""
    sys.argv = command.split()  # the recorded source of its runs
    end_with_parent(pipe)
    import torch

    torch.set_num_threads(1)
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        torch.cuda.set_device(place % torch.cuda.device_count())
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        if message == _STOP:  # for a run that has just ended
            continue
        try:
            run = _run_of(message)
        except ProtoflError as raised:  # a plug-in was edited since
            pipe.send(_ended(raised))
        else:
            _carry_out(run, pipe)


def _run_of(values: Mapping[str, Any]) -> PlacedRun:
    prepared, partition, directory = map(Path, values["folders"])
    config = Config.from_mapping(values["config"])
    return PlacedRun(config, Inputs(prepared, partition), directory, *values["others"])


def _carry_out(run: PlacedRun, pipe: Connection) -> None:
    """Train one run; send its rounds and its end through the pipe."""
    rounds = run.config.federation.rounds

    def on_round(number: int, record: Mapping[str, Any] | None) -> None:
        told = None if record is None else {key: record[key] for key in _TOLD if key in record}
        pipe.send(("round", run.label, number, told))
        if pipe.poll():
            pipe.recv()
            raise PrunedError(f"pruned after round {number}")

    # No energy meter: it would measure all parallel runs.
    observers = Observers(on_round, on_start=lambda done: pipe.send(("run", run.label, rounds, done)))
    error: ProtoflError | None = None
    try:
        carry_out(run, Cache.here(), observers=observers)
    except ProtoflError as raised:
        error = raised
    except Exception as raised:
        error = run_error(raised)
    pipe.send(_ended(error))


def _ended(error: ProtoflError | None) -> tuple[str, ProtoflError | None, bool]:
    """Return the message that ends a run: its error, of a type that every process knows, and whether the system's."""
    is_system = is_of_the_machine(error)
    if error is not None and type(error) not in _PLAIN:
        error = RunError(str(error), getattr(error, "details", ""))
    return "ended", error, is_system
