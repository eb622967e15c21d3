"""Options of all flows: hooks that mark unfinished runs in MLflow with the reason, and the runner of tasks.

The flow's follower marks runs too, but does not know why the flow ended, and may have been killed. Hooks run in the
flow's process if it failed, in the worker's if it was killed or cancelled. A tag of the runs names the flow run. A flow
of a command needs none: the command prints the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.logging.loggers import flow_run_logger

from flcore.config.schema import Config
from pipelines.orchestration.flow_runs import parameters
from pipelines.orchestration.tasks import StepRunner
from pipelines.papers.overrides import key_of
from pipelines.plan.params import override
from pipelines.tracking.run_status import mark_flow


def mark_runs(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Mark the unfinished runs of a flow run: FAILED, or KILLED after a crash or a cancellation."""
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
