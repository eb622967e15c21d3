"""``protofl up`` to ``protofl down`` with the real servers: the only proof that they fit together.

Wrong versions of FastAPI or SQLAlchemy leave a deployment that looks active and never fires; nothing else notices that.
The deployment is ``nightly-comparison`` of ``infra/prefect.yaml`` with a schedule of every minute and a small
configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 500
SECONDS_TO_RUN = 300

PARAMS = {
    "data": {"name": "digits", "limit_per_class": 30},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 1},
    "compare": {"methods": ["fedavg", "fedproto"], "seeds": [0]},
}

pytestmark = pytest.mark.services


@dataclass(frozen=True)
class Folder:
    """A folder of somebody who types commands."""

    path: Path
    environment: dict[str, str]

    def protofl(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pipelines.cli", *arguments],
            cwd=self.path,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_START,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done

    def services(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in json.loads(self.protofl("status", "--json").stdout)}

    def processes(self) -> list[str]:
        """What runs that was started from here: servers, worker, flows, recorders."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.path) in process.environ().get("PROTOFL_SERVICE", ""):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def logs(self) -> str:
        logs = sorted((self.path / ".protofl" / "logs").glob("*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-60:]) for log in logs)


def ask(address: str, body: object) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


@contextmanager
def made_in(path: Path) -> Iterator[Folder]:
    """A configuration and deployments of its own, and nothing left running."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "PROTOFL_"))
    }
    made = Folder(path, outside | {"PYTHONPATH": str(PROJECT)})
    specification = yaml.safe_load((PROJECT / "infra" / "prefect.yaml").read_text())
    [nightly] = [each for each in specification["deployments"] if each["name"] == "nightly-comparison"]
    nightly["schedules"][0]["cron"] = "* * * * *"
    (path / "infra").mkdir()
    (path / "infra" / "prefect.yaml").write_text(yaml.safe_dump(specification))
    (path / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    try:
        yield made
    finally:
        made.protofl("down")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with made_in(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def with_prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A folder with a Prefect server, and no other, for several tests."""
    with made_in(tmp_path_factory.mktemp("prefect")) as made:
        made.protofl("up", "--no-mlflow", "--no-dashboard", "--no-worker")
        assert set(made.services()) == {"prefect"}
        yield made


def test_a_schedule_fires_and_ends_in_a_comparison_and_down_leaves_nothing(folder: Folder) -> None:
    shown = folder.protofl("up").stdout
    first = folder.services()
    assert set(first) == {"prefect", "mlflow", "dashboard", "worker"}
    assert {each["state"] for each in first.values()} == {"healthy"}, folder.logs()
    assert all(each["address"] in shown for each in first.values())
    assert "nightly-comparison: * * * * *" in shown and "weekly-tuning: 0 4 * * 6" in shown
    api = first["prefect"]["address"] + "/api"

    run = the_first_that_ended(folder, api)
    assert run["state"]["type"] == "COMPLETED" and run["auto_scheduled"], f"{run['state']}\n{folder.logs()}"
    [out] = (folder.path / "runs" / "nightly").iterdir()
    assert (out / "comparison.json").exists()

    artifacts = ask(f"{api}/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    [table] = [artifact for artifact in artifacts if artifact["key"] == "table"]
    assert "fedavg" in table["data"] and "fedproto" in table["data"]
    assert "progress" in {artifact["key"] for artifact in artifacts}
    [flow] = ask(f"{api}/flows/filter", {"flows": {"id": {"any_": [run["flow_id"]]}}})
    assert flow["name"] == "compare"

    runs = mlflow_runs(first["mlflow"]["address"])
    children = {run_id: tags for run_id, tags in runs.items() if "mlflow.parentRunId" in tags}
    assert len(children) == 2
    [parent] = {tags["mlflow.parentRunId"] for tags in children.values()}
    assert "fedavg" in runs[parent]["mlflow.note.content"]  # the table, on the parent's page

    pids = {name: entry["pid"] for name, entry in first.items()}
    folder.protofl("up")
    assert {name: entry["pid"] for name, entry in folder.services().items()} == pids

    one_that_takes_hours(folder, api, str(run["deployment_id"]))
    folder.protofl("down")
    assert folder.processes() == []
    assert folder.services() == {}
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    with closing(sqlite3.connect(folder.path / ".protofl" / "prefect" / "prefect.db")) as database:
        states = [state for (state,) in database.execute("SELECT state_type FROM flow_run")]
    assert "CRASHED" in states and not {"RUNNING", "PENDING"} & set(states)
    with closing(sqlite3.connect(folder.path / "mlruns" / "mlflow.db")) as database:
        states = [state for (state,) in database.execute("SELECT status FROM runs")]
    # Nobody had to be ended by force: those under way could still be told of their end.
    assert "KILLED" in states and not {"RUNNING", "FAILED"} & set(states)


RUN = ("--set", "partition.num_clients=4", "--set", "federation.rounds=2", "--set", "engine.clients_per_task=2")


@pytest.mark.parametrize(
    ("workers", "seed", "tasks"),
    [
        (
            0,  # a task is a whole round
            0,
            {"round 1: train-clients, aggregate, evaluate": 1, "round 2: train-clients, aggregate, evaluate": 1}
            | {"prepare-data": 1, "partition-data": 1, "evaluate": 1, "report": 1},
        ),
        (
            2,  # a task is a group of clients, or a stage of the server: two groups, two rounds
            1,
            {"prepare-data": 1, "partition-data": 1, "train-clients": 4, "aggregate": 2}
            | {"evaluate": 3, "report": 1},  # after each round, and all of it at the end
        ),
    ],
)
def test_a_run_in_prefect_reads_as_the_algorithm_does_and_gives_its_bytes(
    with_prefect: Folder, workers: int, seed: int, tasks: dict[str, int]
) -> None:
    folder, api = with_prefect, with_prefect.services()["prefect"]["address"] + "/api"
    asked = ("run", *RUN, "--seed", str(seed))
    plain, shown = f"plain-{seed}", f"shown-{seed}"
    folder.protofl(*asked, "--orchestrator", "inline", "--out", plain, PROTOFL_CACHE="other")  # it trains for itself
    more = ("--set", f"engine.workers={workers}", "--out", shown)
    done = folder.protofl(*asked, *more)  # the server is found without being asked for
    assert digests(folder.path / plain) == digests(folder.path / shown)

    run, artifacts = the_flow_run(api, "federated-experiment", f"fedavg-s{seed}")
    assert tasks_of(api, run["id"], "report") == tasks
    assert {"digits", "fedavg"} <= set(run["tags"])
    assert artifacts["progress"] == 100 and "top1_global" in artifacts["result"]
    assert "tracking" not in json.dumps(run)
    said = lines_of(api, run["id"])
    assert f"fedavg seed {seed}: 2 rounds" in said and f"fedavg seed {seed}: 2 rounds" in done.stderr.splitlines()
    assert "Prefect" not in done.stderr and "Finished in state" not in done.stderr


@pytest.mark.parametrize(
    ("command", "last", "in_table"),
    [
        (("compare",), "compare", ("fedavg", "fedproto")),
        (
            ("sweep", "--vary", "local.lr=0.05,0.1", "--seeds", "0", "--metric", "mean_local"),
            "compare",
            ("0.05", "0.1"),
        ),
        (("tune", "--method", "fedavg", "--trials", "2"), "report", ("trial", "local.lr")),
    ],
    ids=["compare", "sweep", "tune"],
)
def test_many_runs_are_one_flow_that_ends_with_their_table(
    with_prefect: Folder, command: tuple[str, ...], last: str, in_table: tuple[str, ...]
) -> None:
    folder, api = with_prefect, with_prefect.services()["prefect"]["address"] + "/api"
    folder.protofl(*command, "--out", f"many-{command[0]}")
    run, artifacts = the_flow_run(api, command[0], f"{command[0]} many-{command[0]}")
    assert artifacts["progress"] == 100
    assert all(text in artifacts["table"] for text in in_table)
    seen = tasks_of(api, run["id"], last)
    assert seen["prepare-data"] == seen["partition-data"] == seen[last] == 1
    trained = {name for name in seen if name.startswith(("fedavg-s0", "fedproto-s0", "trial-"))}
    assert sum(seen[name] for name in trained) == 2 and len(seen) == 3 + len(trained)


def one_that_takes_hours(folder: Folder, api: str, deployment: str) -> None:
    """Begin a run that is still under way when its worker is stopped."""
    asked = {"parameters": {"overrides": ["federation.rounds=100000"], "out": "long"}}
    begun = ask(f"{api}/deployments/{deployment}/create_flow_run", asked)
    deadline = time.monotonic() + SECONDS_TO_RUN
    while time.monotonic() < deadline:
        [found] = ask(f"{api}/flow_runs/filter", {"flow_runs": {"id": {"any_": [begun["id"]]}}})
        if found["state_type"] == "RUNNING" and list(folder.path.glob("long/runs/*/checkpoint")):
            return  # and trains, in processes of its own
        time.sleep(0.5)
    raise AssertionError(f"the run did not begin within {SECONDS_TO_RUN} s\n{folder.logs()}")


def the_flow_run(api: str, flow: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one run of a flow that has this name, which no other flow has begun, and its artifacts by their keys."""
    asked = {"flows": {"name": {"any_": [flow]}}, "flow_runs": {"name": {"any_": [name]}}}
    [run] = ask(f"{api}/flow_runs/filter", asked)
    assert run["state_type"] == "COMPLETED" and run["parent_task_run_id"] is None
    artifacts = ask(f"{api}/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    return run, {artifact["key"]: artifact["data"] for artifact in artifacts}


def tasks_of(api: str, flow_run: str, last: str) -> dict[str, int]:
    """How many tasks a run has of each name. The server learns of them a moment after they happen, in their order."""
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not seen[last]:
        time.sleep(1)
        found = ask(f"{api}/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}, "limit": 200})
        seen = Counter(task["name"] for task in found)
    return dict(seen)


def lines_of(api: str, flow_run: str) -> list[str]:
    """What a run's page shows as its log."""
    found = ask(f"{api}/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run]}}, "limit": 200})
    return [line["message"] for line in found]


def digests(run: Path) -> dict[str, str]:
    names = ("model.safetensors", "server.safetensors", "history.jsonl", "metrics.json", "curves.csv")
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in names}


def the_first_that_ended(folder: Folder, api: str) -> dict[str, Any]:
    """The first scheduled run, when it has ended."""
    ended = {"deployment_id": {"is_null_": False}, "state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}}
    deadline = time.monotonic() + SECONDS_TO_RUN
    while time.monotonic() < deadline:
        found = ask(f"{api}/flow_runs/filter", {"flow_runs": ended})
        if found:
            return dict(found[0])
        time.sleep(1)
    raise AssertionError(f"no run ended within {SECONDS_TO_RUN} s\n{folder.logs()}")


def mlflow_runs(address: str) -> dict[str, dict[str, str]]:
    """The tags of all runs, by their ids, as the server tells them."""
    api = f"{address}/api/2.0/mlflow"
    experiments = ask(f"{api}/experiments/search", {"max_results": 100})["experiments"]
    asked = {"experiment_ids": [each["experiment_id"] for each in experiments], "max_results": 100}
    found = ask(f"{api}/runs/search", asked).get("runs", [])
    return {run["info"]["run_id"]: {tag["key"]: tag["value"] for tag in run["data"]["tags"]} for run in found}


def test_a_configured_server_that_is_away_costs_one_line(folder: Folder) -> None:
    done = folder.protofl("run", "--out", "run", PREFECT_API_URL="http://127.0.0.1:9/api")
    warnings = [line for line in done.stderr.splitlines() if "127.0.0.1:9" in line]
    assert len(warnings) == 1 and "going on without it" in warnings[0]
    assert "Traceback" not in done.stderr
    assert (folder.path / "run" / "metrics.json").exists()
