"""Workers as Ray actors: on this machine, or on a cluster that shares no disk with it.

An actor takes one CPU and a share of a GPU, loads the data once and lives as long as the run. Data are sent only to
nodes without them. Each group is sent its clients' messages and states; replies and new states come back. The bytes are
equal to the local pool's. Only this module imports Ray, when it is used.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flcore.config.plugins import brought
from flcore.config.schema import Config
from flcore.config.sections import EngineConfig
from flcore.core import loaded_code, portable
from flcore.core.errors import ConfigError, RunError
from flcore.core.text import shorten
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.failures import LocatedError, pack_error, unpack_error
from flcore.engine.pool.executors import PoolExecutor, Receive, WorkerHandle, WorkerLostError
from flcore.engine.pool.task import Request, Worker
from flcore.experiment.experiment import Experiment
from flcore.io.files import replace_file
from flcore.io.records import Payloads, pack_records, unpack_records

logger = logging.getLogger(__name__)

_SECONDS_TO_LEAVE = 5.0  # for an idle actor to remove its folder, before it is killed
_SECONDS_FOR_ROOM = 60.0  # to wait for resources of others, such as a run that has just ended

Files = Mapping[str, bytes]


def ray_pool(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> PoolExecutor:
    """A pool of Ray actors.

    Raises:
        ConfigError: Ray is not installed, there is no cluster at ``engine.ray_address``, or it has too few CPUs or GPUs
            for ``engine.workers``.
        RunError: others hold them for longer than a minute.
    """
    ray = _connect(experiment.config)
    engine = experiment.config.engine
    _wait_for_room(ray, engine)
    shared = _Shared(ray, {"prepared": prepared, "partition": partition})
    actor = ray.remote(num_cpus=1, num_gpus=engine.gpus_per_worker, max_restarts=0)(RayWorker)
    config = experiment.config.to_mapping()
    plugins = {plugin.module: plugin.source for plugin in experiment.config.plugins}

    def start(number: int) -> WorkerHandle:
        return _Actor(ray, actor.remote(number, config, plugins, loaded_code.digests()), shared)

    return PoolExecutor(start, engine.worker_count, experiment, checkpoint)


def _connect(config: Config) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        from ray.job_config import JobConfig
    except ImportError as error:
        raise ConfigError("engine.name = ray: Ray is not installed; pip install 'protofl[ray]'") from error
    # Ray adds the script's folder and the working folder to its actors' search path unless this returns a true value.
    # `object` does, and can be pickled.
    # Workers of a cluster import numpy before flcore could choose its kernels.
    chosen = {name: os.environ[name] for name in portable.SETTINGS if name in os.environ}
    job = JobConfig(runtime_env={"env_vars": chosen} if config.engine.ray_address else None)
    assert hasattr(job, "_runtime_env_has_working_dir"), "this version of Ray asks another method"
    job._runtime_env_has_working_dir = object  # type: ignore[method-assign]
    engine = config.engine
    if not ray.is_initialized():
        try:
            if engine.ray_address is None:
                cpus = max(engine.worker_count, os.cpu_count() or 1)
                ray.init(num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR, job_config=job)
            else:
                ray.init(address=engine.ray_address, logging_level=logging.ERROR, job_config=job)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"engine.ray_address = {engine.ray_address}: no Ray cluster answers there ({error})"
            ) from error
        except OSError as error:
            if "AF_UNIX" not in str(error):
                raise
            raise ConfigError(
                f"TMPDIR = {shorten(tempfile.gettempdir())}: too long a path for Ray's sockets; set TMPDIR to a path "
                "under 60 characters"
            ) from error
    return ray


def _wait_for_room(ray: Any, engine: EngineConfig) -> None:
    """Refuse more actors than CPUs or shares of GPUs: with Ray the last ones would wait for ever."""
    workers = engine.worker_count
    needs = {"CPU": 1.0} | ({"GPU": engine.gpus_per_worker} if engine.gpus_per_worker else {})
    for kind, each in needs.items():
        total = ray.cluster_resources().get(kind, 0)
        most = _fitting(total, each)
        if most < workers:
            raise ConfigError(
                f"engine.workers = {workers}: Ray has {total:g} {kind}s, and each worker takes {each:g}; set "
                f"engine.workers={max(most, 1)}, add nodes, or begin a new process (Ray keeps its first resources)"
            )
    deadline, warned = time.monotonic() + _SECONDS_FOR_ROOM, False
    for kind, each in needs.items():
        while _fitting(free := ray.available_resources().get(kind, 0), each) < workers:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise RunError(
                    f"engine.workers = {workers}: of Ray's {ray.cluster_resources().get(kind, 0):g} {kind}s {free:g} "
                    f"are free after {_SECONDS_FOR_ROOM:g} s; end what holds the others, or set "
                    f"engine.workers={max(_fitting(free, each), 1)}"
                )
            if not warned and seconds < _SECONDS_FOR_ROOM - 1:
                warned = True
                logger.warning(
                    "engine.workers = %d: %g of Ray's %ss are free; waiting for the others", workers, free, kind
                )
            time.sleep(min(0.05, seconds))


def _fitting(resource: float, each: float) -> int:
    """Return the number of workers that fit; a share is on one GPU."""
    if each < 1:
        return int(resource) * int(1 / each + 1e-9) + int((resource % 1) / each + 1e-9)
    return int(resource / each + 1e-9)


class _Shared:
    """Inputs of all actors, put into Ray's object store once."""

    def __init__(self, ray: Any, folders: Mapping[str, Path]) -> None:
        self.folders = folders
        self._ray, self._lock = ray, threading.Lock()

    @cached_property
    def descriptions(self) -> dict[str, Files]:
        """Description files by folder; small."""
        return {name: _content(sorted(folder.glob("*.json"))) for name, folder in self.folders.items()}

    def data(self) -> Any:
        """Return a reference to all files, for nodes without them."""
        with self._lock:
            return self._data

    @cached_property
    def _data(self) -> Any:
        files = {name: [path for path in folder.iterdir() if path.is_file()] for name, folder in self.folders.items()}
        return self._ray.put({name: _content(paths) for name, paths in files.items()})


