"""A run that reports to a Prefect server shows there as the algorithm reads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.services


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, body: object | None = None) -> list[dict[str, object]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_the_tasks_of_a_run_carry_the_names_of_its_steps(tmp_path: Path) -> None:
    """Two rounds of two groups of clients: 2 × 2 trainings, 2 aggregations, 2 evaluations and the final one."""
    api = f"http://127.0.0.1:{free_port()}/api"
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "home"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = [sys.executable, "-m", "pipelines.orchestration.embedded_server", api.split(":")[2].removesuffix("/api")]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        wait_for(f"{api}/health", server)
        values = (
            "data.limit_per_class=20 partition.num_clients=4 partition.alpha=1.0 partition.min_size=5 "
            "federation.rounds=2 engine.clients_per_task=2 tracking.enabled=false"
        )
        run = [sys.executable, "-m", "pipelines.cli", "run", "--out", "run"]
        run += [part for value in values.split() for part in ("--set", value)]
        done = subprocess.run(
            run,
            cwd=tmp_path,
            env={**environment, "PREFECT_API_URL": api, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        flows = {str(flow["name"]) for flow in ask(f"{api}/flows/filter", {})}
        assert {"federated-experiment", "federated-training"} <= flows
        expected = {
            "prepare-data": 1,
            "partition-data": 1,
            "train-clients": 4,
            "aggregate": 2,
            "evaluate": 3,
            "report": 1,
        }
        # The server records task runs from events, a moment after they happen.
        deadline = time.monotonic() + 60
        seen: Counter[str] = Counter()
        while time.monotonic() < deadline and any(seen[name] < count for name, count in expected.items()):
            time.sleep(1)
            seen = Counter(str(run["name"]).rsplit("-", 1)[0] for run in ask(f"{api}/task_runs/filter", {"limit": 200}))
        assert {name: seen[name] for name in expected} == expected
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(timeout=30)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            ask(url)
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError("the server did not answer")
