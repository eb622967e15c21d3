"""The deployments of ``infra/prefect.yaml`` on a server of our own: registered, and what of them is scheduled.

The server is asked over its REST interface: this process does without importing Prefect.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flcore.errors import RunError

POOL = "protofl-process"
_FILE = Path("infra") / "prefect.yaml"
_SECONDS = 180


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


def file() -> Path | None:
    """The deployments of this folder, else those that come with the project; None where there are none."""
    places = (_FILE, Path(__file__).resolve().parents[2] / _FILE)
    return next((place for place in places if place.exists()), None)


def changed_after(moment: float) -> bool:
    """Whether the file was written after a moment, in seconds since 1970."""
    found = file()
    return found is not None and found.stat().st_mtime > moment


def register(api: str, log: Path) -> None:
    """Make the work pool, and register the deployments as they are in the file, whatever was switched in the pages.

    Args:
        api: of the server.
        log: for what Prefect says.

    Raises:
        RunError: Prefect did not take them.
    """
    found = file()
    if found is None:
        return
    _ask(api, "POST", "/work_pools/", {"name": POOL, "type": "process"}, allowed=(409,))  # 409: it is there
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(found)]
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            env={**os.environ, **environment(api)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
    if done.returncode != 0:
        raise RunError(f"{found}: Prefect does not take these deployments; {log} says why")


def settle(api: str) -> None:
    """Say of runs that no worker will go on with what became of them; only while no worker runs.

    One that was under way has crashed: a process that is killed cannot say so itself. One that was due is cancelled, or
    a week's nights would all be carried out when a worker comes.

    Args:
        api: of the server.
    """
    now = datetime.now(UTC)
    asked = {"work_pools": {"name": {"any_": [POOL]}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 200}
    asked["flow_runs"] = {"state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]}}}
    for run in _ask(api, "POST", "/flow_runs/filter", asked):
        if run["state_type"] != "SCHEDULED":
            state = {"type": "CRASHED", "name": "Crashed", "message": "stopped with its worker"}
        elif run["auto_scheduled"] and run["run_count"] == 0 and _time(run["expected_start_time"]) < now:
            state = {"type": "CANCELLED", "name": "Missed", "message": "no worker ran when it was due"}
        else:
            continue
        _ask(api, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})


def schedules(api: str) -> list[str]:
    """A line per deployment: its name and when it runs next.

    Args:
        api: of the server.
    """
    lines = []
    for deployment in _ask(api, "POST", "/deployments/filter", {"sort": "NAME_ASC"}):
        said = [
            f"{schedule['schedule'].get('cron', 'at intervals')} {schedule['schedule'].get('timezone') or ''}".strip()
            + ("" if schedule["active"] and not deployment["paused"] else " (paused)")
            for schedule in deployment["schedules"]
        ]
        lines.append(f"{deployment['name']}: {', '.join(said) or 'by hand'}")
    return lines


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _ask(api: str, method: str, path: str, body: dict[str, Any], allowed: tuple[int, ...] = ()) -> Any:
    headers = {"Content-Type": "application/json"}
    password = os.environ.get("PREFECT_API_AUTH_STRING")  # beside PREFECT_SERVER_API_AUTH_STRING, where it is asked for
    if password:
        headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
    request = urllib.request.Request(api + path, json.dumps(body).encode(), headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code in allowed:
            return None
        raise RunError(f"the Prefect server at {api} does not take a request ({path}: HTTP {error.code})") from error
    except OSError as error:
        raise RunError(f"the Prefect server at {api} does not answer ({error})") from error
