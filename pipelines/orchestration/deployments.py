"""Registers this project with a Prefect server: pool, queues, limits, deployments and automations."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Container, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import ConfigError, RunError
from flcore.core.host import python, safe_environment
from flcore.io import disk
from flcore.io.files import write_json
from pipelines.orchestration import working_folder
from pipelines.orchestration.address import Address, connected, connection_variables
from pipelines.plan import yaml_text

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

POOL = "protofl-process"
QUEUES = {"cpu": "flows that train on the CPU", "gpu": "flows for the workers that are bound to a GPU"}
WEBHOOK = "PROTOFL_WEBHOOK"
"""Variable with the address of the webhook, which may be a secret and so is in no file."""
_BLOCK = "protofl-notify"
_FILE = Path("infra") / "prefect.yaml"
_AUTOMATIONS = Path("infra") / "automations.yaml"
_SECONDS = 600
_PAGE = 200  # a server returns no more flow runs at once


def environment(api: str) -> dict[str, str]:
    """Return variables for processes that use a server, by its address."""
    return {
        "PREFECT_API_URL": api,
        "PREFECT_LOGGING_LEVEL": "INFO",  # commands set it lower for themselves
        "PREFECT_HOME": os.environ.get("PREFECT_HOME") or str((Path(".protofl") / "prefect").absolute()),
        "DO_NOT_TRACK": "true",
    }


def file(name: Path = _FILE) -> Path | None:
    """Return the file of this folder, else that of the project; None if there is none."""
    places = (name, Path(__file__).with_name(name.name))
    return next((place for place in places if place.exists()), None)


def declared() -> list[dict[str, Any]]:
    """Return the deployments of the file, if there is one; ConfigError if it is invalid or has none."""
    found = file()
    if found is None:
        return []
    try:
        content = yaml_text.parse(found.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError too
        raise ConfigError(f"{found}: is not valid YAML: {error}; correct it") from error
    listed = content.get("deployments") if isinstance(content, dict) else None
    are_named = isinstance(listed, list) and all(isinstance(each, dict) and each.get("name") for each in listed)
    if not listed or not are_named:
        cure = "list at least one, each with a name, or leave out the worker (--no-worker)"
        raise ConfigError(f"{found}: deployments: expected a list of them; {cure}")
    return listed


def changed_after(moment: float) -> bool:
    """Return whether the file was written after a moment, in seconds since 1970."""
    found = file()
    return found is not None and found.stat().st_mtime > moment


def register(address: Address, logs: Path, limits: Mapping[str, int], on: Container[tuple[str, str | None]]) -> None:
    """Create pool, queues, limits and automations, and register the deployments of the file.

    A schedule that was switched on stays on; any other is off, unless the file says ``active: true``.

    Args:
        address: of the server. logs: folder for Prefect's output.
        limits: number of flows that may hold each at a time, by name.
        on: deployment and slug of active schedules.

    Raises:
        RunError: the server does not respond, or refuses a request.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with connected(address) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        for name, description in QUEUES.items():
            with suppress(ObjectAlreadyExists):
                client.create_work_queue(name, description, work_pool_name=POOL)
        for name, slots in limits.items():
            client.upsert_global_concurrency_limit_by_name(name, slots)
        automations = file(_AUTOMATIONS)
        if automations is not None:
            _register_automations(client, automations)
    deployed = file()
    if deployed is not None:
        _deploy(address, deployed, _completed(deployed, logs, on), logs / "deployments.log")


def _completed(deployed: Path, folder: Path, on: Container[tuple[str, str | None]]) -> Path:
    """Write a copy of the deployments with pull steps and heartbeats of our flows and the states of schedules."""
    content = yaml_text.parse(deployed.read_text(encoding="utf-8"))
    for each in content["deployments"]:
        if str(each.get("entrypoint")).startswith("pipelines."):
            if content.get("pull") is None:
                each.setdefault("pull", working_folder.steps())
            _send_heartbeats(each)
        for schedule in each.get("schedules") or ():
            if isinstance(schedule, dict):  # else Prefect says what is wrong
                is_on = (each["name"], schedule.get("slug")) in on
                schedule |= {"active": True} if is_on else {"active": schedule.get("active", False)}
    disk.make_folder(folder)
    copy = folder / "deployments.json"  # JSON is YAML too
    write_json(copy, content)
    return copy


