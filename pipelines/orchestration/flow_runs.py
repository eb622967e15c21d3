"""Everything around the body of a flow: parameters, name, tags, progress, limits, results and hooks.

A command passes its :class:`Operation` to the flow that it starts; a flow of a deployment creates its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Annotated, Any

from prefect import get_client, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import FlowRun, State
from prefect.concurrency.sync import concurrency
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.timeout import timeout
from pydantic import Field, WithJsonSchema

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, ProtoflError, RunError
from pipelines.execution.follower import Follower
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import FailedRunsError, Outcome
from pipelines.execution.progress import Lines
from pipelines.execution.steps import InlineSteps
from pipelines.orchestration.artifacts import ProgressArtifact, artifact_key
from pipelines.orchestration.gpus import limit_name, visible_gpus
from pipelines.orchestration.prefect_steps import PrefectSteps
from pipelines.orchestration.tasks import StepRunner
from pipelines.papers.overrides import key_of
from pipelines.plan import files
from pipelines.plan.files import read_params
from pipelines.plan.params import brought_models, for_entry, override
from pipelines.plan.schema import form
from pipelines.reporting.formats import plural
from pipelines.runs.folder import RunFolder
from pipelines.tracking.run_status import mark_flow

Configuration = Annotated[dict[str, Any], WithJsonSchema(form())]
"""A configuration, whose keys Prefect's parameter form offers."""
Seed = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Hours = Annotated[float, Field(gt=0)]


@dataclass
class Call:
    """A flow that a command calls, with what must not be a parameter or a result, which Prefect would store.

    Attributes:
        operation: execution settings of the body. outcome: the result.
        storage: of a study; its address may hold a password.
        patience: maximum number of repetitions of a request to the server while the body runs.
    """

    operation: Operation
    storage: str | None = None
    patience: int = 0
    outcome: Outcome | None = None


CURRENT: ContextVar[Call] = ContextVar("call")
"""The command that calls the flow; unset in a flow of a deployment."""

_HASTE = 1
"""Maximum number of repetitions of a request that only affects a page: about two seconds."""


def impatient() -> AbstractContextManager[Any]:
    """Return a context for requests while a person waits for a command, before and after its body."""
    return temporary_settings({PREFECT_CLIENT_MAX_RETRIES: _HASTE})


# ---- parameters --------------------------------------------------------------------------------------------------


def parameters(
    params_file: str | None, overrides: Sequence[str] | None, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the parameters of a flow, not yet validated.

    Raises:
        ConfigError: one of them names a store: Prefect stores parameters, and an address may hold a password.
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
    """Return the configuration of a flow of one method, with ``compare.settings``, as its command would.

    Raises:
        ConfigError: it is invalid; or as :func:`parameters`.
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
        parameter: of the flow. assignments: its value. instead: where the address belongs.

    Raises:
        ConfigError: there is one.
    """
    for assignment in assignments:
        if assignment.partition("=")[0].strip() in ("tracking", "tracking.uri"):
            raise ConfigError(
                f"{parameter}: tracking.uri would be kept by Prefect, with a password that may be in it; put it into "
                f"{instead}"
            )


def dated(out: str) -> str:
    """Return a folder with ``{date}`` in its name replaced by the day (UTC) for which the flow was scheduled."""
    return str(files.dated(Path(out), flow_run.scheduled_start_time.astimezone(UTC).date()))


# ---- names -------------------------------------------------------------------------------------------------------


def named_by_method(prefix: str = "") -> Callable[[], str]:
    """Return what names a flow run by its method and seed, for ``flow_run_name``."""

    def name() -> str:
        given = flow_run.parameters
        try:
            raw = parameters(given["params_file"], given["overrides"], given["config"])
            config = Config.from_mapping(raw if given["config"] is not None else for_entry(raw, None, None))
        except ProtoflError:  # which the flow raises too
            return str(flow_run.flow_name)
        return f"{prefix}{config.method.name}-s{config.seed}"

    return name


def named_by_folder(prefix: str) -> Callable[[], str]:
    """Return what names a flow run by its output folder, for ``flow_run_name``."""
    return lambda: f"{prefix} {Path(dated(flow_run.parameters['out'])).name}"


# ---- while it runs -----------------------------------------------------------------------------------------------


@contextmanager
def operation(
    config: Config,
    tags: Sequence[str],
    *,
    limit_hours: float | None = None,
    restart: bool = False,
    experiment_of: Config | None = None,
) -> Iterator[Operation]:
    """Tag the flow run, show its progress and enforce its limits; yield the settings of its body.

    Args:
        config: has the store of runs, for a flow that no command has started, and the device.
        tags: added to the flow run's.
        limit_hours: maximum duration, above which the flow fails; None: unlimited.
        restart: whether unusable checkpoints and damaged results are discarded.
        experiment_of: the configuration, if the flow is a single run.
    """
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, *tags}))
    call, whole_rounds = CURRENT.get(None), experiment_of is None or not experiment_of.engine.workers
    with ExitStack() as stack:
        stack.enter_context(time_limit(limit_hours))
        # To the page; the terminal of a command has its own watcher, and a worker's log gets the same as the page.
        log = Lines(lines_to(get_run_logger()))
        if call is not None:
            given = call.operation
            stack.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: call.patience}))
            watcher = ProgressArtifact(given.watcher, log)
        else:
            follower = stack.enter_context(Follower(config.tracking.enabled, log.say))
            follower.configure(config.to_mapping()["tracking"])
            given = Operation(InlineSteps(), log, follower)
            watcher = ProgressArtifact(log)
        stack.callback(watcher.update)
        stack.enter_context(gpus_held(config.engine.device, log.say))
        yield replace(given, steps=PrefectSteps(whole_rounds=whole_rounds), watcher=watcher, restart=restart)


