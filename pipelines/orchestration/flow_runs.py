"""What is around the body of a flow: its parameters, name, tags, progress, results, limits and end.

A flow that a command starts is given its :class:`Operation` by the command; one that a deployment starts makes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

from prefect import get_client, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from pydantic import Field, WithJsonSchema

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.experiment.run_folder import RunFiles
from pipelines.execution.follower import Follower
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import FailedRunsError, Outcome
from pipelines.execution.progress import Lines
from pipelines.execution.steps import InlineSteps
from pipelines.orchestration.artifacts import ProgressArtifact, artifact_key
from pipelines.orchestration.gpus import visible_gpus, worker_devices
from pipelines.orchestration.limits import gpus_held, time_limit
from pipelines.orchestration.prefect_steps import PrefectSteps
from pipelines.plan import files
from pipelines.plan.files import read_params
from pipelines.plan.params import brought_models, for_entry, override
from pipelines.plan.schema import form
from pipelines.reporting.formats import plural
from pipelines.runs.layout import read_json

Configuration = Annotated[dict[str, Any], WithJsonSchema(form())]
"""A configuration, whose keys Prefect's parameter form offers."""
Seed = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Hours = Annotated[float, Field(gt=0)]


@dataclass
class Call:
    """A flow that a command calls: what Prefect would store if it were a parameter or a result.

    Attributes:
        operation: how the body is carried out.
        storage: of a study, whose address may hold a password.
        patience: how often a request to the server is repeated while the body is at work.
        outcome: what came of it.
    """

    operation: Operation
    storage: str | None = None
    patience: int = 0
    outcome: Outcome | None = None


CURRENT: ContextVar[Call] = ContextVar("call")
"""The command that calls the flow; none where a deployment does."""

_HASTE = 1
"""How often a request is repeated that nothing but a page depends on: for about two seconds."""


def impatient() -> AbstractContextManager[Any]:
    """Where somebody waits for a command whose results are on disk, or not begun."""
    return temporary_settings({PREFECT_CLIENT_MAX_RETRIES: _HASTE})


# ---- parameters --------------------------------------------------------------------------------------------------


