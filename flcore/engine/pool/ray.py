"""Workers as Ray actors: on this machine, or on a cluster that shares no disk with it.

An actor asks for one CPU and a share of a GPU, loads the data once and lives as long as the run. The state travels once
per leg and node through Ray's object store; a client's memory goes with its task, its reply and new memory come back
and are written here. The bytes are those of the local pool. Ray is imported here alone, and only when it is used.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flcore.config import Config
from flcore.engine.checkpoint import Checkpoint, RunState
from flcore.engine.client import Worker
from flcore.engine.pool.executors import PoolExecutor, Task, WorkerHandle, WorkerLostError, train_task
from flcore.engine.pool.process import prepare_process
from flcore.engine.pool.workers import worker_count
from flcore.errors import ConfigError, ProtoflError, RunError
from flcore.experiment import Experiment

Files = Mapping[str, bytes]


def ray_pool(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> PoolExecutor:
    """A pool of Ray actors.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at ``engine.ray_address``.
    """
    ray = _connect(experiment.config)
    shared = _Shared(ray, checkpoint)
    data = ray.put({"prepared": _read_folder(prepared), "partition": _read_folder(partition)})
    engine = experiment.config.engine
    actor = ray.remote(num_cpus=1, num_gpus=engine.gpus_per_worker, max_restarts=0)(RayWorker)
    arguments = (experiment.config.to_mapping(), experiment.stacked, str(prepared), str(partition))

    def start(place: int) -> WorkerHandle:
        return _Actor(ray, actor.remote(place, *arguments, [data]), shared)

    return PoolExecutor(start, worker_count(engine), experiment, checkpoint)


def _connect(config: Config) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engine.name = ray: Ray is not installed; pip install 'protofl[ray]'") from error
    engine = config.engine
    if not ray.is_initialized():
        try:
            if engine.ray_address is None:
                cpus = max(worker_count(engine), os.cpu_count() or 1)
                ray.init(num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR)
            else:
                ray.init(address=engine.ray_address, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"engine.ray_address = {engine.ray_address}: no Ray cluster answers there ({error})"
            ) from error
    return ray


def _read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


class _Shared:
    """The state of the leg under way in Ray's object store, put there once for all actors."""

    def __init__(self, ray: Any, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._ray, self._lock = ray, threading.Lock()
        self._legs, self._reference = -1, None

    def state(self, legs: int) -> Any:
        """A reference to the committed state's bytes."""
        with self._lock:
            if self._legs != legs:
                self._reference = self._ray.put(self.checkpoint.state_file.read_bytes())
                self._legs = legs
            return self._reference


class _Actor(WorkerHandle):
    def __init__(self, ray: Any, actor: Any, shared: _Shared) -> None:
        self._ray, self._actor, self._shared = ray, actor, shared

    def train(self, state: RunState, task: Task) -> None:
        checkpoint, leg = self._shared.checkpoint, state.legs + 1
        missing = [
            list(stack)
            for stack in task
            if any(checkpoint.load_reply(leg, client, state.run) is None for client in stack)
        ]
        if not missing:
            return
        memories = {
            path.relative_to(checkpoint.directory).as_posix(): path.read_bytes()
            for stack in missing
            for client in stack
            if client in state.memories
            for path in (checkpoint.memory_file(client, state.memories[client]),)
        }
        request = self._actor.train.remote(state.legs, [self._shared.state(state.legs)], memories, missing)
        try:
            failure, files = self._ray.get(request)
        except self._ray.exceptions.RayError as error:
            # The actor died, or something nobody foresaw went wrong in it: said as a process of the local pool says it.
            print(error, file=sys.stderr)
            raise WorkerLostError from error
        _write(checkpoint.directory, files)
        if failure is not None:
            raise RunError(failure)

    def end(self) -> None:
        self._ray.kill(self._actor)


def _write(directory: Path, files: Files) -> None:
    """Put files below a directory, each all or nothing, memories before the replies that name them."""
    for name in sorted(files):  # clients/... comes before legs/...
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            file.write(files[name])
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


class RayWorker:
    """What runs in an actor: a worker with a checkpoint folder of its own."""

    def __init__(
        self, place: int, config: Mapping[str, Any], stacked: bool, prepared: str, partition: str, data: Sequence[Any]
    ) -> None:
        """Load the data, from this node's disk where the same files lie there, else as they were sent."""
        import ray

        run_config = Config.from_mapping(config)
        prepare_process(place, run_config.engine.precision)
        self._folder = tempfile.TemporaryDirectory(prefix="protofl-ray-")
        root = Path(self._folder.name)
        sent: Mapping[str, Files] = ray.get(data[0])
        folders = {
            "prepared": _found_or_written(Path(prepared), root / "prepared", sent["prepared"]),
            "partition": _found_or_written(Path(partition), root / "partition", sent["partition"]),
        }
        del sent
        experiment = Experiment.open(run_config, folders["prepared"], folders["partition"], stack=stacked)
        self._worker = Worker(experiment)
        self._checkpoint = Checkpoint(root / "checkpoint")
        (self._checkpoint.directory / "clients").mkdir(parents=True)
        self._state: RunState | None = None

    def train(
        self, legs: int, reference: Sequence[Any], memories: Files, task: Task
    ) -> tuple[str | None, dict[str, bytes]]:
        """Train a task in the leg after ``legs``: what went wrong, and the files of replies and memories."""
        import ray

        checkpoint = self._checkpoint
        if self._state is None or self._state.legs != legs:
            _write(checkpoint.directory, {checkpoint.state_file.name: ray.get(reference[0])})
            self._state = checkpoint.read_state()
        _write(checkpoint.directory, memories)
        failure = None
        try:
            train_task(self._worker, checkpoint, self._state, task)
        except ProtoflError as error:
            failure = str(error)
        files: dict[str, bytes] = {}
        for path in sorted(checkpoint.directory.rglob("*.*")):
            name = path.relative_to(checkpoint.directory).as_posix()
            if path == checkpoint.state_file or not path.is_file():
                continue
            if name not in memories:
                files[name] = path.read_bytes()
            path.unlink()  # the next task brings its own
        return failure, files


def _found_or_written(here: Path, copy: Path, sent: Files) -> Path:
    """A folder of this node with the same description files as those sent, else a copy of what was sent."""
    described = [name for name in sent if name.endswith(".json")]
    if described and all((here / name).is_file() and (here / name).read_bytes() == sent[name] for name in described):
        return here
    _write(copy, sent)
    return copy
