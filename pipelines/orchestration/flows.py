"""The Prefect flows: the same stages as `dvc.yaml`, shown, timed, retried and mapped over groups of clients.

``federated-experiment`` is everything for one configuration, ``federated-training`` its rounds, ``sweep`` many runs of
a comparison. Tasks carry the names of the algorithm's steps. They take no arguments: Prefect would look through every
tensor for futures; each is a closure over explicit inputs, and their results stay in memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prefect import Task, flow
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flcore.config import Config
from flcore.engine.energy import machine_meter
from flcore.engine.pool.workers import worker_count
from flcore.engine.rounds import Observers
from flcore.errors import ConfigError, ProtoflError, RunError
from flcore.experiment import Experiment
from pipelines import stages
from pipelines.config.grid import PlannedRun, plan
from pipelines.config.params import for_entry, override, read_params
from pipelines.orchestration.progress import current_watcher
from pipelines.runs.layout import RunFiles, read_json
from pipelines.tracking.sync import RunTracker

Item = TypeVar("Item")
Result = TypeVar("Result")

_TRAINING_RETRIES = 2


def _worth_retrying(failed: Task[..., Any], run: Any, state: State[Any]) -> bool:
    """Retry what a machine did (a full disk, a lost worker), not what the configuration or the mathematics did."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, ProtoflError)