def _content(paths: Iterable[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths}


class _Actor(WorkerHandle):
    def __init__(self, ray: Any, actor: Any, shared: _Shared) -> None:
        self._ray, self._actor, self._shared = ray, actor, shared
        self._has_data, self._stopped = False, False
        self._at_work = threading.Lock()
        self._closing: Any = None
        self._kill_at = 0.0

    def run(self, request: Request, records: Sequence[Payloads], receive: Receive) -> None:
        with self._at_work:
            self._run(request, records, receive)

    def _run(self, request: Request, records: Sequence[Payloads], receive: Receive) -> None:
        if not self._has_data:
            shared = self._shared
            folders = {name: str(folder.absolute()) for name, folder in shared.folders.items()}
            if not self._get(self._actor.find_data.remote(folders, shared.descriptions)):
                self._get(self._actor.take_data.remote([shared.data()]))
            self._has_data = True
        packed, pieces = pack_records(records)
        error, results = self._get(self._actor.run.remote(request, packed, b"".join(pieces)))
        for packed, values in results:
            receive(packed, _bytes_in(values))
        if error is not None:
            raise unpack_error(error)

    def _get(self, request: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(request)
        except errors.RayTaskError as error:
            first = next(iter(str(error.cause).splitlines()), "")
            raise LocatedError(f"a Ray actor: {type(error.cause).__name__}: {first}", str(error)) from error
        except errors.RayError as error:
            if not self._stopped:
                print(error, file=sys.stderr)
            raise WorkerLostError(f"as Ray says: {type(error).__name__}") from error

    def stop(self) -> None:
        self._stopped = True
        if self._at_work.acquire(blocking=False):
            self._closing, self._kill_at = self._actor.close.remote(), time.monotonic() + _SECONDS_TO_LEAVE
            self._at_work.release()
        else:
            self._ray.kill(self._actor)  # a request would wait for its work

    def join(self) -> None:
        if self._closing is not None:
            self._ray.wait([self._closing], timeout=max(0.0, self._kill_at - time.monotonic()))
        self._ray.kill(self._actor)


def _write(directory: Path, files: Files) -> None:
    """Write files below a directory, each atomically."""
    for name in sorted(files):
        content = files[name]
        replace_file(directory / name, lambda file, content=content: file.write(content))  # type: ignore[misc]


def _bytes_in(values: bytes) -> Tensor:
    """Return uint8 [n]; a copy, since Ray's memory is read-only."""
    return torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)


class RayWorker:
    """The worker in an actor."""

    def __init__(self, number: int, config: Mapping[str, Any], plugins: Files, digests: Mapping[str, str]) -> None:
        """Keep the arguments; the first request loads the data."""
        loaded_code.compare_with_parent(digests)
        self._config, self._plugins = config, plugins
        self._worker = Worker(number, self._load)
        self._folder = tempfile.TemporaryDirectory(prefix="protofl-ray-")
        self._root = Path(self._folder.name)
        self._data: Mapping[str, Path] = {}

    def close(self) -> None:
        """Remove the worker's folder, which a kill leaves."""
        self._folder.cleanup()

    def find_data(self, folders: Mapping[str, str], descriptions: Mapping[str, Files]) -> bool:
        """Return whether this node's disk has folders with the same description files."""
        self._data = {name: Path(folder) for name, folder in folders.items()}
        return all(_is_described(folder, descriptions[name]) for name, folder in self._data.items())

    def take_data(self, reference: Sequence[Any]) -> None:
        """Write the sent folders to this node's disk."""
        import ray

        self._data = {name: self._root / name for name in self._data}
        for name, files in ray.get(reference[0]).items():
            _write(self._data[name], files)

    def run(
        self, request: Request, packed: Mapping[str, Any], values: bytes
    ) -> tuple[dict[str, Any] | None, list[tuple[dict[str, Any], bytes]]]:
        """Run a request.

        Args:
            request: what to do. packed, values: its records.

        Returns:
            An error or None, and packed results.
        """
        error = None
        results: list[tuple[dict[str, Any], bytes]] = []

        def send(packed: dict[str, Any], pieces: list[memoryview]) -> None:
            results.append((packed, b"".join(pieces)))

        try:
            self._worker.run(request, unpack_records(packed, _bytes_in(values)), lambda: False, send)
        except Exception as raised:
            error = pack_error(raised)
        return error, results

    def _load(self) -> Experiment:
        config = Config.from_mapping(brought(self._config, self._plugins, self._root))
        return Experiment.open(config, self._data["prepared"], self._data["partition"])


def _is_described(folder: Path, description: Files) -> bool:
    return bool(description) and all(
        (folder / name).is_file() and (folder / name).read_bytes() == content for name, content in description.items()
    )