def parameters(
    params_file: str | None, overrides: Sequence[str] | None, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The parameters of a flow, not yet checked.

    Raises:
        ConfigError: one of them names a store: Prefect keeps what a flow is given, and an address may hold a password.
    """
    instead = "the parameter file, or into MLFLOW_TRACKING_URI where the worker runs"
    if config is not None:
        tracking = config.get("tracking")
        names_store = tracking.get("uri") if isinstance(tracking, Mapping) else tracking
        refuse_stores("config", ["tracking"] if names_store else (), instead)
        return dict(config)
    refuse_stores("overrides", overrides or (), instead)
    return override(read_params(None if params_file is None else Path(params_file)), overrides or ())


def configuration(params_file: str | None, overrides: Sequence[str] | None, config: Mapping[str, Any] | None) -> Config:
    """The configuration of a flow of one method: as the command of that name makes it of the same file and overrides.

    So what ``compare.settings`` says of the method holds. A ``config`` is one already, which a command has made.

    Raises:
        ConfigError: it is none; or as :func:`parameters`.
    """
    raw = parameters(params_file, overrides, config)
    if config is not None:
        return Config.from_mapping(raw)
    for line in brought_models(raw, [None], overrides or ()):
        get_run_logger().info(line)
    return Config.from_mapping(for_entry(raw, None, None))


def refuse_stores(parameter: str, assignments: Iterable[str], instead: str) -> None:
    """Refuse assignments that name a store.

    Args:
        parameter: of the flow. assignments: its value.
        instead: where the address belongs.

    Raises:
        ConfigError: there is one: Prefect keeps what a flow is given, and an address may hold a password.
    """
    for assignment in assignments:
        if assignment.partition("=")[0].strip() in ("tracking", "tracking.uri"):
            raise ConfigError(
                f"{parameter}: tracking.uri would be kept by Prefect, with a password that may be in it; put it into "
                f"{instead}"
            )


def dated(out: str) -> str:
    """A folder in whose name ``{date}`` is the day (UTC) for which the flow was scheduled."""
    return str(files.dated(Path(out), flow_run.scheduled_start_time.astimezone(UTC).date()))


# ---- while it runs -----------------------------------------------------------------------------------------------


@contextmanager
def operation(
    config: Config,
    name: str,
    tags: Sequence[str],
    *,
    limit_hours: float | None = None,
    experiment_of: Config | None = None,
) -> Iterator[Operation]:
    """How this flow is carried out, with its run named and tagged, its progress shown and its limits kept.

    Args:
        config: says where runs are logged, for a flow that no command has started, and on which device they train.
        name: of the flow run. tags: of it, beside those that it has.
        limit_hours: how long it may take; None: as long as it takes.
        experiment_of: the configuration, where the flow is a single run.

    Raises:
        RunError: it took longer.
    """
    _name_flow_run(name, tags)
    call, whole_rounds = CURRENT.get(None), experiment_of is None or not experiment_of.engine.workers
    with ExitStack() as stack:
        stack.enter_context(time_limit(limit_hours))
        # To the run's page; the terminal of a command has its own watcher, and a worker's log gets what the page gets.
        log = Lines(get_run_logger().info)
        if call is not None:
            given = call.operation
            stack.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: call.patience}))
            watcher = ProgressArtifact(given.watcher, log)
        else:
            given = Operation(InlineSteps(), log, stack.enter_context(_follower(config, log.say)))
            watcher = ProgressArtifact(log)
        stack.callback(watcher.end)
        _show_workers(config)
        stack.enter_context(gpus_held(config.engine.device, log.say))
        yield replace(given, steps=PrefectSteps(whole_rounds=whole_rounds), watcher=watcher)


@contextmanager
def _follower(config: Config, say: Any) -> Iterator[Follower]:
    with Follower(config.tracking.enabled, say) as follower:
        follower.configure(config.to_mapping()["tracking"])
        yield follower


def _name_flow_run(name: str, tags: Sequence[str]) -> None:
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, name=name, tags=sorted({*flow_run.tags, *tags}))


def _show_workers(config: Config) -> None:
    """Which worker has which device, as a table on the flow's page; nothing where this process trains on the CPU."""
    devices = worker_devices(config.engine, visible_gpus())
    if devices:
        table = [{"worker": place, "device": device} for place, device in enumerate(devices)]
        create_table_artifact(
            table, key=artifact_key("workers"), description="which device each worker of a run is bound to"
        )


# ---- at its end --------------------------------------------------------------------------------------------------


def left(outcome: Outcome) -> str:
    """The folder of a flow's results, which is what Prefect keeps; the rest goes to the command that called it."""
    call = CURRENT.get(None)
    if call is not None:
        call.outcome = outcome
    return str(outcome.directory)


def left_by_all(outcome: Outcome, runs: int) -> str:
    """The folder of many runs' results, where none of them failed.

    Args:
        outcome: of the runs. runs: how many there are.

    Raises:
        FailedRunsError: some failed, so that the flow has; its table and artifacts stay.
    """
    if outcome.failed:
        raise FailedRunsError(
            f"{len(outcome.failed)} of {plural(runs, 'run')} failed; the first of them, {outcome.first_failure}; the "
            "table is without them, and the same parameters try them again"
        )
    return left(outcome)


def show_run(outcome: Outcome) -> None:
    """The scores and costs of a finished run as an artifact, with where it is; the command knows of it before."""
    left(outcome)
    lines = [f"folder: `{outcome.directory}`", *([f"MLflow: `{outcome.store}`"] if outcome.store else [])]
    with _at_the_end():
        create_markdown_artifact(
            _run_table(outcome.directory) + "\n\n" + "\n\n".join(lines), key=artifact_key("result")
        )


def show_table(outcome: Outcome) -> None:
    """The table of many runs as an artifact; the command knows of it before."""
    left(outcome)
    with _at_the_end():
        about = f"of the runs in {outcome.directory}"
        create_markdown_artifact(outcome.markdown, key=artifact_key("table"), description=about)


def _at_the_end() -> AbstractContextManager[Any]:
    """All is done: a command does not wait for the server now, while a deployment has time."""
    return nullcontext() if CURRENT.get(None) is None else impatient()


def _run_table(directory: Path) -> str:
    metrics = read_json(RunFiles(directory).metrics)
    rows = [
        f"| {key} | {value} |"
        for key, value in metrics.items()
        if isinstance(value, int | float | str) and "fingerprint" not in key and "hash" not in key
    ]
    return "\n".join(["| metric | value |", "| --- | ---: |", *rows])