def _task(name: str, work: Callable[[], Result], retries: int = 0) -> Task[[], Result]:
    return Task(
        work,
        name=name,
        retries=retries,
        retry_condition_fn=_worth_retrying if retries else None,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


class PrefectOrchestrator:
    """Carries out the pieces of a round as tasks of the surrounding flow."""

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """One task, in this thread."""
        return _task(name, lambda: function(*arguments))()

    def map(self, name: str, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """A task per item on the flow's threads; repeating one is harmless: finished replies are found on disk."""
        futures: list[PrefectFuture[Result]] = [
            _task(name, partial(function, item), retries=_TRAINING_RETRIES).submit() for item in items
        ]
        return [future.result() for future in futures]


@flow(name="federated-training", validate_parameters=False)
def federated_training(
    config: Mapping[str, Any],
    prepared: str,
    partition: str,
    directory: str,
    parent_run_id: str | None = None,
    label: str = "",
    restart: bool = False,
) -> bool:
    """All rounds of one run, with its results logged as they come.

    Args:
        config: the resolved configuration, as in ``config.json``.
        prepared: folder of the prepared data. partition: of the partition. directory: of the run.
        parent_run_id: the MLflow run under which this one appears.
        label: what tells this run from others beside method and seed, for messages.
        restart: throw away a checkpoint that cannot be used.

    Returns:
        False if the run had already finished there.
    """
    resolved = Config.from_mapping(config)
    watcher, run_directory = current_watcher(), Path(directory)
    tracker = tracker_for(resolved, run_directory, parent_run_id)

    def on_start(complete: int) -> None:
        watcher.rounds(_name(resolved, label), resolved.federation.rounds, complete)

    def on_round(number: int, record: Mapping[str, Any] | None) -> None:
        watcher.round(number, record)
        if tracker is not None and record is not None:
            tracker.maybe_sync(time.monotonic())

    return stages.train(
        resolved,
        Path(prepared),
        Path(partition),
        run_directory,
        orchestrator=PrefectOrchestrator(),
        observers=Observers(on_round, meter=machine_meter(resolved.engine.device), on_start=on_start),
        restart=restart,
    )


def _name(config: Config, label: str) -> str:
    """What messages call a run."""
    return f"{config.method.name} seed {config.seed}" + (f", {label}" if label else "")


def tracker_for(config: Config, directory: Path, parent_run_id: str | None = None) -> RunTracker | None:
    """The tracker of a run; None where tracking is switched off."""
    if not config.tracking.enabled:
        return None
    return RunTracker(directory, uri=config.tracking.uri, parent_run_id=parent_run_id)


def run_one(
    config: Config,
    prepared: Path,
    partition: Path,
    directory: Path,
    parent_run_id: str | None = None,
    label: str = "",
    restart: bool = False,
) -> None:
    """Train, evaluate, report and log one run inside a flow; a run that has finished is not repeated."""
    runner: Any = ThreadPoolTaskRunner(max_workers=max(worker_count(config.engine), 1))
    training = federated_training.with_options(task_runner=runner)
    training(config.to_mapping(), str(prepared), str(partition), str(directory), parent_run_id, label, restart)
    files = RunFiles(directory)
    if not files.metrics.exists():
        _task("evaluate", lambda: _nothing(stages.evaluate(config, prepared, partition, directory)))()
    if not files.report.exists():
        _task("report", partial(stages.report, partition, directory, config=config, prepared=prepared))()
    tracker = tracker_for(config, directory, parent_run_id)
    if tracker is not None:
        _task("log-run", partial(_log_finished, tracker, config, prepared))()


def _log_finished(tracker: RunTracker, config: Config, prepared: Path) -> None:
    if tracker.sync(final=True) and config.tracking.log_model and config.method.has_global_model:
        tracker.log_model(dataset=prepared / "meta.json", register=config.tracking.register)


@flow(name="federated-experiment")
def federated_experiment(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    out: str = "runs/scheduled",
    config: dict[str, Any] | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Everything for one configuration: prepare, partition, train, evaluate, report.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments, as for ``--set``.
        out: the run directory; ``{date}`` in it becomes the day for which the flow was scheduled, so that a nightly run
            has a directory a night and a retry of it goes on in the same one.
        config: a configuration instead of a file and overrides.
        restart: throw away a checkpoint that cannot be used; one that can is gone on with.

    Returns:
        The content of ``metrics.json``.
    """
    raw = _raw(params_file, overrides) if config is None else config
    day = flow_run.scheduled_start_time.astimezone(UTC).date().isoformat()
    return run_experiment(Config.from_mapping(raw), Path(out.replace("{date}", day)), restart=restart)


def _raw(params_file: str | None, overrides: Sequence[str] | None) -> dict[str, Any]:
    return override(read_params(None if params_file is None else Path(params_file)), overrides or ())


def run_experiment(config: Config, directory: Path, *, restart: bool = False) -> dict[str, Any]:
    """The body of ``federated-experiment`` for a configuration that is already checked.

    Raises:
        ConfigError: the directory holds another run.
    """
    stages.refuse_other_run(config, directory)
    partition = directory / "partition"
    _prepare(config, directory / "prepared")
    _divide(config, directory / "prepared", partition)
    run_one(config, directory / "prepared", partition, directory, restart=restart)
    return dict(read_json(RunFiles(directory).metrics))


def _prepare(config: Config, prepared: Path) -> None:
    current_watcher().stage("prepare")
    _task("prepare-data", lambda: _nothing(stages.prepare(config, prepared)))()


def _divide(config: Config, prepared: Path, partition: Path) -> None:
    current_watcher().stage(f"partition (seed {config.partition_seed})")
    _task("partition-data", lambda: _nothing(stages.partition(config, prepared, partition)))()


def _nothing(result: object) -> None:
    """Drop a result that lies on disk: Prefect would keep it."""


@flow(name="sweep")
def sweep(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    out: str = "runs/comparison",
    config: dict[str, Any] | None = None,
    vary: list[str] | None = None,
    baselines: list[str] | None = None,
) -> list[str]:
    """Many runs on common data: methods × seeds, or the points of a grid × seeds.

    Finished ones are found again, not repeated. In a comparison a run that fails ends it; the other points of a grid
    are run nevertheless, since among many values some may well be too much.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments for all runs.
        methods: default ``compare.methods``. seeds: default ``compare.seeds``.
        out: folder of the comparison: ``prepared/``, ``partitions/seed-<n>/``, ``runs/<method>-s<seed>-<hash>/``.
        config: parameters instead of a file and overrides.
        vary: ``KEY=VALUE,VALUE,...`` assignments, instead of ``methods``: a grid, see :mod:`pipelines.config.grid`.
        baselines: methods to run beside the grid.

    Returns:
        The run directories, methods (or points, then baselines) in order, seeds within.
    """
    raw = _raw(params_file, overrides) if config is None else config
    if vary is None:
        return [str(path) for path in run_sweep(raw, methods, seeds, Path(out))]
    if methods is not None:
        raise ConfigError("sweep: give methods or vary, not both; beside a grid, methods are baselines")
    planned = plan(raw, vary, seeds, baselines or ())
    return [str(path) for path in run_planned(planned.runs, Path(out), keep_going=True)]


def run_sweep(
    raw: Mapping[str, Any], methods: Sequence[str] | None, seeds: Sequence[int] | None, out: Path
) -> list[Path]:
    """The body of ``sweep`` for parameters that are already read, for methods × seeds."""
    return run_planned([PlannedRun(config) for config in sweep_entries(raw, methods, seeds)], out)


def run_planned(runs: Sequence[PlannedRun], out: Path, keep_going: bool = False) -> list[Path]:
    """Prepare data and partitions, then carry out runs that are already checked.

    Args:
        runs: on the same images.
        out: as for ``sweep``.
        keep_going: say which run fails and go on with the next, instead of stopping; it then has no ``metrics.json``.

    Returns:
        Their directories.
    """
    prepared = out / "prepared"
    _prepare(runs[0].config, prepared)
    for partition, run in {_partition_of(run, out): run for run in runs}.items():
        _divide(run.config, prepared, partition)
    directories = [_directory_of(run, out) for run in runs]
    for run, directory in zip(runs, directories, strict=True):
        try:
            run_one(run.config, prepared, _partition_of(run, out), directory, label=run.label)
        except RunError as error:
            if not keep_going:
                raise
            print(f"protofl: {_name(run.config, run.label)} failed: {error}", file=sys.stderr)
    return directories


def sweep_entries(raw: Mapping[str, Any], methods: Sequence[str] | None, seeds: Sequence[int] | None) -> list[Config]:
    """The checked configuration of every run of a comparison, before any of them starts.

    Raises:
        ConfigError: an entry cannot be run, or differs from the others in its data.
    """
    compare = Config.from_mapping(raw).compare
    entries = [
        Config.from_mapping(for_entry(raw, method, seed))
        for method in (methods or compare.methods)
        for seed in (compare.seeds if seeds is None else seeds)
    ]
    if not entries:
        raise ConfigError("compare: no runs; name at least one method and one seed")
    for entry in entries:
        for section in ("data", "partition"):
            if entry.to_mapping()[section] != entries[0].to_mapping()[section]:
                raise ConfigError(f"compare.settings.{entry.method.name}: {section} must be the same for all methods")
    return entries


def _partition_of(run: PlannedRun, out: Path) -> Path:
    return stages.partition_folder(run.config, out / "partitions" / run.division, run.config.seed)


def _directory_of(run: PlannedRun, out: Path) -> Path:
    """Where a run goes: its name follows from all that it depends on.

    Raises:
        ConfigError: the configuration does not fit the data.
    """
    experiment = Experiment.open(run.config, out / "prepared", _partition_of(run, out))
    try:
        experiment.new_module()
    except ConfigError as error:
        raise ConfigError(f"{error} (with {run.label})" if run.label else str(error)) from error
    return out / "runs" / f"{run.config.method.name}-s{run.config.seed}-{experiment.hash[:8]}"
