"""Stage *train*: all federated rounds of one run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from flcore.config import Config
from flcore.engine.checkpoint import Checkpoint, RunState
from flcore.engine.energy import machine_meter
from flcore.engine.local.choice import decide, default_cache
from flcore.engine.pool.executors import Executor, InlineExecutor
from flcore.engine.pool.process import local_pool, set_precision
from flcore.engine.pool.ray import ray_pool
from flcore.engine.pool.workers import worker_count
from flcore.engine.rounds import Observers, PlainSteps, Steps, run_rounds, single_thread
from flcore.errors import ConfigError
from flcore.experiment import Experiment
from flcore.records import save_record
from pipelines.environment import environment
from pipelines.files import RunFiles, read_json, sole_use, write_json, write_text


def train(
    config: Config,
    prepared: Path,
    partition: Path,
    directory: Path,
    *,
    steps: Steps | None = None,
    observers: Observers | None = None,
    replace: bool = False,
    on_start: Callable[[Experiment], None] = lambda experiment: None,
) -> bool:
    """Run, or go on with, one run in ``directory``.

    Args:
        config: the run. prepared, partition: artefacts of the earlier stages.
        directory: the run directory.
        steps: how the pieces of a round are carried out; default: plain calls.
        observers: who is told of progress.
        replace: drop another run that lies in ``directory``, instead of refusing.
        on_start: called once data and model are there and the run's name is known.

    Returns:
        False if the run had already finished there and nothing was done.

    Raises:
        ConfigError: the directory holds another run and ``replace`` is False.
        RunError: training failed, or another process is at work in ``directory``.
    """
    single_thread()
    set_precision(config.engine.precision)
    experiment = Experiment.open(config, prepared, partition)
    files = RunFiles(directory)
    with sole_use(directory):
        if is_finished(files.directory, experiment.hash):
            return False
        experiment = _claim(files, experiment, replace)
        on_start(experiment)
        checkpoint = Checkpoint(files.checkpoint)
        executor = _executor(experiment, prepared, partition, checkpoint)
        try:
            state = run_rounds(
                experiment,
                checkpoint,
                executor,
                steps or PlainSteps(worker_count(config.engine)),
                observers or Observers(meter=machine_meter(config.engine.device)),
            )
        finally:
            executor.close()
        _finish(files, experiment, checkpoint, state)
    return True


def is_finished(directory: Path, run_hash: str) -> bool:
    """Whether the run of this hash has finished in a directory."""
    files = RunFiles(directory)
    return files.history.exists() and files.config.exists() and read_json(files.config).get("config_hash") == run_hash


def refuse_other_run(config: Config, directory: Path) -> None:
    """Stop before anything is written where a folder holds a run of another configuration.

    Raises:
        ConfigError: it does.
    """
    files = RunFiles(directory)
    if not files.config.exists():
        return
    described, wanted = read_json(files.config), json.loads(json.dumps(config.to_mapping()))
    # Files elsewhere may hold other images under the same configuration; whether they do, only reading them would tell.
    places = (("data", "root"), ("partition", "path"))
    moved = any(described["config"][section].get(key) != wanted[section].get(key) for section, key in places)
    if moved or described["identity"] != json.loads(json.dumps(config.identity())):
        raise ConfigError(
            f"{directory}: holds a run with another configuration or other files; "
            "choose another --out, or delete that folder"
        )


def _claim(files: RunFiles, experiment: Experiment, replace: bool) -> Experiment:
    """Make the directory this run's own; returns the experiment with ``engine.stack: auto`` decided."""
    if not replace:
        refuse_other_run(experiment.config, files.directory)
        if files.config.exists() and read_json(files.config)["config_hash"] != experiment.hash:
            raise ConfigError(
                f"{files.directory}: holds a run on other data; choose another --out, or delete that folder"
            )
    files.directory.mkdir(parents=True, exist_ok=True)
    decision = _stack_decision(files, experiment)
    for path in (files.history, files.metrics, files.report):
        path.unlink(missing_ok=True)
    described = {
        "config": experiment.config.to_mapping(),
        "identity": experiment.config.identity(),
        "config_hash": experiment.hash,
        "environment": environment(experiment.config),
        "stack": decision,
    }
    write_json(files.config, described)
    return dataclasses.replace(experiment, stack=None if decision is None else decision["stack"])


def _stack_decision(files: RunFiles, experiment: Experiment) -> dict[str, Any] | None:
    """With ``engine.stack: auto`` the decision this run began with, else one found or measured now."""
    if experiment.config.engine.stack != "auto":
        return None
    if files.config.exists() and files.checkpoint.exists():
        described = read_json(files.config)
        if described["config_hash"] == experiment.hash and described.get("stack"):
            return dict(described["stack"])
    return dict(vars(decide(experiment, default_cache())))


def _executor(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> Executor:
    engine = experiment.config.engine
    if engine.name == "ray":
        return ray_pool(experiment, prepared, partition, checkpoint)
    if worker_count(engine) == 0:
        return InlineExecutor(experiment, checkpoint)
    return local_pool(experiment, prepared, partition, checkpoint)


def _finish(files: RunFiles, experiment: Experiment, checkpoint: Checkpoint, state: RunState) -> None:
    """Turn the last checkpoint into the run's results; repeated after a kill in the middle, it gives the same files."""
    model = experiment.method.global_model(state.server, experiment.setting)
    tensors = {} if model is None else {**model.params, **model.buffers}
    temporary = files.model.with_name(".model.tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    temporary.replace(files.model)
    save_record(files.server, state.server)
    shutil.rmtree(files.clients, ignore_errors=True)
    files.clients.mkdir()
    for client in sorted(state.memories):
        save_record(files.clients / f"{client:04d}.safetensors", checkpoint.memory(client, state.memories))
    rounds = checkpoint.records("timing.jsonl")
    seconds, joules = _sums(rounds, "seconds"), _sums(rounds, "joules")
    speed = state.steps / seconds["train-clients"] if seconds.get("train-clients") else None
    write_json(
        files.timing, {"rounds": rounds, "seconds": seconds, "steps_per_second": speed, "joules": joules or None}
    )
    write_text(files.history, (files.checkpoint / "history.jsonl").read_text())
    shutil.rmtree(files.checkpoint)


def _sums(rounds: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    """Seconds or joules of all rounds by phase."""
    sums: dict[str, float] = {}
    for record in rounds:
        for phase, spent in record[kind].items():
            sums[phase] = sums.get(phase, 0.0) + spent
    return sums
