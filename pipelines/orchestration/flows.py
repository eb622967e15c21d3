"""The Prefect flows: the bodies of :mod:`pipelines.execution.bodies` with their steps shown, timed and retried.

``federated-experiment`` is everything for one configuration, ``federated-training`` the same on given data;
``compare``, ``sweep`` and ``tune`` are many runs, and end with their tables, figures and MLflow runs. A flow that a
command starts is given its :class:`Operation` by the command; one that a deployment starts makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prefect import flow, get_client, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from pydantic import WithJsonSchema

from flcore.config import Config
from flcore.engine.pool.workers import worker_count
from flcore.errors import ConfigError
from pipelines.config import files
from pipelines.config.files import read_params
from pipelines.config.grid import plan
from pipelines.config.params import override, without_tracking
from pipelines.config.schema import form
from pipelines.execution.bodies import Operation, Outcome, comparison, comparison_runs, experiment
from pipelines.execution.progress import Lines
from pipelines.execution.recorder import Recorder
from pipelines.execution.steps import InlineSteps
from pipelines.orchestration.artifacts import ProgressArtifact
from pipelines.orchestration.prefect_steps import PrefectSteps
from pipelines.runs.inputs import Inputs
from pipelines.tracking.addresses import without_password
from pipelines.tuning.asked import Asked

if TYPE_CHECKING:
    from pipelines.tuning.search import StudyOutcome


Configuration = Annotated[dict[str, Any], WithJsonSchema(form())]
"""A configuration, whose keys Prefect's parameter form offers."""


@dataclass
class Call:
    """A flow that a command calls: what Prefect would store if it were a parameter or a result.

    Attributes:
        operation: how the body is carried out.
        storage: of a study, whose address may hold a password.
        outcome: what came of it.
    """

    operation: Operation
    storage: str | None = None
    outcome: Outcome | StudyOutcome | None = None


CURRENT: ContextVar[Call] = ContextVar("call")
"""The command that calls the flow; none where a deployment does."""


# ---- flows -------------------------------------------------------------------------------------------------------


@flow(name="federated-experiment")
def federated_experiment(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    out: str | None = None,
    restart: bool = False,
    config: Configuration | None = None,
) -> str:
    """Everything for one configuration: prepare, divide, train, evaluate, report, log.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments, as for ``--set``.
        out: the run's folder; ``{date}`` in it becomes the day for which the flow was scheduled, so that a nightly run
            has a folder a night and a retry goes on in the same one. None: ``runs/<method>-s<seed>-<hash, 8>``.
        restart: throw away a checkpoint that cannot be used; one that can is gone on with.
        config: a configuration instead of a file and overrides; without the section ``tracking``, which is not stored.

    Returns:
        The run's folder.
    """
    checked = Config.from_mapping(_raw(params_file, overrides, config))
    return _one_run(checked, None if out is None else Path(dated(out)), restart)


@flow(name="federated-training")
def federated_training(
    prepared: str,
    partition: str,
    out: str,
    params_file: str | None = None,
    overrides: list[str] | None = None,
    restart: bool = False,
    config: Configuration | None = None,
) -> str:
    """One run on data that are prepared and divided already, such as those of ``dvc repro``.

    Args:
        prepared: folder of the data. partition: folder of their partition.
        out: the run's folder; ``{date}`` as for ``federated-experiment``.
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments, as for ``--set``.
        restart: throw away a checkpoint that cannot be used; one that can is gone on with.
        config: a configuration instead of a file and overrides.

    Returns:
        The run's folder.
    """
    checked, inputs = Config.from_mapping(_raw(params_file, overrides, config)), Inputs(Path(prepared), Path(partition))
    return _one_run(checked, Path(dated(out)), restart, inputs)


