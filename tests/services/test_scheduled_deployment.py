"""A scheduled run on a real Prefect server: the only proof that server, deployment, schedule and worker fit together.

Wrong versions of FastAPI or SQLAlchemy leave a deployment that looks active and never fires; nothing else notices that.
The deployment is the one in ``infra/prefect.yaml`` with two changes: it runs every minute, and it trains for one round.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 120
SECONDS_TO_RUN = 240


@dataclass(frozen=True)
class Service:
    """A process that this test started, and where it writes."""

    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class Prefect:
    """A running server and the environment in which ``prefect`` commands talk to it."""

    api: str
    environment: dict[str, str]
    folder: Path

    @property
    def tracking_database(self) -> Path:
        """Where flows log to, so that the test leaves nothing in the project."""
        return self.folder / "mlflow.db"

    def command(self, *arguments: str) -> str:
        """Run a ``prefect`` command from the project's root; its output is shown if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=PROJECT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_START,
        )
        assert done.returncode == 0, f"prefect {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def request(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """Ask the server's REST API."""
        request = urllib.request.Request(
            self.api + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else None


def start(name: str, arguments: list[str], environment: dict[str, str], folder: Path) -> Service:
    """Start a ``prefect`` process in a process group of its own, with its output in a file."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=PROJECT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Service(process, log)


def stop(service: Service) -> None:
    """End a process and everything it started: politely, then by force.

    Prefect turns SIGTERM into SIGINT, which a process started in the background of a script ignores: hence twice.
    """
    if service.process.poll() is not None:
        return
    # Flow runs live in sessions of their own, so the group alone would leave them behind.
    descendants = psutil.Process(service.process.pid).children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        os.killpg(service.process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.process.wait(8)
            break
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    psutil.wait_procs(descendants, timeout=5)


def tail(*logs: Path) -> str:
    """The last lines of logs, for the message of a failure."""
    return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-60:]) for log in logs)


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[Prefect]:
    """A persistent Prefect server on a free loopback port, with a home of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
    }
    prefect = Prefect(api, environment, tmp_path)
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{prefect.tracking_database}"
    server = start("server", ["server", "start", "--host", "127.0.0.1", "--port", str(port)], environment, tmp_path)
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{api}/health", timeout=2):
                break
            if server.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the Prefect server did not start\n{tail(server.log)}")
            time.sleep(0.5)
        yield prefect
    finally:
        stop(server)


@pytest.fixture
def deployment_id(prefect: Prefect) -> str:
    """The id of the nightly deployment, made to fire every minute on something small."""
    specification = yaml.safe_load((PROJECT / "infra" / "prefect.yaml").read_text())
    [deployment] = specification["deployments"]
    deployment["schedules"][0]["cron"] = "* * * * *"
    deployment["parameters"]["overrides"] = ["federation.rounds=1", "partition.num_clients=4"]
    deployment["parameters"]["out"] = str(prefect.folder / "run")
    prefect_file = prefect.folder / "prefect.yaml"
    prefect_file.write_text(yaml.safe_dump(specification))
    pool = deployment["work_pool"]["name"]
    prefect.command("work-pool", "create", pool, "--type", "process", "--overwrite")
    prefect.command("--no-prompt", "deploy", "--all", "--prefect-file", str(prefect_file))
    [found] = prefect.request("POST", "/deployments/filter", {})
    assert found["name"] == "nightly-digits"
    return str(found["id"])


@pytest.fixture
def worker(prefect: Prefect, deployment_id: str) -> Iterator[Service]:
    """A process worker on the deployment's pool."""
    arguments = ["worker", "start", "--pool", "protofl-process", "--limit", "1", "--install-policy", "never"]
    worker = start("worker", arguments, prefect.environment, prefect.folder)
    try:
        yield worker
    finally:
        # Paused first: a run that begins between the list of descendants and the signal would be left behind.
        prefect.request("PATCH", f"/deployments/{deployment_id}", {"paused": True})
        stop(worker)


@pytest.mark.services
def test_a_scheduled_run_completes(prefect: Prefect, deployment_id: str, worker: Service) -> None:
    """Within four minutes the schedule has fired, without anybody asking, and the flow has ended well."""
    # By deployment, because the training inside is a flow run of its own that ends earlier.
    ended_runs = {
        "deployment_id": {"any_": [deployment_id]},
        "state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}},
    }
    deadline = time.monotonic() + SECONDS_TO_RUN
    ended: list[dict[str, Any]] = []
    while not ended and time.monotonic() < deadline:
        assert worker.process.poll() is None, f"the worker ended\n{tail(worker.log)}"
        ended = prefect.request("POST", "/flow_runs/filter", {"flow_runs": ended_runs})
        time.sleep(1)
    logs = tail(prefect.folder / "server.log", worker.log)
    assert ended, f"no run ended within {SECONDS_TO_RUN} s\n{logs}"
    run = ended[0]
    assert run["state"]["type"] == "COMPLETED", f"{run['state']}\n{logs}"
    assert run["auto_scheduled"] is True
    assert json.loads((prefect.folder / "run" / "metrics.json").read_text())["rounds"] == 1
    assert prefect.tracking_database.exists(), "the worker's environment did not reach the flow"


def test_the_committed_deployment_is_nightly_in_utc_and_names_no_path() -> None:
    """What is committed must deploy from any directory on any machine."""
    text = (PROJECT / "infra" / "prefect.yaml").read_text()
    [deployment] = yaml.safe_load(text)["deployments"]
    assert deployment["name"] == "nightly-digits"
    [schedule] = deployment["schedules"]
    assert (schedule["cron"], schedule["timezone"]) == ("0 3 * * *", "UTC")
    assert str(PROJECT) not in text