def lines_to(logger: Logger | LoggerAdapter[Any]) -> Callable[[str], None]:
    """Return what logs a line of the flow, also after the death of the worker that reads its output."""

    def write(text: str) -> None:
        with suppress(SystemExit):  # by which rich, in Prefect's handler, answers a broken pipe; it then discards lines
            logger.info(text)

    return write


# ---- limits ----------------------------------------------------------------------------------------------------


class _TooLateError(TimeoutError):
    """The time of a flow is up; not its parent class, which waiting for a server may raise."""


@contextmanager
def time_limit(hours: float | None) -> Iterator[None]:
    """Interrupt the block, in a main thread, when its time is up; its runs can be resumed, as after Ctrl-C.

    ``hours`` None is no limit. Raises a RunError when the time is up.
    """
    try:
        with timeout(None if hours is None else 3600 * hours, timeout_exc_type=_TooLateError):
            yield
    except _TooLateError as late:
        raise RunError(
            f"limit_hours = {hours:g}: the time is up; what was done is kept, and the same parameters resume it"
        ) from late


@contextmanager
def gpus_held(device: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a slot of Prefect's concurrency limit of each visible GPU; wait while others hold all.

    ``protofl up`` and ``protofl deploy`` create the limits; a GPU without one is not limited. The slot of a killed
    process is free again when its lease expires. ``device`` is ``engine.device``: the CPU has no slots.
    """
    names = [limit_name(gpu) for gpu in visible_gpus()] if device == "cuda" else []
    with concurrency(names):
        if names:
            say(f"holds a slot of {', '.join(names)}")
        yield


# ---- at its end --------------------------------------------------------------------------------------------------


def publish_result(outcome: Outcome) -> str:
    """Return the folder of the results, which Prefect stores; pass the outcome to the command that called the flow."""
    call = CURRENT.get(None)
    if call is not None:
        call.outcome = outcome
    return str(outcome.directory)


def finish_all(outcome: Outcome, runs: int) -> str:
    """Return the folder of the results of many runs; FailedRunsError, which fails the flow, if some of them failed."""
    if outcome.failed:
        raise FailedRunsError(
            f"{len(outcome.failed)} of {plural(runs, 'run')} failed; the first of them, {outcome.first_failure}; the "
            "table is without them, and the same parameters try them again"
        )
    return publish_result(outcome)


def show_run(outcome: Outcome) -> None:
    """Show scores, costs and folder of a finished run as an artifact, after passing it to the command."""
    publish_result(outcome)
    lines = [f"folder: `{outcome.directory}`", *([f"MLflow: `{outcome.store}`"] if outcome.store else [])]
    with _at_the_end():
        create_markdown_artifact(
            _run_table(outcome.directory) + "\n\n" + "\n\n".join(lines), key=artifact_key("result")
        )


def show_table(outcome: Outcome) -> None:
    """Show the table of many runs as an artifact, after passing it to the command."""
    publish_result(outcome)
    with _at_the_end():
        about = f"of the runs in {outcome.directory}"
        create_markdown_artifact(outcome.markdown, key=artifact_key("table"), description=about)


def _at_the_end() -> AbstractContextManager[Any]:
    """Return a context for requests after the body: a command does not wait long for the server."""
    return nullcontext() if CURRENT.get(None) is None else impatient()


def _run_table(directory: Path) -> str:
    rows = [
        f"| {key} | {value} |"
        for key, value in RunFolder(directory).metrics.items()
        if isinstance(value, int | float | str) and "fingerprint" not in key and "hash" not in key
    ]
    return "\n".join(["| metric | value |", "| --- | ---: |", *rows])


# ---- hooks -------------------------------------------------------------------------------------------------------


def mark_runs(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Mark the unfinished runs of a flow run: FAILED, or KILLED after a crash or a cancellation.

    The follower does not know the reason, and may have been killed with the flow; then the worker calls this. A
    command prints the reason itself.
    """
    if flow_run.deployment_id is None:
        return
    tracking = _tracking(flow.name, flow_run.parameters)
    reason = f"{state.name}: {state.message}" if state.message else str(state.name)
    status = "FAILED" if state.is_failed() else "KILLED"
    if tracking["enabled"] and not mark_flow(tracking["uri"], str(flow_run.id), status, reason):
        flow_run_logger(flow_run, flow).warning(
            "MLflow did not respond: it shows the flow's unfinished runs as running"
        )


def _tracking(flow: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return where a flow logs its runs, from its parameters."""
    if flow == "protofl-paper-table":  # no parameter file; its other assignments fit its cells and no default
        raw = override({}, [one for one in given.get("assignments") or () if key_of(one).startswith("tracking.")])
    else:
        raw = parameters(given.get("params_file"), given.get("overrides"), given.get("config"))
    found: Mapping[str, Any] = Config.from_mapping(raw).to_mapping()["tracking"]
    return found


HOOKS: Mapping[str, Any] = {name: [mark_runs] for name in ("on_failure", "on_crashed", "on_cancellation")}
OPTIONS: Mapping[str, Any] = {**HOOKS, "task_runner": StepRunner}
"""Of every flow, for its decorator."""
