"""The status in MLflow of runs that did not finish, and who sets it.

A follower marks its own runs. If it was killed too, MLflow's server of ``protofl up`` marks them; without it, the next
process that begins a run in the experiment does. A run that is trained has its last sign of life as a tag.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.addresses import redact
from pipelines.tracking.store import Store, all_runs

if TYPE_CHECKING:
    from mlflow.tracking.client import MlflowClient

ALIVE_TAG = "protofl.alive"
FLOW_TAG = "prefect.flow_run"
STOPPED_TAG = "protofl.stopped"
"""Why a run has not finished."""
SILENT_MS = 600_000
"""Another machine, whose clock may differ, is taken for dead after this time."""
SILENT_HERE_MS = 90_000
"""This machine's processes; Prefect too takes a flow for dead after 90 seconds (`infra/automations.yaml`)."""
_REASON = 1000  # characters of a tag that a page shows


def mark(client: MlflowClient, run_id: str, status: str, end_ms: int, reason: str | None) -> None:
    """Set the status of a run that has not finished, and the reason."""
    if reason is not None:
        client.set_tag(run_id, STOPPED_TAG, redact(reason)[:_REASON])
    client.set_terminated(run_id, status=status, end_time=end_ms)


def mark_silent(client: MlflowClient, experiment_id: str, now: int, patience_ms: int = SILENT_MS) -> None:
    """Mark runs as stopped whose process has given no sign of life for a while, such as those of a dead machine."""
    for run in all_runs(client, experiment_id, "attributes.status = 'RUNNING'"):
        last = run.data.tags.get(ALIVE_TAG)
        if last is not None and now - int(last) > patience_ms:
            when = datetime.fromtimestamp(int(last) / 1000, UTC).isoformat(" ", "seconds")
            mark(client, run.info.run_id, "KILLED", int(last), f"no sign of life since {when}")


def mark_silent_here(client: MlflowClient) -> None:
    """Mark runs of all experiments whose process, on this machine, was killed with its follower."""
    now = time.time_ns() // 1_000_000
    for experiment in client.search_experiments():
        mark_silent(client, experiment.experiment_id, now, SILENT_HERE_MS)


def mark_flow(uri: str | None, flow_run: str, status: str, reason: str) -> bool:
    """Mark the unfinished runs of a Prefect flow run as FAILED or KILLED, unless they have a reason already.

    Returns:
        False, after a warning, if the store did not respond.
    """

    def mark_all(client: MlflowClient) -> None:
        filter_string = f"tags.`{FLOW_TAG}` = '{flow_run}' and attributes.status != 'FINISHED'"
        for experiment in client.search_experiments():
            for run in all_runs(client, experiment.experiment_id, filter_string):
                if STOPPED_TAG not in run.data.tags:
                    mark(client, run.info.run_id, status, int(run.data.tags[ALIVE_TAG]), reason)

    return Store(uri).attempt(mark_all, Path("runs"), final=True)
