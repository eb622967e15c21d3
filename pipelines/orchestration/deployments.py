"""What a Prefect server is told of this project: pool, queues, limits, deployments and notifications.

The server is asked over its REST interface: this process does without importing Prefect.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flcore.core.errors import ConfigError, RunError
from flcore.core.host import python, safe_environment
from flcore.io import disk
from flcore.io.files import write_json
from pipelines.orchestration import working_folder
from pipelines.orchestration.address import Address, opened
from pipelines.plan import yaml_text

POOL = "protofl-process"
QUEUES = {"cpu": "flows that train on the CPU", "gpu": "flows for the workers that are bound to a GPU"}
WEBHOOK = "PROTOFL_WEBHOOK"
"""Variable: where to tell of flows that did not end well; an address that may be a secret, and so in no file."""
_FILE = Path("infra") / "prefect.yaml"
_AUTOMATIONS = Path("infra") / "automations.yaml"
_SECONDS = 600
_SECONDS_TO_ANSWER = 60
_PAGE = 200  # most flow runs of an answer
_BUSY = 503  # its database is held by somebody else for a moment
_DELAYS_SECONDS = (1.0, 4.0, 16.0)


def environment(api: str) -> dict[str, str]:
    """What processes need that talk to a server of ours.

    Args:
        api: its address.
    """
    return {
        "PREFECT_API_URL": api,
        "PREFECT_LOGGING_LEVEL": "INFO",  # commands set it lower for themselves
        "PREFECT_HOME": os.environ.get("PREFECT_HOME") or str((Path(".protofl") / "prefect").absolute()),
        "DO_NOT_TRACK": "true",
    }


def file(name: Path = _FILE) -> Path | None:
    """The deployments of this folder, else those that come with the project; None where there are none."""
    places = (name, Path(__file__).with_name(name.name))
    return next((place for place in places if place.exists()), None)


def declared() -> list[dict[str, Any]]:
    """Return what the file of this folder declares; nothing where there is no file.

    Raises:
        ConfigError: it cannot be read, or declares no deployments.
    """
    found = file()
    if found is None:
        return []
    try:
        content = yaml_text.parse(found.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError too
        raise ConfigError(f"{found}: is not valid YAML: {error}; correct it") from error
    listed = content.get("deployments") if isinstance(content, dict) else None
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(each, dict) and each.get("name") for each in listed)
    ):
        cure = "list at least one, each with a name, or leave out the worker (--no-worker)"
        raise ConfigError(f"{found}: deployments: expected a list of them; {cure}")
    return listed


def changed_after(moment: float) -> bool:
    """Whether the file was written after a moment, in seconds since 1970."""
    found = file()
    return found is not None and found.stat().st_mtime > moment


def register(address: Address, logs: Path, limits: Mapping[str, int], on: Container[tuple[str, str | None]]) -> None:
    """Make pool, queues and limits, and register the deployments as they are in the file, whatever the pages say.

    A schedule that was switched on stays on; any other is off, unless the file says ``active: true``. Automations that
    call a webhook are registered if the variable :data:`WEBHOOK` has its address.

    Args:
        address: of the server.
        logs: folder for what Prefect says.
        limits: by name, how many flows may hold each at a time.
        on: deployment and slug of the schedules that are switched on.

    Raises:
        RunError: the server or Prefect did not take something.
    """
    _make(address, "/work_pools/", {"name": POOL, "type": "process"})
    for name, description in QUEUES.items():
        _make(address, f"/work_pools/{POOL}/queues", {"name": name, "description": description})
    for name, slots in limits.items():
        if not _make(address, "/v2/concurrency_limits/", {"name": name, "limit": slots}):
            ask(address, "PATCH", f"/v2/concurrency_limits/{name}", {"limit": slots})
    deployed = file()
    if deployed is not None:
        command = ["pipelines.orchestration.registering", "--no-prompt", "deploy", "--all"]
        command += ["--prefect-file", str(_completed(deployed, logs, on))]
        _carry_out(address, command, logs / "deployments.log", f"{deployed}: Prefect does not take these deployments")
    told = file(_AUTOMATIONS)
    if told is not None:
        command = ["pipelines.orchestration.notifications", str(told)]
        _carry_out(address, command, logs / "notifications.log", f"{told}: Prefect does not take these automations")


def _completed(deployed: Path, folder: Path, on: Container[tuple[str, str | None]]) -> Path:
    """Write a copy of the deployments with what they leave out; returns where.

    That is protofl's steps and heartbeats of protofl's flows, and the schedules that are switched on.
    """
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
    """Let flows send a heartbeat every 30 seconds, and tag them so: an automation ends those that stop sending."""
    pool = dict(deployment.get("work_pool") or {})
    variables = dict(pool.get("job_variables") or {})
    variables["env"] = {**(variables.get("env") or {}), "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    deployment["work_pool"] = pool | {"job_variables": variables}
    deployment["tags"] = [*(deployment.get("tags") or ()), "heartbeat-30s"]


def _carry_out(address: Address, module: Sequence[str], log: Path, problem: str) -> None:
    disk.make_folder(log.parent)
    try:
        with disk.create(log) as output:
            subprocess.run(
                python("-m", *module),
                # Its settings may be those of a profile in another home than the one that it is given here.
                env=safe_environment({**environment(address.url), **address.settings}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_SECONDS,
                check=True,
            )
    except subprocess.CalledProcessError as error:
        raise RunError(f"{problem}; {log} says why") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{problem} within {_SECONDS} s; the same command goes on from there") from error


def settle(address: Address) -> None:
    """Say of runs that no worker will go on with what became of them; only while no worker runs.

    One that was under way has crashed: a process that is killed cannot say so itself. One that was due is cancelled, or
    a week's nights would all be carried out when a worker comes.

    Args:
        address: of the server.
    """
    now = datetime.now(UTC)
    asked: dict[str, Any] = {"work_pools": {"name": {"any_": [POOL]}}, "sort": "EXPECTED_START_TIME_ASC"}
    asked["flow_runs"] = {"state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]}}}
    found: list[dict[str, Any]] = []
    while page := ask(address, "POST", "/flow_runs/filter", asked | {"limit": _PAGE, "offset": len(found)}):
        found += page
    for run in found:
        if run["state_type"] != "SCHEDULED":
            state = {"type": "CRASHED", "name": "Crashed", "message": "stopped with its worker"}
        elif run["auto_scheduled"] and run["run_count"] == 0 and _time(run["expected_start_time"]) < now:
            state = {"type": "CANCELLED", "name": "Missed", "message": "no worker ran when it was due"}
        else:
            continue
        ask(address, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _make(address: Address, path: str, described: dict[str, Any]) -> bool:
    """Make what is described; False where it is there already."""
    return ask(address, "POST", path, described, allowed=(409,)) is not None


def ask(address: Address, method: str, path: str, body: dict[str, Any], allowed: tuple[int, ...] = ()) -> Any:
    """Ask a server over its REST interface, again while its database is busy.

    Args:
        address: of the server. method, path, body: of the request.
        allowed: further status codes of an answer.

    Returns:
        The answer's JSON value; None for an allowed status.

    Raises:
        RunError: it does not answer, or refuses.
    """
    delays = iter(_DELAYS_SECONDS)
    while True:
        try:
            with opened(address, path, _SECONDS_TO_ANSWER, method=method, body=body) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            if error.code in allowed:
                return None
            delay = next(delays, None) if error.code == _BUSY else None
            if delay is None:
                reason = f"does not take a request ({path}: HTTP {error.code})"
                raise RunError(f"the Prefect server at {address.shown} {reason}") from error
        except OSError as error:
            raise RunError(f"the Prefect server at {address.shown} does not answer ({error})") from error
        time.sleep(delay)
