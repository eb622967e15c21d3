"""Whole runs side by side: long-lived processes that import once, each with one run at a time.

Runs of a comparison are independent, so filling the cores with runs wastes nothing, while workers inside a run wait for
one another at every round. A run's bytes do not depend on where, when or beside what it is carried out.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from flcore.config import Config
from flcore.engine.pool.groups import StoppedError
from flcore.engine.rounds import Observers
from flcore.errors import ConfigError, DataError, ProtoflError, RunError
from pipelines.execution.one_run import PlacedRun, carry_out
from pipelines.execution.progress import Watcher
from pipelines.runs import memory
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs

_TRIES = 2  # a process that was killed costs nothing but time: the run goes on where it was
_PLAIN = ("ConfigError", "DataError")
_TOLD = ("top1_global", "mean_local", "tasks")


class RunPool:
    """Processes that carry out runs; they end with this one, however it ends."""

    def __init__(self, size: int, watcher: Watcher) -> None:
        """Have so many at most, each of which is started when a run is the first one that needs it."""
        self._size, self._watcher = size, watcher
        self._idle: list[_Worker] = []
        self._at: dict[str, _Worker] = {}
        self._all: list[_Worker] = []
        self._changed = threading.Condition(threading.RLock())
        self._closed = False

    def __enter__(self) -> RunPool:
        """Use it until the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes."""
        self.close()

    def carry_out(self, run: PlacedRun, *, restart: bool = False) -> None:
        """Carry out a run and wait for its end; called from as many threads as there are processes.

        Raises:
            StoppedError: the pool was closed meanwhile.
            ProtoflError: as the run raised it; or RunError, its process was killed, twice.
        """
        worker = self._take(run.label)
        try:
            for attempt in range(1, _TRIES + 1):
                try:
                    worker.carry_out(run, self._watcher, restart=restart)
                    return
                except _DiedError as death:
                    worker = self._new(worker.place)
                    self._at[run.label] = worker
                    if attempt == _TRIES:
                        raise RunError(
                            f"{run.label}: the process that carried it out was ended from outside ({death}), perhaps "
                            "because memory was short; the same command goes on where it stopped"
                        ) from death
        finally:
            with self._changed:
                self._idle.append(self._at.pop(run.label))
                self._changed.notify()

    def held_by(self, label: str) -> int:
        """Bytes that the process of a run holds, its own workers included; 0 before it has one."""
        worker = self._at.get(label)
        return 0 if worker is None else memory.resident(worker.number)

    def held_idle(self) -> int:
        """Bytes that the process holds which takes the next run; 0 where it is still to be started."""
        with self._changed:
            return memory.resident(self._idle[-1].number) if self._idle else 0

    def close(self) -> None:
        """End them; what they were at stays on disk, to be gone on with."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in self._all:
                worker.end()

    def _take(self, label: str) -> _Worker:
        """A process for a run: one that is idle, a new one, or the first to become idle.

        Raises:
            StoppedError: the pool is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._idle or len(self._all) < self._size)
            self._at[label] = self._idle.pop() if self._idle else self._new(len(self._all))
            return self._at[label]

    def _new(self, place: int) -> _Worker:
        """Start a process; under the lock, or one that is started while the others are ended would outlive them.

        Raises:
            StoppedError: the pool is closed.
        """
        with self._changed:
            if self._closed:
                raise StoppedError
            worker = _Worker(place)
            self._all = [other for other in self._all if other.place != place] + [worker]
        return worker


class _DiedError(Exception):
    """A worker's process has ended."""


class _Worker:
    """One process, as the pool sees it."""

    def __init__(self, place: int) -> None:
        self.place = place
        context = multiprocessing.get_context("spawn")  # a fork would share threads and locks with this process
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(theirs, place), daemon=False)
        self._process.start()
        self.number = self._process.pid or 0
        theirs.close()

    def carry_out(self, run: PlacedRun, watcher: Watcher, *, restart: bool) -> None:
        """One run; what it tells of its rounds is handed on."""
        try:
            self._pipe.send(_as_values(run, restart))
            while True:
                kind, *content = self._pipe.recv()
                if kind == "done":
                    return
                if kind == "failed":
                    raise _error_of(*content)
                getattr(watcher, kind)(*content)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join(5)
            code = self._process.exitcode or 0
            raise _DiedError(signal.Signals(-code).name if code < 0 else f"exit code {code}") from error

    def end(self) -> None:
        """End the process, whatever it is at."""
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def _as_values(run: PlacedRun, restart: bool) -> dict[str, Any]:
    """A run as plain values: it is made again on the other side, where its plug-ins have to be loaded first."""
    return {
        "config": run.config.to_mapping(),
        "folders": [str(run.inputs.prepared), str(run.inputs.partition), str(run.directory)],
        "named": [run.hash, run.code, run.label],
        "restart": restart,
    }


def _error_of(kind: str, text: str, details: str) -> ProtoflError:
    return (
        {"ConfigError": ConfigError, "DataError": DataError}[kind](text) if kind in _PLAIN else RunError(text, details)
    )


# ---- in the worker -----------------------------------------------------------------------------------------------


def _work(pipe: Connection, place: int) -> None:
    """Carry out runs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    _end_with_parent()
    import torch

    torch.set_num_threads(1)
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        torch.cuda.set_device(place % torch.cuda.device_count())
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_outcome(job, pipe))


def _end_with_parent() -> None:
    """Leave at once when the parent has ended, in the middle of a run too."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _outcome(job: Mapping[str, Any], pipe: Connection) -> tuple[Any, ...]:
    config = Config.from_mapping(job["config"])
    prepared, partition, directory = map(Path, job["folders"])
    run = PlacedRun(config, Inputs(prepared, partition), directory, *job["named"])
    rounds = run.config.federation.rounds

    def on_round(number: int, record: Mapping[str, Any] | None) -> None:
        told = None if record is None else {key: record[key] for key in _TOLD if key in record}
        pipe.send(("round", run.label, number, told))

    # No meter: what the machine draws is that of all runs side by side.
    observers = Observers(on_round, on_start=lambda done: pipe.send(("run", run.label, rounds, done)))
    try:
        carry_out(run, Cache.here(), observers=observers, restart=job["restart"])
    except ProtoflError as error:
        kind = type(error).__name__ if type(error).__name__ in _PLAIN else "RunError"
        return "failed", kind, str(error), getattr(error, "details", "")
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return "failed", "RunError", f"{type(error).__name__}: {error}", trace
    return ("done",)
