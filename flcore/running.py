"""A run from a configuration to a finished folder, in plain Python: prepare, divide, train, evaluate.

::

    from flcore import run

    metrics = run({"method": {"name": "fedproto"}, "federation": {"rounds": 20}}, "runs/first")

Each step is a function from files to files; whoever shows, times, retries or records them (`pipelines`) calls the same
ones. Killed at any moment and called again, a run goes on where it was and ends with the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from flcore.config import plugins
from flcore.config.schema import Config
from flcore.config.stored import resolve_paths, without_removed
from flcore.core.errors import ConfigError, Cure, DataError, RunError
from flcore.core.text import shorten
from flcore.data import dataset
from flcore.data.dataset import Dataset
from flcore.data.dividing import make_partition
from flcore.data.partition import Partition
from flcore.data.summary import repeated_images
from flcore.engine.numerics import alone, single_thread
from flcore.engine.orchestrator import Orchestrator
from flcore.engine.rounds import Observers
from flcore.evaluation.scoring import Scorer
from flcore.evaluation.summaries import check_history, summarise_run
from flcore.experiment.experiment import EngineChoice, Experiment
from flcore.experiment.provenance import code_fingerprint
from flcore.experiment.run_folder import (
    RunFiles,
    check_seal,
    finished_by_other_code,
    forget_damaged_results,
    forget_results,
    on_other_data,
    refuse_inside_a_run,
    refuse_other_run,
    result_text,
    seal,
    write_result,
    write_text,
)
from flcore.io import disk
from flcore.io.files import NOT_JSON, finite, given_path, read_json, read_lines, remove_stale_temp
from flcore.io.locks import run_lock
from flcore.io.records import Record, load_record
from flcore.training import train

logger = logging.getLogger(__name__)

_CURE = "delete the run's folder and run it again"


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
    """Train a configuration to a finished run folder, or go on with what was begun there.

    Called on several threads of a process, runs are carried out one after the other: their bytes do not depend on who
    calls beside them.

    The folder then holds what ``protofl run`` leaves but for its report: ``config.json``, ``history.jsonl``,
    ``metrics.json``, ``curves.csv``, ``timing.json``, ``model.safetensors``, ``server.safetensors``, ``clients/``.

    Args:
        config: a configuration; a nested mapping of sections as in params.yaml; or a JSON file with one, such as
            another run's ``config.json``. Plug-ins in a file stand relative to it.
        folder: of the run.
        prepared: folder of prepared data; None prepares them in the run's own folder.
        partition: folder of a partition of these data; None divides them in the run's own folder.
        orchestrator: how the pieces of a round are carried out; None: plain calls.
        observers: who is told of progress.
        restart: throw away a checkpoint that cannot be used, and results that are damaged or of other code; the rest is
            gone on with.

    Returns:
        The content of ``metrics.json``.

    Raises:
        ConfigError: a bad configuration, or the folder holds another run, or one on other data.
        DataError: data are missing or damaged.
        RunError: training failed, another process is at work in the folder, or other code finished the run there.
    """
    resolved, files = _resolved(config), RunFiles(Path(folder))
    refuse_inside_a_run(files.directory)
    refuse_other_run(resolved, files.directory)
    with alone(), _for_writing(files, restart):
        _refuse_other_code(resolved, files, restart)
        if restart:
            forget_damaged_results(files.directory)
        if not files.metrics.exists():
            if prepared is None:
                prepare_data(resolved, files.prepared)
            data = files.prepared if prepared is None else Path(prepared)
            if partition is None:
                divide(resolved, data, files.partition)
            division = files.partition if partition is None else Path(partition)
            train(
                resolved, data, division, files.directory,
                orchestrator=orchestrator, observers=observers, restart=restart, held=True,
            )  # fmt: skip
            evaluate(resolved, data, division, files.directory)
    check_seal(files.directory)
    metrics = read_json(files.metrics, "delete it and run again")
    handed_in: dict[str, str] = {}
    if prepared is not None:
        handed_in["data_fingerprint"] = Dataset.load(Path(prepared)).meta.fingerprint
    if partition is not None:
        handed_in["partition_fingerprint"] = Partition.load(Path(partition)).fingerprint
    if any(metrics[name] != found for name, found in handed_in.items()):
        raise on_other_data(files.directory)
    return metrics


def _for_writing(files: RunFiles, restart: bool) -> AbstractContextManager[None]:
    """Keep other processes out of a run's folder; a finished run is only read, perhaps where nothing can be written."""
    return nullcontext() if files.metrics.exists() and not restart else run_lock(files.directory)


