"""Workers as processes of this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from flcore.config import Config
from flcore.engine.checkpoint import Checkpoint, RunState
from flcore.engine.client import Worker
from flcore.engine.pool.executors import PoolExecutor, Task, WorkerHandle, WorkerLostError, train_task
from flcore.engine.pool.workers import worker_count
from flcore.errors import ProtoflError, RunError
from flcore.experiment import Experiment


def local_pool(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> PoolExecutor:
    """A pool of processes on this machine.

    Only ids go through the pipes: a worker reads the committed state from disk, once a leg, and writes its replies
    there. The data are mapped from the prepared files, so all processes share their pages.
    """
    config = experiment.config
    # Not fork: the parent has threads (and perhaps CUDA), which a forked child inherits in an unknown state.
    context = multiprocessing.get_context("spawn")
    arguments = (config.to_mapping(), experiment.stacked, str(prepared), str(partition), str(checkpoint.directory))
    return PoolExecutor(
        lambda place: _Process(context, (place, *arguments)), worker_count(config.engine), experiment, checkpoint
    )


class _Process(WorkerHandle):
    def __init__(self, context: Any, arguments: tuple[Any, ...]) -> None:
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def train(self, state: RunState, task: Task) -> None:
        try:
            self._pipe.send((state.legs, [list(stack) for stack in task]))
            failure = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerLostError from error
        if failure is not None:
            raise RunError(failure)

    def end(self) -> None:
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    pipe: Connection,
    place: int,
    config: Mapping[str, Any],
    stacked: bool,
    prepared: str,
    partition: str,
    folder: str,
) -> None:
    """A worker's life: load, then answer requests until the parent is gone.

    What the user can mend goes back as a message; anything else ends the process, with its traceback on standard error.
    """
    run_config, checkpoint = Config.from_mapping(config), Checkpoint(Path(folder))
    prepare_process(place, run_config.engine.precision)
    worker: Worker | None = None
    state: RunState | None = None
    while True:
        try:
            legs, task = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        failure = None
        try:
            if worker is None:
                worker = Worker(Experiment.open(run_config, Path(prepared), Path(partition), stack=stacked))
            if state is None or state.legs != legs:
                state = checkpoint.read_state()
            train_task(worker, checkpoint, state, task)
        except ProtoflError as error:
            failure = str(error)
        try:
            pipe.send(failure)
        except OSError:
            return  # the parent is gone; what was trained lies on the disk


def set_precision(name: str) -> None:
    """Let this process's float32 matrix products run as TF32 where ``engine.precision`` is ``tf32``, else exactly."""
    tf32 = name == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def prepare_process(place: int, precision: str) -> None:
    """One intra-op thread; and of several GPUs the one that falls to this worker."""
    torch.set_num_threads(1)
    set_precision(precision)
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        torch.cuda.set_device(place % torch.cuda.device_count())
