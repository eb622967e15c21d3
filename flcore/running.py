"""A run from a configuration to a finished folder: prepare, divide, train, evaluate.

Each step is a function from files to files. A run that was killed at any moment resumes when it is called again, and
ends with the same bytes.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from flcore.config import plugins
from flcore.config.schema import Config
from flcore.config.stored import resolve_paths, without_removed
from flcore.core import portable
from flcore.core.cpu_class import processor_class
from flcore.core.errors import ConfigError, Cure, DataError, RunError
from flcore.core.text import shorten
from flcore.data.dataset import Dataset
from flcore.data.partition import Partition
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.energy import machine_meter
from flcore.engine.local.compiled import refuse_missing_compiler
from flcore.engine.numerics import alone, set_numerics, single_thread, tell_of_other_kernels
from flcore.engine.orchestrator import InlineOrchestrator, Orchestrator
from flcore.engine.pool.executors import Executor, InlineExecutor
from flcore.engine.pool.process import local_pool
from flcore.engine.pool.ray import ray_pool
from flcore.engine.rounds import Observers, run_name, run_rounds
from flcore.engine.run_state import RunState
from flcore.evaluation.scoring import Scorer
from flcore.evaluation.summaries import check_history, summarise_run
from flcore.experiment.experiment import Experiment
from flcore.experiment.inputs import divide, prepare_data
from flcore.experiment.provenance import code_fingerprint, library_fingerprint, package_versions, refuse_edited_code
from flcore.experiment.run_folder import (
    RunFiles,
    check_seal,
    finished_by_other_code,
    forget_damaged_results,
    forget_results,
    holds_run,
    is_finished,
    on_other_data,
    read_run_config,
    refuse_inside_a_run,
    refuse_other_run,
    result_text,
    seal,
    write_result,
    write_run_config,
    write_text,
)
from flcore.io import disk
from flcore.io.files import NOT_JSON, finite, make_durable, read_json, read_lines, remove_stale_temp, write_tensors
from flcore.io.locks import run_lock
from flcore.io.records import Record, load_record, save_record

_CURE = "delete the run's folder and run it again"
_PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "scipy", "safetensors")


def run(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    prepared: str | os.PathLike[str] | None = None,
    partition: str | os.PathLike[str] | None = None,
    orchestrator: Orchestrator | None = None,
    observers: Observers | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Train a configuration to a finished run folder, or resume the run there.

    Runs on several threads of a process take place one after another. The folder then holds all files of ``protofl
    run`` but its report: ``config.json``, ``history.jsonl``, ``metrics.json``, ``curves.csv``, ``timing.json``,
    ``model.safetensors``, ``server.safetensors``, ``clients/``.

    Args:
        config: a configuration; a nested mapping of sections as in params.yaml; or a JSON file with one, such as
            another run's ``config.json``. Relative paths of plug-ins in a file start in its folder.
        folder: of the run.
        prepared: folder of prepared data; None prepares them in the run's folder.
        partition: folder of a partition of these data; None divides them in the run's folder.
        orchestrator: runs the parts of a round; None: plain calls.
        observers: progress callbacks.
        restart: discard a checkpoint that cannot be used, and results that are damaged or from other code; resume
            everything else.

    Returns:
        The content of ``metrics.json``.

    Raises:
        ConfigError: a bad configuration, or the folder holds another run, or one on other data.
        DataError: data are missing or damaged.
        RunError: training failed, another process uses the folder, or other code finished the run.
    """
    resolved, files = _resolved(config), RunFiles(Path(folder))
    portable.check(resolved.engine.numerics)
    data = files.prepared if prepared is None else Path(prepared)
    division = files.partition if partition is None else Path(partition)
    refuse_inside_a_run(files.directory)
    refuse_other_run(resolved, files.directory)
    reads_only = files.metrics.exists() and not restart  # perhaps from a folder that cannot be written to
    with alone(), nullcontext() if reads_only else run_lock(files.directory):
        if finished_by_other_code(files.directory, code_fingerprint(resolved)):
            if not restart:
                raise RunError(
                    f"{files.directory}: was finished by a different version of the code; {Cure.OTHER_FOLDER}"
                )
            forget_results(files.directory)
        if restart:
            forget_damaged_results(files.directory)
        if not files.metrics.exists():
            if prepared is None:
                prepare_data(resolved, data)
            if partition is None:
                divide(resolved, data, division)
            make_durable(files.inputs())  # nothing reads them again after the run has finished
            inputs = (resolved, data, division, files.directory)
            train(*inputs, orchestrator=orchestrator, observers=observers, restart=restart)
            evaluate(*inputs)
    check_seal(files.directory)
    metrics = read_json(files.metrics, "delete it and run again")
    if prepared is not None and Dataset.load(data).meta.fingerprint != metrics["data_fingerprint"]:
        raise on_other_data(files.directory)
    if partition is not None and Partition.load(division).fingerprint != metrics["partition_fingerprint"]:
        raise on_other_data(files.directory)
    return metrics