def _refuse_other_code(config: Config, files: RunFiles, restart: bool) -> None:
    if not finished_by_other_code(files.directory, code_fingerprint(config)):
        return
    if not restart:
        raise RunError(f"{files.directory}: holds this run as other code finished it; {Cure.OTHER_FOLDER}")
    forget_results(files.directory)


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
        raise ConfigError(
            f"{path}: not valid JSON ({shorten(str(error))}); read other formats yourself and give a mapping"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object with sections such as 'data' and 'method'")
    config = without_removed(raw["config"]) if "config" in raw else raw
    return Config.from_mapping(resolve_paths(config, path.parent))


# ------------------------------------------------------------------------------------------------------------- steps


def prepare_data(config: Config, directory: Path) -> Dataset:
    """Read the configured source into ``directory``, unless it already holds just that.

    What was asked for is kept beside the folder, in ``<directory>.request.json``, because it names places on this
    machine.
    """
    request_file = directory.with_name(f"{directory.name}.request.json")
    request = config.to_mapping()["data"]
    if own := plugins.used(config.plugins, [config.source]):
        request["plugins"] = {plugin.name: plugin.sha256 for plugin in own}
    remove_stale_temp(directory)
    remove_stale_temp(directory.parent, request_file.name)
    with suppress(DataError):  # not there, interrupted or damaged: made again below
        if read_json(request_file, "") == request:
            return Dataset.load(directory)
    disk.remove(request_file, missing_ok=True)
    prepared = read_source(config, directory)
    write_result(request_file, request)
    return prepared


def read_source(config: Config, directory: Path) -> Dataset:
    """Read the configured source into ``directory``; warn of test images that are also training images."""
    prepared = dataset.prepare_dataset(
        config.source,
        None if config.data.root is None else given_path(config.data.root),
        download=config.data.download,
        size=config.data.size,
        channels=config.data.channels,
        limit_per_class=config.data.limit_per_class,
        normalisation=config.data.normalisation,
        directory=directory,
    )
    warning = repeated_images(prepared)
    if warning is not None:
        logger.warning(warning)
    return prepared


def divide(config: Config, prepared: Path, directory: Path) -> Partition:
    """Divide the prepared data among clients, into ``directory``, unless it already holds just that.

    Then it is not touched: another process may be reading it, for the same run that somebody has started twice.
    """
    data = Dataset.load(prepared)
    data.check_content(prepared)  # a partition by labels that have changed would be found again when they are mended
    division = make_partition(
        data,
        config.partitioner,
        num_clients=config.partition.num_clients,
        seed=config.partition_seed,
        validation=config.partition.validation,
        client_test=config.partition.client_test,
        test_fraction=config.partition.test_fraction,
        test_shots=config.partition.test_shots,
        imbalance=config.partition.imbalance,
    )
    with suppress(DataError):  # not there, or interrupted, or damaged
        known = Partition.load(directory)
        if all(getattr(known, name) == getattr(division, name) for name in ("fingerprint", "version", "parameters")):
            return division
    disk.make_folder(directory)
    remove_stale_temp(directory)
    division.save(directory)
    return division


def evaluate(config: Config, prepared: Path, partition: Path, directory: Path) -> dict[str, Any]:
    """Write ``metrics.json`` and ``curves.csv`` of a finished run: its models, scored afresh from its files.

    Returns:
        The metrics.

    Raises:
        DataError: the run has not finished, or a file of it is damaged.
    """
    single_thread()
    files = RunFiles(directory)
    if not files.history.exists():
        raise DataError(f"{directory}: no finished run there (history.jsonl is missing); {Cure.TRAIN_FIRST}")
    history = read_lines(files.history, _CURE)
    experiment = Experiment.open(
        config, prepared, partition, choice=EngineChoice(False, False)
    )  # nothing is trained here
    check_history(history, config.federation.rounds, files.history, _CURE)
    server, _ = load_record(files.server, cure=_CURE)

    def memory(client: int) -> Record:
        path = files.clients / f"{client:04d}.safetensors"
        return load_record(path, cure=_CURE)[0] if path.exists() else Record()

    scores = Scorer(experiment).score(server, memory, vote=True)
    metrics = finite(summarise_run(experiment, scores, history))
    write_text(files.curves, _curves(history), durable=True)
    text = result_text(metrics)
    seal(directory, text)
    write_text(files.metrics, text, durable=True)  # last: whoever looks for a finished run looks for this
    return metrics


def _curves(history: Sequence[Mapping[str, Any]]) -> str:
    """The history as CSV with one number per column; empty where a method has no such figure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = ("round", "top1_global", "mean_local", "pooled_local", "client_std", "loss_global")
    traffic = ("bytes_up", "bytes_down", "bytes_eval_up", "bytes_eval_down")
    writer.writerow([*columns, *traffic])
    for record in history:
        values = ["" if record[column] is None else record[column] for column in columns]
        writer.writerow([*values, *(sum(record[direction].values()) for direction in traffic)])
    return out.getvalue()
