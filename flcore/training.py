"""All rounds of one run, from prepared data and a partition to the run's results on disk."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flcore.config import plugins
from flcore.config.schema import Config
from flcore.core.cpu_class import processor_class
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.energy import machine_meter
from flcore.engine.local.choice import EngineDecision, decide
from flcore.engine.numerics import set_numerics, single_thread
from flcore.engine.orchestrator import InlineOrchestrator, Orchestrator
from flcore.engine.pool.executors import Executor, InlineExecutor
from flcore.engine.pool.process import local_pool
from flcore.engine.pool.ray import ray_pool
from flcore.engine.pool.workers import worker_count
from flcore.engine.rounds import Observers, run_name, run_rounds
from flcore.engine.run_state import RunState
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import code_fingerprint, library_fingerprint, refuse_edited_code
from flcore.experiment.run_folder import (
    RunFiles,
    forget_results,
    holds_run,
    is_finished,
    on_other_data,
    read_run_config,
    refuse_other_run,
    write_result,
    write_text,
)
from flcore.io import disk
from flcore.io.files import make_durable, remove_stale_temp, sealed, write_tensors
from flcore.io.locks import run_lock
from flcore.io.records import save_record

_PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "scipy", "safetensors")


def train(
    config: Config,
    prepared: Path,
    partition: Path,
    directory: Path,
    *,
    orchestrator: Orchestrator | None = None,
    observers: Observers | None = None,
    replace: bool = False,
    restart: bool = False,
    about: Mapping[str, Any] | None = None,
    held: bool = False,
) -> bool:
    """Run, or go on with, all rounds of one run in ``directory``.

    Args:
        config: the run. prepared, partition: artefacts of the earlier steps.
        directory: the run directory.
        orchestrator: how the pieces of a round are carried out; None: plain calls.
        observers: who is told of progress.
        replace: drop another run that lies in ``directory``, instead of refusing.
        restart: throw away a checkpoint that cannot be used.
        about: what ``config.json`` says of machine and code; None: :func:`environment`.
        held: the caller holds the folder's lock (:func:`flcore.io.locks.sole_use`).

    Returns:
        False if the run had already finished there and nothing was done.

    Raises:
        ConfigError: the directory holds another run and ``replace`` is False.
        RunError: training failed, another process is at work in ``directory``, or a file of the run's code was edited.
    """
    refuse_edited_code(config)
    single_thread()
    set_numerics(config.engine.precision)
    experiment = Experiment.open(config, prepared, partition)
    files = RunFiles(directory)
    with nullcontext() if held else run_lock(directory):
        remove_stale_temp(directory)
        experiment.dataset.check_content(prepared)  # also for whoever evaluates what has finished
        if is_finished(files.directory, experiment.hash):
            disk.remove_tree(files.checkpoint)  # where a process was killed when all but this was done
            return False
        # What another run left may go, if the caller says so; this run's own checkpoint only goes by `restart`. It goes
        # before the folder is this run's: a kill between the two leaves one that the same call still replaces.
        if replace and files.config.exists() and read_run_config(directory)["config_hash"] != experiment.hash:
            disk.remove_tree(files.checkpoint)
        checkpoint = Checkpoint(files.checkpoint, durable_every=config.engine.durable_every)
        if not restart and holds_run(files.directory, experiment.hash):
            checkpoint.refuse_other(run_name(experiment))
        experiment = _claim(files, experiment, replace, describe_environment(config) if about is None else about)
        executor = _executor(experiment, prepared, partition, checkpoint)
        try:
            state = run_rounds(
                experiment,
                checkpoint,
                executor,
                orchestrator or InlineOrchestrator(worker_count(config.engine)),
                observers or Observers(meter=machine_meter(config.engine.device)),
                restart=restart,
            )
        finally:
            executor.close()
        _finish(files, experiment, checkpoint, state)
    return True


def describe_environment(config: Config) -> dict[str, Any]:
    """What this process runs on, as JSON values: Python, packages, class of processor, device, code."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": package_versions(_PACKAGES),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_class(),
        "device": torch.cuda.get_device_name() if config.engine.device == "cuda" else "cpu",
        "engine": config.engine.name,
        "workers": worker_count(config.engine),
        "code_hash": library_fingerprint(),
    }


