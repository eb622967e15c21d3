"""``protofl up`` to ``protofl down`` with the real servers: the only proof that they fit together.

Wrong versions of FastAPI or SQLAlchemy leave a deployment that looks active and never fires; nothing else notices that.
The deployment is ``nightly-comparison`` of ``infra/prefect.yaml`` with a schedule of every minute and a small
configuration.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 1200
SECONDS_TO_RUN = 1200

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
        done = self.ended(*arguments, **variables)
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done

    def ended(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "pipelines.cli", *arguments],  # as the command itself, not from its folder
            cwd=self.path,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_START,
        )

    def services(self) -> dict[str, dict[str, Any]]:
        said = self.ended("status", "--json").stdout  # which ends with 4 where none runs
        return {entry["name"]: entry for entry in json.loads(said)}

    def password(self) -> str:
        file = self.path / ".protofl" / "prefect-password"
        return file.read_text().strip() if file.exists() else ""

    def ask(self, address: str, body: object) -> Any:
        """Where the server's database is busy it says 503; Prefect's own client asks again then, too."""
        login = base64.b64encode(self.password().encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        for seconds in (1, 2, 4, 8, None):
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503 or seconds is None:
                    raise
                time.sleep(seconds)
        return None

    def processes(self) -> list[str]:
        """What runs that was started from here: servers, worker, flows, followers."""
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


@contextmanager
def made_in(path: Path, cron: str | None = None) -> Iterator[Folder]:
    """A configuration and deployments of its own, of which one is due as ``cron`` says; and nothing left running."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "PROTOFL_"))
    }
    made = Folder(path, outside | {"PYTHONPATH": str(PROJECT)})
    specification = yaml.safe_load((PROJECT / "infra" / "prefect.yaml").read_text())
    for each in specification["deployments"]:
        each["schedules"][0]["cron"] = cron or each["schedules"][0]["cron"]
    (path / "infra").mkdir()
    (path / "infra" / "prefect.yaml").write_text(yaml.safe_dump(specification))
    (path / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    try:
        yield made
    finally:
        made.protofl("down")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with made_in(tmp_path, cron="* * * * *") as made:
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
    assert all(f"{name}: * * * * * UTC (off)" in shown for name in ("nightly-comparison", "weekly-tuning"))
    folder.protofl("schedule", "on", "nightly-comparison")
    (folder.path / "infra" / "prefect.yaml").touch()  # registered again
    shown = folder.protofl("up").stdout
    assert "nightly-comparison: * * * * * UTC\n" in shown and "weekly-tuning: * * * * * UTC (off)" in shown
    api = first["prefect"]["address"] + "/api"

    run = the_first_that_ended(folder, api)
    assert run["state"]["type"] == "COMPLETED" and run["auto_scheduled"], f"{run['state']}\n{folder.logs()}"
    [out] = (folder.path / "runs" / "nightly").iterdir()
    assert (out / "comparison.json").exists()

    artifacts = folder.ask(f"{api}/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    [table] = [artifact for artifact in artifacts if artifact["key"] == "protofl-nightly-comparison-table"]
    assert "fedavg" in table["data"] and "fedproto" in table["data"]
    assert "protofl-nightly-comparison-progress" in {artifact["key"] for artifact in artifacts}
    [flow] = folder.ask(f"{api}/flows/filter", {"flows": {"id": {"any_": [run["flow_id"]]}}})
    assert flow["name"] == "protofl-compare"

    runs = mlflow_runs(folder, first["mlflow"]["address"])
    children = {run_id: tags for run_id, tags in runs.items() if "mlflow.parentRunId" in tags}
    assert len(children) == 2
    [parent] = {tags["mlflow.parentRunId"] for tags in children.values()}
    assert "fedavg" in runs[parent]["mlflow.note.content"]  # the table, on the parent's page

    pids = {name: entry["pid"] for name, entry in first.items()}
    folder.protofl("up")
    assert {name: entry["pid"] for name, entry in folder.services().items()} == pids

    assert "nightly-comparison: * * * * * UTC (off)" in folder.protofl("schedule", "off", "nightly-comparison").stdout
    # The worker takes a run ten seconds before it begins; that one is no longer the schedule's.
    later = {
        "expected_start_time": {"after_": datetime.now(UTC).isoformat()},
        "state": {"type": {"any_": ["SCHEDULED"]}},
    }
    assert folder.ask(f"{api}/flow_runs/filter", {"flow_runs": later}) == []

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


def asked(address: str, method: str = "GET", body: str | None = None, **headers: str) -> int:
    """The status of an answer."""
    data = None if body is None else body.encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def all_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where the real servers answer, started in a folder whose name no address may hold as it is."""
    with made_in(tmp_path_factory.mktemp("of?all %41#")) as made:
        made.protofl("up", "--no-worker")
        found = made.services()
        assert {each["state"] for each in found.values()} == {"healthy"}, made.logs()
        made.protofl("run", "--out", "run", "--set", "federation.rounds=1")
        beside = [path for path in made.path.parent.iterdir() if path.name.startswith("of") and not path.is_symlink()]
        assert beside == [made.path]
        assert list((made.path / "mlruns" / "artifacts").rglob("metrics.json")) and (made.path / "mlruns" / "mlflow.db")
        assert list((made.path / ".protofl" / "prefect").glob("prefect.db"))
        yield {name: each["address"] for name, each in found.items()} | {"password": made.password()}


def test_another_web_page_has_no_program_carried_out(all_servers: dict[str, str]) -> None:
    """The three requests with which a page could: a flow, a deployment with a step of a shell, a run of it."""
    api = all_servers["prefect"] + "/api"
    login = {"Authorization": f"Basic {base64.b64encode(all_servers['password'].encode()).decode()}"}
    step = {"prefect.deployments.steps.run_shell_script": {"script": "touch owned"}}
    requests = {
        f"{api}/flows/": {"name": "x"},
        f"{api}/deployments/": {"name": "x", "flow_id": "0" * 32, "pull_steps": [step]},
        f"{api}/deployments/{'0' * 32}/create_flow_run": {},
    }
    for address, body in requests.items():
        for origin in ("http://evil.example", "null", "http://localhost:3000"):
            for more in ({}, {"Content-Type": "text/plain"}, login):
                assert asked(address, "POST", json.dumps(body), **{"Origin": origin, **more}) == 403
        assert asked(address, "POST", json.dumps(body)) == 401
        assert asked(address, "POST", json.dumps(body), Host="evil.example", **login) == 403
    flows = f"{api}/flows/filter"
    assert asked(flows, "POST", "{}", **login) == 200
    assert asked(flows, "POST", "{}", **login, Origin=all_servers["prefect"]) == 200


def test_every_server_refuses_other_pages_and_other_names(all_servers: dict[str, str]) -> None:
    pages = {
        "prefect": "/api/health",
        "mlflow": "/api/2.0/mlflow/experiments/get?experiment_id=0",
        "dashboard": "/api/studies",
    }
    for name, page in pages.items():
        address = all_servers[name] + page
        assert asked(address) == asked(address, Origin=all_servers[name]) == 200
        assert asked(address, Origin="http://evil.example") == asked(address, Host="evil.example") == 403
        assert asked(address, "POST", "{}", **{"Origin": "http://evil.example", "Content-Type": "text/plain"}) == 403


RUN = ("--set", "partition.num_clients=4", "--set", "federation.rounds=2", "--set", "engine.clients_per_task=2")


IN_A_ROUND = "train-clients, aggregate, evaluate"


@pytest.mark.parametrize(
    ("workers", "seed", "tasks"),
    [
        (0, 0, {f"round 1: {IN_A_ROUND}": 1, f"round 2: {IN_A_ROUND}": 1}),
        (
            2,  # two groups of clients, two rounds
            1,
            {f"train-clients, round {number}: clients {clients}": 1 for number in (1, 2) for clients in ("0-1", "2-3")}
            | {f"{step}, round {number}": 1 for number in (1, 2) for step in ("aggregate", "evaluate")},
        ),
    ],
)
def test_a_run_in_prefect_reads_as_the_algorithm_does_and_gives_its_bytes(
    with_prefect: Folder, workers: int, seed: int, tasks: dict[str, int]
) -> None:
    folder, api = with_prefect, with_prefect.services()["prefect"]["address"] + "/api"
    asked = ("run", *RUN, "--seed", str(seed))
    plain, shown = f"plain-{seed}", f"shown-{seed}"
    folder.protofl(*asked, "--no-prefect", "--out", plain, PROTOFL_CACHE="other")  # it trains for itself
    is_prepared = any(folder.path.glob(".protofl/cache/prepared/*"))
    more = ("--set", f"engine.workers={workers}", "--out", shown)
    done = folder.protofl(*asked, *more)  # the server is found without being asked for
    assert digests(folder.path / plain) == digests(folder.path / shown)

    run, artifacts = the_flow_run(folder, api, "federated-experiment", f"fedavg-s{seed}")
    partitioned = f"partition-data, seed {seed}"
    around = {"prepare-data": 1, partitioned: 1, "evaluate": 1, "report": 1}
    assert tasks_of(folder, api, run["id"], "report") == around | tasks
    found = {task["name"]: task for task in task_runs(folder, api, run["id"])}
    assert found["prepare-data"]["state_name"] == ("Cached" if is_prepared else "Completed")
    assert inputs_of(found["prepare-data"])["data"]["limit_per_class"] == 30
    assert inputs_of(found[partitioned])["seed"] == seed
    prepared = {"input_type": "task_run", "id": found["prepare-data"]["id"]}
    assert prepared in found[partitioned]["task_inputs"]["prepared"]
    for name in tasks:
        assert inputs_of(found[name])["round"] == int(name.partition("round ")[2][0])
    assert inputs_of(found["evaluate"]) == {"step": "evaluate", "folder": shown}
    assert {"digits", "fedavg"} <= set(run["tags"])
    assert artifacts["progress"] == 100 and "top1_global" in artifacts["result"]
    assert "tracking" not in json.dumps(run)
    said = lines_of(folder, api, run["id"])
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
    run, artifacts = the_flow_run(folder, api, f"protofl-{command[0]}", f"{command[0]} many-{command[0]}")
    assert artifacts["progress"] == 100
    assert all(text in artifacts["table"] for text in in_table)
    seen = tasks_of(folder, api, run["id"], last)
    assert seen["prepare-data"] == seen["partition-data, seed 0"] == seen[last] == 1
    trained = {name for name in seen if name.startswith(("fedavg-s0", "fedproto-s0", "trial "))}
    assert sum(seen[name] for name in trained) == 2 and len(seen) == 3 + len(trained)
    found = task_runs(folder, api, run["id"])
    before = {one["id"]: {each["id"] for each in one["task_inputs"].get("wait_for", ())} for one in found}
    ids = {name: {one["id"] for one in found if one["name"] == name} for name in seen}
    assert [before[one] for one in ids["partition-data, seed 0"]] == [ids["prepare-data"]]
    assert all(before[one] == ids["partition-data, seed 0"] for name in trained for one in ids[name])
    assert [before[one] for one in ids[last]] == [set().union(*(ids[name] for name in trained))]


def test_a_comparison_with_a_run_that_failed_has_failed_and_so_has_the_task_of_that_run(with_prefect: Folder) -> None:
    """At 1e30 training diverges in the first steps; the other run ends well, and the table is there."""
    folder, api = with_prefect, with_prefect.services()["prefect"]["address"] + "/api"
    diverging = ("--variant", "bad=fedavg,local.lr=1e30", "--methods", "fedproto,bad", "--seeds", "0")
    command = [sys.executable, "-m", "pipelines.cli", "compare", *diverging, "--out", "some-failed"]
    done = subprocess.run(command, cwd=folder.path, env=folder.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "protofl: 1 of 2 runs failed" in done.stderr and "fedproto" in done.stdout
    run, artifacts = the_flow_run(folder, api, "protofl-compare", "compare some-failed", state="FAILED")
    assert "1 of 2 runs failed; the first of them, fedavg seed 0, bad: round 1" in run["state"]["message"]
    assert "fedproto" in artifacts["table"]
    tasks_of(folder, api, run["id"], "compare")
    found = task_runs(folder, api, run["id"])
    failed = [task["state"]["message"] for task in found if task["state_type"] == "FAILED"]
    assert len(failed) == 1 and "round 1" in failed[0]
    assert {task["state_type"] for task in found} == {"COMPLETED", "FAILED"}


def one_that_takes_hours(folder: Folder, api: str, deployment: str) -> None:
    """Begin a run that is still under way when its worker is stopped."""
    deadline = time.monotonic() + SECONDS_TO_RUN
    at_work = {"deployment_id": {"any_": [deployment]}, "state": {"type": {"any_": ["PENDING", "RUNNING"]}}}
    while folder.ask(f"{api}/flow_runs/filter", {"flow_runs": at_work}):  # one at a time: a second one is cancelled
        assert time.monotonic() < deadline, folder.logs()
        time.sleep(0.5)
    asked = {"parameters": {"overrides": ["federation.rounds=100000"], "out": "long"}}
    begun = folder.ask(f"{api}/deployments/{deployment}/create_flow_run", asked)
    while time.monotonic() < deadline:
        [found] = folder.ask(f"{api}/flow_runs/filter", {"flow_runs": {"id": {"any_": [begun["id"]]}}})
        if found["state_type"] == "RUNNING" and list(folder.path.glob("long/runs/*/checkpoint")):
            return  # and trains, in processes of its own
        time.sleep(0.5)
    raise AssertionError(f"the run did not begin within {SECONDS_TO_RUN} s\n{folder.logs()}")


def test_a_flow_whose_worker_is_lost_ends_as_crashed(tmp_path: Path) -> None:
    """All its processes are killed, as when a machine loses power; its last heartbeat is then 30 s old at most."""
    with made_in(tmp_path) as folder:
        folder.protofl("up", "--no-dashboard")
        services = folder.services()
        api = services["prefect"]["address"] + "/api"
        named = {"deployments": {"name": {"any_": ["nightly-comparison"]}}}
        [deployment] = folder.ask(f"{api}/deployments/filter", named)
        one_that_takes_hours(folder, api, deployment["id"])
        wait_until(folder, lambda: mlflow_statuses(folder, "long") == {"RUNNING"})
        worker = psutil.Process(services["worker"]["pid"])
        for process in [worker, *worker.children(recursive=True)]:
            process.kill()
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline:
            [found] = folder.ask(
                f"{api}/flow_runs/filter", {"flow_runs": {"deployment_id": {"any_": [deployment["id"]]}}}
            )
            if found["state_type"] != "RUNNING":
                break
            time.sleep(1)
        assert (found["state_type"], found["state"]["message"]) == ("CRASHED", "no heartbeat for 90 seconds")
        wait_until(folder, lambda: mlflow_statuses(folder, "long") == {"KILLED"})
        assert "no sign of life since" in mlflow_reasons(folder, "long")[0]


def the_flow_run(
    folder: Folder, api: str, flow: str, name: str, state: str = "COMPLETED"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one run of a flow that has this name, which no other flow has begun, and its artifacts by their keys."""
    asked = {"flows": {"name": {"any_": [flow]}}, "flow_runs": {"name": {"any_": [name]}}}
    [run] = folder.ask(f"{api}/flow_runs/filter", asked)
    assert run["state_type"] == state and run["parent_task_run_id"] is None
    artifacts = folder.ask(f"{api}/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    return run, {str(artifact["key"]).rpartition("-")[2]: artifact["data"] for artifact in artifacts}


def tasks_of(folder: Folder, api: str, flow_run: str, last: str) -> dict[str, int]:
    """How many tasks a run has of each name. The server learns of them a moment after they happen, in their order."""
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not seen[last]:
        time.sleep(1)
        seen = Counter(task["name"] for task in task_runs(folder, api, flow_run))
    return dict(seen)


def task_runs(folder: Folder, api: str, flow_run: str) -> list[dict[str, Any]]:
    asked = {"flow_runs": {"id": {"any_": [flow_run]}}, "limit": 200}
    return list(folder.ask(f"{api}/task_runs/filter", asked))


def inputs_of(task: dict[str, Any]) -> dict[str, Any]:
    """The values that the page of a task shows as its inputs."""
    shown: dict[str, Any] = {
        name: given["type"]
        for name, inputs in task["task_inputs"].items()
        for given in inputs
        if given["input_type"] == "constant"
    }
    for name in shown.keys() & {"data", "partition", "round", "seed"}:
        shown[name] = json.loads(shown[name])
    return shown


def lines_of(folder: Folder, api: str, flow_run: str) -> list[str]:
    """What a run's page shows as its log."""
    found = folder.ask(f"{api}/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run]}}, "limit": 200})
    return [line["message"] for line in found]


def digests(run: Path) -> dict[str, str]:
    names = ("model.safetensors", "server.safetensors", "history.jsonl", "metrics.json", "curves.csv")
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in names}


def the_first_that_ended(folder: Folder, api: str) -> dict[str, Any]:
    """The first scheduled run, when it has ended."""
    ended = {"deployment_id": {"is_null_": False}, "state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}}
    deadline = time.monotonic() + SECONDS_TO_RUN
    while time.monotonic() < deadline:
        found = folder.ask(f"{api}/flow_runs/filter", {"flow_runs": ended})
        if found:
            return dict(found[0])
        time.sleep(1)
    raise AssertionError(f"no run ended within {SECONDS_TO_RUN} s\n{folder.logs()}")


def mlflow_runs(folder: Folder, address: str) -> dict[str, dict[str, str]]:
    """The tags of all runs, by their ids, as the server tells them."""
    api = f"{address}/api/2.0/mlflow"
    experiments = folder.ask(f"{api}/experiments/search", {"max_results": 100})["experiments"]
    asked = {"experiment_ids": [each["experiment_id"] for each in experiments], "max_results": 100}
    found = folder.ask(f"{api}/runs/search", asked).get("runs", [])
    return {run["info"]["run_id"]: {tag["key"]: tag["value"] for tag in run["data"]["tags"]} for run in found}


def test_a_configured_server_that_is_away_costs_one_line(folder: Folder) -> None:
    done = folder.protofl("run", "--out", "run", PREFECT_API_URL="http://127.0.0.1:9/api")
    warnings = [line for line in done.stderr.splitlines() if "127.0.0.1:9" in line]
    assert len(warnings) == 1 and "going on without it" in warnings[0]
    assert "Traceback" not in done.stderr
    assert (folder.path / "run" / "metrics.json").exists()


# ---- deployments -------------------------------------------------------------------------------------------------


@dataclass
class Receiver:
    """A webhook on loopback: what was sent to it."""

    address: str
    told: list[str]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    told: list[str] = []

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *about: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Takes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Receiver(f"http://127.0.0.1:{server.server_port}/hook", told)
    server.shutdown()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Folder]:
    """A folder with a server and a worker whose deployments are started by hand."""
    with made_in(tmp_path_factory.mktemp("deployed")) as made:
        made.protofl("up", "--no-mlflow", "--no-dashboard", PROTOFL_WEBHOOK=receiver.address)
        yield made


def test_it_is_trained_anew_when_the_data_are_new(deployed: Folder) -> None:
    """Thirty images of a class, the same thirty, then forty: trained, left alone, trained."""
    folder, api = deployed, deployed.services()["prefect"]["address"] + "/api"
    states = []
    for size in (30, 30, 40):
        run = started(folder, api, "retrain-on-new-data", overrides=[f"data.limit_per_class={size}"])
        states.append(ended(folder, api, run)["state"])
    assert [state["type"] for state in states] == ["COMPLETED"] * 3
    assert [state["name"] for state in states] == ["Completed", "Unchanged", "Completed"]
    said = [state["message"] for state in states]
    assert "none has finished before" in said[0] and "nothing to train" in said[1] and "the last run was" in said[2]
    home = folder.path / "runs" / "retrained"
    runs = sorted(path.parent.name for path in home.glob("*/metrics.json"))
    last = json.loads((home / "last.json").read_text())
    assert len(runs) == 2 and last["run"] in runs
    [first] = [run for run in runs if run != last["run"]]
    assert first in said[1] and first in said[2]
    limits = {"gate": {"mean_local": 2.0}, "overrides": ["data.limit_per_class=20"]}  # no accuracy is above 1
    missed = ended(folder, api, started(folder, api, "retrain-on-new-data", **limits))["state"]
    assert missed["type"] == "FAILED" and "gate missed: mean_local = 0." in missed["message"]
    assert json.loads((home / "last.json").read_text()) == last


@pytest.mark.parametrize(
    ("way", "seed", "state", "status", "reason"),
    [
        ("limit", 1, "Failed", "FAILED", "limit_hours = 0.02: the time is up"),
        ("kill", 2, "Crashed", "KILLED", "Crashed"),
        ("cancel", 3, "Cancelled", "KILLED", "Cancel"),
    ],
)
def test_a_flow_that_ends_badly_says_why_in_mlflow_and_to_the_webhook(
    deployed: Folder, receiver: Receiver, way: str, seed: int, state: str, status: str, reason: str
) -> None:
    """A minute is the limit of the first; the process of the second is killed; a person cancels the third."""
    folder, api = deployed, deployed.services()["prefect"]["address"] + "/api"
    out = f"badly-{way}"
    asked: dict[str, Any] = {"out": out, "overrides": ["federation.rounds=100000"], "methods": ["fedavg"]}
    asked["seeds"] = [seed]  # the same run would be found again
    limit = {"limit_hours": 0.02} if way == "limit" else {"limit_hours": None}
    run = started(folder, api, "nightly-comparison", **asked, **limit)
    if way != "limit":
        wait_until(folder, lambda: list(folder.path.glob(f"{out}/runs/*/checkpoint")))
        wait_until(folder, lambda: mlflow_statuses(folder, out))
    if way == "kill":
        [process] = [each for each in psutil.process_iter() if is_flow(each, run)]
        process.kill()
    if way == "cancel":
        folder.ask(f"{api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})

    found = ended(folder, api, run)
    assert found["state"]["name"] == state, found["state"]
    wait_until(folder, lambda: mlflow_statuses(folder, out) == {status})
    wait_until(folder, lambda: any(reason in tag for tag in mlflow_reasons(folder, out)))
    name = found["name"]
    wait_until(folder, lambda: any(name in text and state in text for text in receiver.told))


def test_the_form_refuses_what_no_flow_can_carry_out(deployed: Folder) -> None:
    api = deployed.services()["prefect"]["address"] + "/api"
    for parameters in ({"trials": 0}, {"objective": "beauty"}, {"limit_hours": "long"}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            started(deployed, api, "weekly-tuning", **parameters)
        assert caught.value.code in (409, 422), parameters


PLANTED = ("sitecustomize", "pipelines", "flcore", "random", "numpy", "torch", "prefect")


def test_no_process_imports_modules_of_the_working_folder(tmp_path: Path) -> None:
    """Each file would leave a mark and end the process: of a command, a server, the worker, a flow, a hook."""
    home, marks = tmp_path / "home", tmp_path / "marks"
    home.mkdir()
    marks.mkdir()
    with made_in(home) as folder:
        for name in PLANTED:
            code = f"open({str(marks / name)!r}, 'w').close()\nraise SystemExit({name!r})\n"
            (home / f"{name}.py").write_text(code)
        folder.protofl("up", "--no-mlflow", "--no-dashboard")
        api = folder.services()["prefect"]["address"] + "/api"
        run = started(folder, api, "nightly-comparison", out="good")
        assert ended(folder, api, run)["state"]["type"] == "COMPLETED", folder.logs()
        assert (home / "good" / "comparison.json").exists()

        run = started(folder, api, "nightly-comparison", out="bad", overrides=["federation.rounds=100000"])
        wait_until(folder, lambda: mlflow_statuses(folder, "bad"))
        folder.ask(f"{api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        assert ended(folder, api, run)["state"]["type"] == "CANCELLED", folder.logs()
        wait_until(folder, lambda: mlflow_statuses(folder, "bad") == {"KILLED"})
    assert list(marks.iterdir()) == []


HOLDER = """\
import sys, time
from prefect import flow
from pipelines.orchestration import flow_runs

flow_runs.visible_gpus = lambda: ["0"]  # this machine may have none

@flow
def holds():
    with flow_runs.gpus_held("cuda", print):
        print("in", time.monotonic(), flush=True)
        time.sleep(3)
        print("out", time.monotonic(), flush=True)

holds()
"""


def test_one_flow_at_a_time_holds_a_gpu(deployed: Folder) -> None:
    """Two that begin together: the second is let in when the first, three seconds later, is out."""
    from pipelines.orchestration.gpus import limit_name

    folder, api = deployed, deployed.services()["prefect"]["address"] + "/api"
    folder.ask(f"{api}/v2/concurrency_limits/", {"name": limit_name("0"), "limit": 1})
    (folder.path / "holder.py").write_text(HOLDER)
    both = [
        subprocess.Popen(
            [sys.executable, "holder.py"],
            cwd=folder.path,
            env=folder.environment | {"PREFECT_API_URL": api, "PREFECT_API_AUTH_STRING": folder.password()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=SECONDS_TO_RUN)[0] for process in both]
    held = [[line.split() for line in text.splitlines() if line[:3] in ("in ", "out")] for text in said]
    times = sorted([float(moment) for _, moment in lines] for lines in held)
    (first_in, first_out), (second_in, _) = times
    assert first_in + 3 <= first_out <= second_in
    assert all(limit_name("0") in text for text in said)


def started(folder: Folder, api: str, deployment: str, **parameters: Any) -> str:
    """Start a deployment by hand; returns the id of its flow run."""
    [found] = folder.ask(f"{api}/deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})
    asked = {"parameters": found["parameters"] | parameters}
    return str(folder.ask(f"{api}/deployments/{found['id']}/create_flow_run", asked)["id"])


def ended(folder: Folder, api: str, run: str) -> dict[str, Any]:
    """A flow run when it has ended."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        [now] = folder.ask(f"{api}/flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        found.update(now)
        return now["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

    wait_until(folder, has_ended)
    return found


def wait_until(folder: Folder, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_TO_RUN
    while time.monotonic() < deadline:
        if holds():
            return
        time.sleep(0.5)
    raise AssertionError(f"not within {SECONDS_TO_RUN} s\n{folder.logs()}")


def is_flow(process: psutil.Process, run: str) -> bool:
    """Whether a process carries out a flow run; the servers and the worker only know of it."""
    try:
        return process.environ().get("PREFECT__FLOW_RUN_ID") == run and "prefect.engine" in process.cmdline()
    except psutil.Error:
        return False


def mlflow_statuses(folder: Folder, out: str) -> set[str]:
    return {status for status, _ in mlflow_rows(folder, out)}


def mlflow_reasons(folder: Folder, out: str) -> list[str]:
    return [reason for _, reason in mlflow_rows(folder, out) if reason]


def mlflow_rows(folder: Folder, out: str) -> list[tuple[str, str | None]]:
    """Status, and why it was stopped, of the runs whose folder lies in ``out``."""
    names = [path.name for path in folder.path.glob(f"{out}/runs/*")]
    database = folder.path / "mlruns" / "mlflow.db"
    if not database.exists() or not names:
        return []
    asked = (
        "SELECT status, tags.value FROM runs LEFT JOIN tags ON tags.run_uuid = runs.run_uuid "
        f"AND tags.key = 'protofl.stopped' WHERE runs.name IN ({', '.join('?' * len(names))})"
    )
    with closing(sqlite3.connect(database)) as opened:
        return list(opened.execute(asked, names))
