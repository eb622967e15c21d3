"""Where to look at what was logged: an address while ``protofl up`` shows it, else what to type."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from pathlib import Path

from pipelines.addresses import without_password
from pipelines.orchestration import background
from pipelines.runs.folder import RunFolder
from pipelines.tracking.description import experiment_name
from pipelines.tracking.store import resolve_uri, ui_command

_PATIENCE_SECONDS = 2.0


def runs_page(uri: str | None, logged: Path | None = None) -> str:
    """Return where to look at runs: the server that ``protofl up`` has started on their store, else what to type.

    Runs are logged to the store itself and not through that server, which may be stopped while they train, and costs a
    request where the file costs a write.

    Args:
        uri: of the store, as it is configured.
        logged: folder of one of the runs; its experiment is opened, in the view that is for training.
    """
    store = without_password(resolve_uri(uri))
    for service in background.recorded():
        if service.name == "mlflow" and service.shows == store and background.is_running(service):
            return service.url + ("" if logged is None else _experiment_page(service.url, logged))
    return ui_command(uri)


def _experiment_page(server: str, logged: Path) -> str:
    """Return the part of an address that opens the runs beside this one; empty if the server does not know them."""
    name = urllib.parse.quote(experiment_name(RunFolder(logged)), safe="")
    asked = f"{server}/api/2.0/mlflow/experiments/get-by-name?experiment_name={name}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    try:
        with opener.open(asked, timeout=_PATIENCE_SECONDS) as answer:
            found = json.load(answer)["experiment"]["experiment_id"]
    except (OSError, ValueError, KeyError):
        return ""
    return f"/#/experiments/{found}/runs?workflowType=machine_learning"  # else MLflow shows its pages for agents