def _send_heartbeats(deployment: dict[str, Any]) -> None:
    """Make flows send a heartbeat every 30 seconds; an automation ends those with this tag that stop sending."""
    pool = dict(deployment.get("work_pool") or {})
    variables = dict(pool.get("job_variables") or {})
    variables["env"] = {**(variables.get("env") or {}), "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    deployment["work_pool"] = pool | {"job_variables": variables}
    deployment["tags"] = [*(deployment.get("tags") or ()), "heartbeat-30s"]


def _deploy(address: Address, deployed: Path, completed: Path, log: Path) -> None:
    words = ["--no-prompt", "deploy", "--all", "--prefect-file", str(completed)]
    problem = f"{deployed}: Prefect does not accept these deployments"
    try:
        with disk.create(log) as output:
            subprocess.run(
                python("-m", "pipelines.orchestration.registering", *words),
                # The connection may be configured by a profile in another home than this process gets here.
                env=safe_environment({**environment(address.url), **connection_variables(address)}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_SECONDS,
                check=True,
            )
    except subprocess.CalledProcessError as error:
        raise RunError(f"{problem}; see {log}") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{problem} within {_SECONDS} s; run the same command again to continue") from error


def settle(address: Address) -> None:
    """Set final states of flow runs that no worker will resume; call it only if no worker runs.

    Running ones have crashed: a killed process cannot report it. Overdue ones are cancelled, else a new worker would
    run those of many nights.
    """
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.states import Cancelled, Crashed

    filters: dict[str, Any] = {
        "flow_run_filter": FlowRunFilter.model_validate(
            {"state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]}}}
        ),
        "work_pool_filter": WorkPoolFilter.model_validate({"name": {"any_": [POOL]}}),
        "sort": FlowRunSort.EXPECTED_START_TIME_ASC,
    }
    now = datetime.now(UTC)
    with connected(address) as client:
        runs: list[FlowRun] = []
        while page := client.read_flow_runs(**filters, limit=_PAGE, offset=len(runs)):
            runs += page
        for run in runs:
            due = run.expected_start_time
            if run.state_type != "SCHEDULED":
                client.set_flow_run_state(run.id, Crashed(message="stopped with its worker"), force=True)
            elif run.auto_scheduled and run.run_count == 0 and due is not None and due < now:
                missed: State[None] = Cancelled(name="Missed", message="no worker ran when it was due")
                client.set_flow_run_state(run.id, missed, force=True)


def _register_automations(client: SyncPrefectClient, path: Path) -> None:
    """Create or update automations; without an address of the webhook, leave out those that call it.

    ``path`` is a list as ``prefect automation create`` takes it, but an action's ``block`` is the name of a block.
    """
    from prefect.blocks.webhook import Webhook
    from prefect.events.schemas.automations import AutomationCore
    from prefect.types import SecretDict
    from pydantic import SecretStr

    automations: list[dict[str, Any]] = yaml_text.parse(path.read_text(encoding="utf-8"))
    address, block = os.environ.get(WEBHOOK), ""
    if address:
        headers = SecretDict({"Content-Type": "application/json"})
        block = str(Webhook(url=SecretStr(address), headers=headers).save(_BLOCK, overwrite=True))
    else:
        automations = [each for each in automations if all(action.get("block") != _BLOCK for action in each["actions"])]
    for each in automations:
        for action in each["actions"]:
            if action.pop("block", None) == _BLOCK:
                action["block_document_id"] = block
        automation = AutomationCore.model_validate(each)
        known = client.read_automations_by_name(automation.name)
        if known:
            client.update_automation(known[0].id, automation)
        else:
            client.create_automation(automation)