@flow(name="compare")
def compare(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    out: str = "runs/comparison",
    restart: bool = False,
    tuned: int = 0,
    config: Configuration | None = None,
) -> str:
    """Methods × seeds, then their table, figures, page and MLflow runs.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments for all runs.
        methods: default ``compare.methods``. seeds: default ``compare.seeds``.
        out: folder of the comparison; ``{date}`` as for ``federated-experiment``.
        restart: throw away checkpoints that cannot be used.
        tuned: trials with which each method is tuned first; 0: none is.
        config: parameters instead of a file and overrides.

    Returns:
        The comparison's folder.
    """
    raw = _raw(params_file, overrides, config)
    base, runs = Config.from_mapping(raw), comparison_runs(raw, methods, seeds)
    folder = Path(dated(out))
    with _operation(base, f"compare {folder.name}", ["comparison", base.source.name]) as operation:
        if tuned:
            from pipelines.tuning.tuned import tuned_comparison  # Optuna, which few comparisons need

            outcome = tuned_comparison(raw, methods, seeds, tuned, folder, operation, restart=restart)
        else:
            facts = {"name": folder.name}
            outcome = comparison("comparison", without_tracking(raw), runs, folder, operation, facts, restart=restart)
        _show_table(outcome)
    return _left(outcome)


@flow(name="sweep")
def sweep(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    vary: list[str] | None = None,
    seeds: list[int] | None = None,
    baselines: list[str] | None = None,
    metric: str = "mean_local",
    out: str = "runs/sweep",
    restart: bool = False,
    config: Configuration | None = None,
) -> str:
    """The points of a grid × seeds, then their table, figure and MLflow runs.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments for all runs.
        vary: ``KEY=VALUE,VALUE,...`` assignments, see :mod:`pipelines.config.grid`.
        seeds: default ``compare.seeds``. baselines: methods to run beside the grid.
        metric: of table and figure.
        out: folder of the sweep; ``{date}`` as for ``federated-experiment``.
        restart: throw away checkpoints that cannot be used.
        config: parameters instead of a file and overrides.

    Returns:
        The sweep's folder.
    """
    raw = _raw(params_file, overrides, config)
    planned = plan(raw, vary or [], seeds, baselines or ())
    folder = Path(dated(out))
    asked = {"vary": list(vary or []), "seeds": list(planned.seeds), "baselines": list(baselines or ())}
    with _operation(planned.base, f"sweep {folder.name}", ["sweep", planned.base.source.name]) as operation:
        facts = {**asked, "metric": metric, "name": folder.name}
        outcome = comparison("sweep", without_tracking(raw), planned.runs, folder, operation, facts, restart=restart)
        _show_table(outcome)
    return _left(outcome)


@flow(name="tune")
def tune(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    trials: int = 20,
    objective: str = "accuracy",
    metric: str | None = None,
    storage: str | None = None,
    out: str = "runs/tune",
    at_once: int | None = None,
    config: Configuration | None = None,
    max_bytes: int | None = None,
) -> str:
    """An Optuna study of one method on validation data, then its results, figures and MLflow runs.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments.
        trials: how many ended trials are wanted in all; a study goes on where it stopped.
        objective: ``accuracy`` or ``accuracy,bytes``. metric: a number of ``metrics.json``; None: the
            method's own accuracy.
        storage: Optuna's storage as a URL without a password; None for a journal in the study's folder.
        out: the study's folder; ``{date}`` as for ``federated-experiment``.
        at_once: trials that are under way at the same time; None: as the study began, or four.
        config: parameters instead of a file and overrides.
        max_bytes: with ``accuracy,bytes`` the most that a result may send; None: any number.

    Returns:
        The study's folder.
    """
    if storage is not None and storage != without_password(storage):
        raise ConfigError("storage: Prefect would keep the password in it; take a storage that needs none")
    from pipelines.tuning.search import study  # Optuna, which no other flow needs

    checked, folder, call = (
        Config.from_mapping(_raw(params_file, overrides, config)),
        Path(dated(out)),
        CURRENT.get(None),
    )
    tags = ["tune", checked.method.name, checked.source.name]
    with _operation(checked, f"tune {folder.name}", tags) as operation:
        asked = Asked(trials, objective, metric, storage if call is None else call.storage, at_once, max_bytes)
        outcome = study(checked, asked, folder, operation)
        _show_table(outcome)
    return _left(outcome)