def package_versions(names: Sequence[str]) -> dict[str, str | None]:
    """The installed version of each package; None where it is not there."""
    return {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _claim(files: RunFiles, experiment: Experiment, replace: bool, about: Mapping[str, Any]) -> Experiment:
    """Make the directory this run's own.

    Returns:
        The experiment, with how clients are trained decided and with the folder's copies of its plug-ins.
    """
    before = read_run_config(files.directory) if files.config.exists() else {}
    is_own = before.get("config_hash") == experiment.hash  # then it does not matter where its data lie now
    if not replace and not is_own:
        refuse_other_run(experiment.config, files.directory)
        if before:
            raise on_other_data(files.directory)
    code = code_fingerprint(experiment.config)
    goes_on = is_own and before.get("code") == code and files.checkpoint.exists()
    earlier = _earlier_environments(before, about) if goes_on else []
    disk.make_folder(files.directory)
    decision = _decision(files, experiment)
    config = dataclasses.replace(experiment.config, plugins=plugins.keep(experiment.config.plugins, files.directory))
    forget_results(files.directory)
    mapping = config.to_mapping()
    del mapping["tracking"]  # says who watches, and may hold a password
    if config.plugins:  # a folder may be moved
        places = [Path(entry["path"]).relative_to(files.directory.absolute()) for entry in mapping["plugins"]]
        entries = zip(mapping["plugins"], places, strict=True)
        mapping["plugins"] = [{**entry, "path": place.as_posix()} for entry, place in entries]
    content = {
        "config": mapping,
        "identity": config.identity(),
        "config_hash": experiment.hash,
        "code": code,
        "environment": dict(about),
        "decision": vars(decision),
        **({"earlier_environments": earlier} if earlier else {}),
    }
    write_result(files.config, sealed(content), durable=True)  # a checkpoint is nobody's without it
    return dataclasses.replace(experiment, config=config, choice=decision.choice)


def _earlier_environments(before: Mapping[str, Any], about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """On what else a run was trained that goes on here: its last bits are of no single machine then."""
    last = before.get("environment", about)
    moved = any(last.get(key) != about.get(key) for key in ("processor", "device", "versions"))
    return [*before.get("earlier_environments", ()), *([last] if moved else [])]


def _decision(files: RunFiles, experiment: Experiment) -> EngineDecision:
    """How clients are trained: as this run began, or as is configured, found or measured now."""
    if files.config.exists() and files.checkpoint.exists():
        before = read_run_config(files.directory)
        known = before.get("decision")
        if before["config_hash"] == experiment.hash and isinstance(known, dict):
            return EngineDecision.restored(known)
    return decide(experiment)


def _executor(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> Executor:
    engine = experiment.config.engine
    if engine.name == "ray":
        return ray_pool(experiment, prepared, partition, checkpoint)
    if worker_count(engine) == 0:
        return InlineExecutor(experiment, checkpoint)
    return local_pool(experiment, prepared, partition, checkpoint)


def _finish(files: RunFiles, experiment: Experiment, checkpoint: Checkpoint, state: RunState) -> None:
    """Turn the last checkpoint into the run's results; repeated after a kill in the middle, it gives the same files."""
    model = experiment.method.global_model(state.server)
    write_tensors(files.model, {} if model is None else model.values)
    save_record(files.server, state.server)
    disk.remove_tree(files.clients)
    disk.new_folder(files.clients)
    for client in sorted(state.client_states):
        save_record(files.clients / f"{client:04d}.safetensors", checkpoint.client_state(client, state.client_states))
    disk.remove_tree(files.snapshots)
    for number in sorted(set(experiment.config.evaluation.snapshots)):
        for name, record in checkpoint.snapshots.round(number).items():
            save_record(files.snapshot(number, name), record)
    rounds = checkpoint.records("timing.jsonl")
    seconds, joules = _sums(rounds, "seconds"), _sums(rounds, "joules")
    # An exchange in which clients only answer takes time too, but none of it for training.
    training = sum(record["seconds"][record["leg"]] for record in rounds if record["steps"])
    speed = sum(record["steps"] for record in rounds) / training if training else None
    timing = {"rounds": rounds, "seconds": seconds, "steps_per_second": speed, "joules": joules or None}
    timing["clients"] = _by_client(rounds)
    times = {"began_ms": rounds[0]["began_ms"], "ended_ms": rounds[-1]["ended_ms"]}
    write_result(files.timing, {**timing, **times})
    # What says that the run has finished comes last, after a power failure too.
    make_durable([files.model, files.server, files.timing, *files.records()])
    write_text(files.history, (files.checkpoint / "history.jsonl").read_text(), durable=True)
    disk.remove_tree(files.checkpoint)


def _by_client(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return seconds by client, and joules where there is a meter: of each exchange the client's share of the seconds.

    A meter sees the processor, not who is at work on it, and workers are at work side by side.
    """
    found: dict[str, dict[str, float | None]] = {}
    for record in rounds:
        whole, joules = sum(record["clients"].values()), record["joules"].get(record["leg"])
        for client, seconds in record["clients"].items():
            own = found.setdefault(client, {"seconds": 0.0, "joules": None})
            own["seconds"] = (own["seconds"] or 0.0) + seconds
            if joules is not None and whole:
                own["joules"] = (own["joules"] or 0.0) + joules * seconds / whole
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def _sums(rounds: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    """Seconds or joules of all rounds by phase."""
    sums: dict[str, float] = {}
    for record in rounds:
        for phase, spent in record[kind].items():
            sums[phase] = sums.get(phase, 0.0) + spent
    return sums