def _resolved(config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return Config.from_mapping(config)
    path = Path(config)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except NOT_JSON as error:
        raise ConfigError(f"{path}: not valid JSON ({shorten(str(error))}); give a mapping instead") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object with sections such as 'data' and 'method'")
    config = without_removed(raw["config"]) if "config" in raw else raw
    return Config.from_mapping(resolve_paths(config, path.parent))


def train(
    config: Config,
    prepared: Path,
    partition: Path,
    directory: Path,
    *,
    orchestrator: Orchestrator | None = None,
    observers: Observers | None = None,
    restart: bool = False,
    environment: Mapping[str, Any] | None = None,
) -> None:
    """Run or resume all rounds of a run; do nothing where they are finished. The caller holds the folder's lock.

    Args:
        config: the run. prepared, partition: its inputs. directory: its folder.
        orchestrator, observers, restart: as for :func:`run`.
        environment: machine and code for ``config.json``; None: :func:`describe_environment`.

    Raises:
        ConfigError: the directory holds another run, or the run's steps are compiled and the compiler is missing.
        RunError: training failed, or a file of the run's code was edited.
    """
    refuse_edited_code(config)
    portable.check(config.engine.numerics)
    tell_of_other_kernels()
    single_thread()
    set_numerics(config.engine.precision)
    experiment = Experiment.open(config, prepared, partition)
    files = RunFiles(directory)
    remove_stale_temp(directory)
    experiment.dataset.check_content(prepared)  # before the evaluation of finished rounds too
    if is_finished(directory, experiment.hash):
        disk.remove_tree(files.checkpoint)  # left by a kill during the last step
        return
    refuse_missing_compiler(experiment.config)
    checkpoint = Checkpoint(files.checkpoint, durable_every=config.engine.durable_every)
    if not restart and holds_run(directory, experiment.hash):
        checkpoint.refuse_other(run_name(experiment))
    experiment = _claim(
        files, experiment, describe_environment(experiment.config) if environment is None else environment
    )
    executor = _executor(experiment, prepared, partition, checkpoint)
    try:
        state = run_rounds(
            experiment,
            checkpoint,
            executor,
            orchestrator or InlineOrchestrator(experiment.config.engine.worker_count),
            observers or Observers(meters={"joules": machine_meter(config.engine.device)}),
            restart=restart,
        )
    finally:
        executor.close()
    _finish(files, experiment, checkpoint, state)


def describe_environment(config: Config) -> dict[str, Any]:
    """Return the process's Python, packages, class of processor, device and code, as JSON values."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": package_versions(_PACKAGES),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_class(),
        "device": torch.cuda.get_device_name() if config.engine.device == "cuda" else "cpu",
        "engine": config.engine.name,
        "workers": config.engine.worker_count,
        "code_hash": library_fingerprint(),
    }


def _claim(files: RunFiles, experiment: Experiment, environment: Mapping[str, Any]) -> Experiment:
    """Write ``config.json``; return the experiment with the folder's copies of plug-ins."""
    before = read_run_config(files.directory) if files.config.exists() else {}
    is_own = before.get("config_hash") == experiment.hash  # its data may have moved
    if not is_own:
        refuse_other_run(experiment.config, files.directory)
        if before:
            raise on_other_data(files.directory)
    code = code_fingerprint(experiment.config)
    has_checkpoint = is_own and files.checkpoint.exists()
    earlier = _earlier_environments(before, environment) if has_checkpoint and before.get("code") == code else []
    disk.make_folder(files.directory)
    config = dataclasses.replace(experiment.config, plugins=plugins.keep(experiment.config.plugins, files.directory))
    forget_results(files.directory)
    write_run_config(
        files.directory,
        config,
        experiment.hash,
        code=code,
        environment=dict(environment),
        decision=vars(experiment.choice),
        **({"earlier_environments": earlier} if earlier else {}),
    )
    return dataclasses.replace(experiment, config=config)


def _earlier_environments(before: Mapping[str, Any], environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the other machines that a resumed run was trained on: its last bits may depend on them."""
    last = before.get("environment", environment)
    moved = any(last.get(key) != environment.get(key) for key in ("processor", "device", "versions"))
    return [*before.get("earlier_environments", ()), *([last] if moved else [])]


def _executor(experiment: Experiment, prepared: Path, partition: Path, checkpoint: Checkpoint) -> Executor:
    engine = experiment.config.engine
    if engine.name == "ray":
        return ray_pool(experiment, prepared, partition, checkpoint)
    if engine.worker_count == 0:
        return InlineExecutor(experiment, checkpoint)
    return local_pool(experiment, prepared, partition, checkpoint)


def _finish(files: RunFiles, experiment: Experiment, checkpoint: Checkpoint, state: RunState) -> None:
    """Turn the last checkpoint into the run's results; repeated after a kill, it gives the same files."""
    model = experiment.method.global_model(state.server)
    write_tensors(files.model, {} if model is None else model.values)
    save_record(files.server, state.server)
    disk.remove_tree(files.clients)
    disk.new_folder(files.clients)
    for client in sorted(state.client_states):
        save_record(files.client(client), checkpoint.client_state(client, state.client_states))
    disk.remove_tree(files.snapshots)
    for number in sorted(set(experiment.config.evaluation.snapshots)):
        for name, record in checkpoint.snapshots.round(number).items():
            save_record(files.snapshot(number, name), record)
    write_result(files.timing, _timing(checkpoint.records("timing.jsonl")))
    # The history marks a finished run, so it comes last, after a power failure too.
    make_durable([files.model, files.server, files.timing, *files.records()])
    write_text(files.history, (files.checkpoint / "history.jsonl").read_text(), durable=True)
    disk.remove_tree(files.checkpoint)


def _timing(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of ``timing.json`` from its records by exchange.

    A meter cannot tell clients apart: the joules of an exchange are divided by the clients' seconds.
    """
    totals: dict[str, dict[str, float]] = {"seconds": {}, "joules": {}}
    clients: dict[str, dict[str, Any]] = {}
    for record in rounds:
        for kind, phases in totals.items():
            for phase, value in record.get(kind, {}).items():
                phases[phase] = phases.get(phase, 0.0) + value
        whole, joules = sum(record["clients"].values()), record.get("joules", {}).get(record["leg"])
        for client, seconds in record["clients"].items():
            spent = clients.setdefault(client, {"seconds": 0.0, "joules": None})
            spent["seconds"] += seconds
            if joules is not None and whole:
                spent["joules"] = (spent["joules"] or 0.0) + joules * seconds / whole
    # Exchanges without training take time too, which is not part of the speed.
    training = sum(record["seconds"][record["leg"]] for record in rounds if record["steps"])
    return {
        "rounds": rounds,
        "seconds": totals["seconds"],
        "steps_per_second": sum(record["steps"] for record in rounds) / training if training else None,
        "joules": totals["joules"] or None,
        "clients": dict(sorted(clients.items(), key=lambda item: int(item[0]))),
        "began_ms": rounds[0]["began_ms"],
        "ended_ms": rounds[-1]["ended_ms"],
    }


def evaluate(config: Config, prepared: Path, partition: Path, directory: Path) -> dict[str, Any]:
    """Score the models of a finished run; write and return ``metrics.json``, and write ``curves.csv``.

    Raises:
        DataError: the run has not finished, or a file of it is damaged.
    """
    single_thread()
    files = RunFiles(directory)
    if not files.history.exists():
        raise DataError(f"{directory}: no finished run there (history.jsonl is missing); {Cure.TRAIN_FIRST}")
    history = read_lines(files.history, _CURE)
    experiment = Experiment.open(config, prepared, partition)
    check_history(history, config.federation.rounds, files.history, _CURE)
    server, _ = load_record(files.server, cure=_CURE)

    def client_state(client: int) -> Record:
        path = files.client(client)
        return load_record(path, cure=_CURE)[0] if path.exists() else Record()

    scores = Scorer(experiment).score(server, client_state, vote=True)
    metrics = finite(summarise_run(experiment, scores, history))
    write_text(files.curves, _curves(history), durable=True)
    text = result_text(metrics)
    seal(directory, text)
    write_text(files.metrics, text, durable=True)  # last: it marks a finished run
    return metrics


def _curves(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the history as CSV with one number per column; empty where a method has no such figure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = ("round", "top1_global", "mean_local", "pooled_local", "client_std", "loss_global")
    traffic = ("bytes_up", "bytes_down", "bytes_eval_up", "bytes_eval_down")
    writer.writerow([*columns, *traffic])
    for record in history:
        values = ["" if record[column] is None else record[column] for column in columns]
        writer.writerow([*values, *(sum(record[direction].values()) for direction in traffic)])
    return out.getvalue()