# ---- around a flow -----------------------------------------------------------------------------------------------


def _one_run(config: Config, out: Path | None, restart: bool, inputs: Inputs | None = None) -> str:
    name, tags = f"{config.method.name}-s{config.seed}", [config.method.name, config.source.name]
    with _operation(config, name, tags, experiment_of=config) as operation:
        outcome = experiment(config, out, operation, restart=restart, inputs=inputs)
        _show_run(outcome)
    return _left(outcome)


def _raw(params_file: str | None, overrides: Sequence[str] | None, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters of a flow, not yet checked.

    Raises:
        ConfigError: an override names a store: Prefect keeps what a flow is given, and an address may hold a password.
    """
    if config is not None:
        return dict(config)
    for assignment in overrides or ():
        if assignment.startswith("tracking.uri"):
            raise ConfigError(
                "overrides: tracking.uri would be kept by Prefect, with a password that may be in it; put it into the "
                "parameter file, or into MLFLOW_TRACKING_URI where the worker runs"
            )
    return override(read_params(None if params_file is None else Path(params_file)), overrides or ())


def dated(out: str) -> str:
    """A folder in whose name ``{date}`` is the day (UTC) for which the flow was scheduled."""
    return str(files.dated(Path(out), flow_run.scheduled_start_time.astimezone(UTC).date()))


@contextmanager
def _operation(
    config: Config, name: str, tags: Sequence[str], experiment_of: Config | None = None
) -> Iterator[Operation]:
    """How this flow is carried out, with its run named and tagged, and its progress shown.

    Args:
        config: says where runs are logged, for a flow that no command has started.
        name: of the flow run. tags: of it, beside those that it has.
        experiment_of: the configuration, where the flow is a single run.
    """
    _name_flow_run(name, tags)
    call, whole_rounds = CURRENT.get(None), experiment_of is None or worker_count(experiment_of.engine) == 0
    with ExitStack() as stack:
        # To the run's page; the terminal of a command has its own watcher, and a worker's log gets what the page gets.
        log = Lines(get_run_logger().info)
        if call is not None:
            given = call.operation
            watcher = ProgressArtifact(given.watcher, log)
        else:
            given = Operation(InlineSteps(), log, stack.enter_context(_recorder(config, log.say)))
            watcher = ProgressArtifact(log)
        stack.callback(watcher.end)
        yield replace(given, steps=PrefectSteps(whole_rounds=whole_rounds), watcher=watcher)


@contextmanager
def _recorder(config: Config, say: Callable[[str], None]) -> Iterator[Recorder]:
    with Recorder(config.tracking.enabled, say) as recorder:
        recorder.configure(config.to_mapping()["tracking"])
        yield recorder


def _name_flow_run(name: str, tags: Sequence[str]) -> None:
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, name=name, tags=sorted({*flow_run.tags, *tags}))


def _left(outcome: Outcome | StudyOutcome) -> str:
    """The folder of a flow's results, which is what Prefect keeps; the rest goes to the command that called it."""
    call = CURRENT.get(None)
    if call is not None:
        call.outcome = outcome
    return str(outcome.directory)


def _show_run(outcome: Outcome) -> None:
    lines = [f"folder: `{outcome.directory}`", *([f"MLflow: `{outcome.store}`"] if outcome.store else [])]
    create_markdown_artifact(_run_table(outcome.directory) + "\n\n" + "\n\n".join(lines), key="result")


def _run_table(directory: Path) -> str:
    """The scores and costs of a finished run as Markdown."""
    from flcore.run_folder import RunFiles
    from pipelines.runs.layout import read_json

    metrics = read_json(RunFiles(directory).metrics)
    rows = [
        f"| {key} | {value} |"
        for key, value in metrics.items()
        if isinstance(value, int | float | str) and "fingerprint" not in key and "hash" not in key
    ]
    return "\n".join(["| metric | value |", "| --- | ---: |", *rows])


def _show_table(outcome: Outcome | StudyOutcome) -> None:
    create_markdown_artifact(outcome.markdown, key="table", description=f"of the runs in {outcome.directory}")
