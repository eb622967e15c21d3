"""What a flow that did not end well leaves in MLflow: the state of its runs, and why.

A flow's recorder marks its runs as it can, but does not know why the flow ended, and may have been killed with it. So
these hooks of Prefect mark them once more: in the flow's own process where it failed, in the worker's where it was
killed or cancelled. Flows that a command has started tell the command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.logging.loggers import flow_run_logger

from flcore.config.schema import Config
from flcore.core.errors import RunError
from flcore.experiment.run_folder import RunFiles
from flcore.io.locks import run_lock
from pipelines.config.params import override
from pipelines.execution.outcome import FailedRunsError
from pipelines.execution.recorder import Recorder
from pipelines.orchestration.flow_runs import parameters
from pipelines.papers.assigned import key_of
from pipelines.papers.carry_out import default_folder
from pipelines.tuning.folder import StudyFiles


def mark_runs(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Mark the runs that a flow had begun and not finished: FAILED, or KILLED after a crash or a cancellation.

    Args:
        flow: whose run it was. flow_run: that has ended. state: in which.
    """
    if flow_run.deployment_id is None:
        return
    if state.is_failed() and isinstance(state.result(raise_on_failure=False), FailedRunsError):
        return  # each of them is marked, with its own reason
    runs = unfinished_runs(flow.name, flow_run)
    log = flow_run_logger(flow_run, flow)
    if not runs:
        log.info("no run had begun that MLflow could be told of")
        return
    tracking = _tracking(flow.name, flow_run.parameters)
    reason = f"{state.name}: {state.message}" if state.message else str(state.name)
    with Recorder(tracking["enabled"], log.warning) as recorder:
        recorder.configure(tracking)
        for run in runs:
            recorder.watch(run)
            recorder.stop(run, reason, failed=state.is_failed())
    log.info("told MLflow of %d unfinished runs: %s", len(runs), reason)


def _tracking(flow: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a flow has logged its runs: as its parameters say, which are read as the flow itself reads them."""
    if flow == _PAPER:  # a table has no parameter file, and what else is assigned fits its cells and no default
        said = [one for one in given.get("assignments") or () if key_of(one).startswith("tracking.")]
        raw = override({}, said)
    else:
        raw = parameters(given.get("params_file"), given.get("overrides"), given.get("config"))
    found: Mapping[str, Any] = Config.from_mapping(raw).to_mapping()["tracking"]
    return found


HOOKS: Mapping[str, Any] = {name: [mark_runs] for name in ("on_failure", "on_crashed", "on_cancellation")}
"""For the decorator of a flow."""


def unfinished_runs(flow: str, flow_run: FlowRun) -> list[Path]:
    """The folders of runs that a flow run has worked on and not finished, and that nobody else is at work on.

    Args:
        flow: its name.
        flow_run: of a deployment, whose parameters say where its results go.
    """
    # A worker knows of a flow that it had to end what it was told before it began: when it was due.
    asked, due = flow_run.parameters, flow_run.expected_start_time
    given = asked.get("out")
    if given is None and flow == _PAPER:
        given = default_folder(asked["id"], float(asked.get("rounds_scale") or 1))
    if given is None or due is None:
        return []
    out = Path(str(given).replace("{date}", due.astimezone(UTC).date().isoformat()))
    return [run for run in _FOLDERS[flow](out) if _is_unfinished(run, since=due)]


_PAPER = "protofl-paper-table"
_FOLDERS: Mapping[str, Callable[[Path], list[Path]]] = {
    "federated-experiment": lambda out: [out],
    "federated-training": lambda out: [out],
    "protofl-retrain-on-new-data": lambda out: sorted(out.glob("*")),
    "protofl-compare": lambda out: sorted(out.glob("runs/*")),
    "protofl-sweep": lambda out: sorted(out.glob("runs/*")),
    _PAPER: lambda out: sorted(out.glob("*/runs/*")),
    "protofl-tune": lambda out: [StudyFiles(out).record.directory],
}
"""Flow → the folders of its runs below its own; a study is logged as one run."""


def _is_unfinished(run: Path, since: datetime) -> bool:
    files = RunFiles(run)
    if files.metrics.exists() or not files.config.exists():
        return False
    if not any(path.stat().st_mtime >= since.timestamp() for path in run.iterdir()):
        return False
    try:
        with run_lock(run):
            return True
    except RunError:  # another flow's, in whose way this one was
        return False
