"""The topology of ``infra/compose.yaml`` without containers: its commands and variables, real servers on loopback.

PostgreSQL of the distribution (``apt-get install postgresql``) and a store that speaks S3; Prefect, MLflow and Optuna
on them; two workers on one pool. All but the store run in what the image has, ``infra/requirements-production.lock``.
``make test-team`` makes the environments. Only names of hosts, ports and secrets are put in place of the file's own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.services

PROJECT = Path(__file__).resolve().parents[2]
TEAM, STORE = PROJECT / ".venv-team", PROJECT / ".venv-store"
COMPOSE = yaml.safe_load((PROJECT / "infra" / "compose.yaml").read_text())["services"]
SECONDS = 1500

PARAMS: Mapping[str, Mapping[str, Any]] = {
    "data": {"limit_per_class": 20},
    "partition": {"num_clients": 4, "min_size": 5},
    "federation": {"rounds": 3},
    "compare": {"methods": ["fedavg", "fedproto"], "seeds": [0], "settings": {}},
}


@dataclass(frozen=True)
class Team:
    """Servers, a store and two workers, and the project's folder in which they were deployed.

    Attributes:
        folder: of the project.
        logs: a file per service.
        ports: by the name of a service.
        secrets: by the name of a variable.
    """

    folder: Path
    logs: Path
    ports: Mapping[str, int]
    secrets: Mapping[str, str]

    def place(self, text: str) -> str:
        """A word of the file with this machine's hosts and ports, and the secrets of the environment."""
        for name in ("prefect", "mlflow", "store"):
            text = re.sub(rf"(?<=http://){name}:\d+", f"127.0.0.1:{self.ports[name]}", text)
        text = text.replace("@postgres/", f"@127.0.0.1:{self.ports['postgres']}/").replace("0.0.0.0", "127.0.0.1")
        return re.sub(r"\$\{(\w+)[^}]*\}", lambda found: self.secrets.get(found[1], ""), text)

    def environment(self, service: str) -> dict[str, str]:
        """What a service finds in its environment: what the file and the image say, nothing of this process."""
        given = {name: self.place(str(value)) for name, value in COMPOSE[service].get("environment", {}).items()}
        given |= {name: "127.0.0.1" for name, value in given.items() if value == "postgres"}
        given |= {name: str(self.ports["postgres"]) for name, value in given.items() if value == "5432"}
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        image = {
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "DO_NOT_TRACK": "true",
            "DVC_NO_ANALYTICS": "1",
        }
        image |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        path = os.pathsep.join([str(self.folder / "bin"), str(TEAM / "bin"), os.environ["PATH"]])
        own = {"PREFECT_HOME": str(self.logs / f"{service}-home"), "PATH": path}
        return kept | image | own | given

    def command(self, service: str) -> list[str]:
        """What a service is started by."""
        said = COMPOSE[service]["command"]
        words = [self.place(word) for word in (shlex.split(said) if isinstance(said, str) else said)]
        if "--port" in words:
            words[words.index("--port") + 1] = str(self.ports[service])
        return words

    def ask(self, service: str, path: str, body: object) -> Any:
        """Post to a server."""
        address = f"http://127.0.0.1:{self.ports[service]}{path}"
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def type(self, *words: str, service: str = "worker") -> str:
        """Type a command in the folder, as somebody on a service's machine; returns what it prints."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment(service), capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}\n{self.ends()}"
        return done.stdout

    def sql(self, database: str, statement: str) -> str:
        """What PostgreSQL answers, without ornaments."""
        words = [
            str(postgres_programs() / "psql"),
            "-h",
            "127.0.0.1",
            "-p",
            str(self.ports["postgres"]),
            "-U",
            "protofl",
        ]
        password = {"PGPASSWORD": self.secrets["POSTGRES_PASSWORD"]}
        done = subprocess.run(
            [*words, "-d", database, "-v", "ON_ERROR_STOP=1", "-Atc", statement],
            env=os.environ | password,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def until(self, holds: Callable[[], object], what: str) -> Any:
        """Wait; returns what holds then."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):
                if found := holds():
                    return found
            time.sleep(0.5)
        raise AssertionError(f"{what}: not within {SECONDS} s\n{self.ends()}")

    def ends(self) -> str:
        """The ends of all logs."""
        logs = sorted(self.logs.glob("*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-25:]) for log in logs)


# ---- the services ------------------------------------------------------------------------------------------------


def postgres_programs() -> Path:
    """Where PostgreSQL's programs are; Debian keeps them off the PATH."""
    found = shutil.which("initdb") or next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None)
    if found is None:
        pytest.skip("initdb is not there: apt-get install postgresql")
    return Path(found).resolve().parent


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    for made in (TEAM, STORE):
        if not (made / ".ready").exists():
            pytest.skip(f"{made.name} is not there: `make test-team` makes it")
    programs = postgres_programs()
    names = ("postgres", "store", "prefect", "mlflow", "dashboard", "worker-1", "worker-2")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    hidden = {name: secrets.token_hex(16) for name in ("POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY")}
    base = tmp_path_factory.mktemp("team")
    made = Team(project_in(base / "project"), base / "logs", ports, hidden)
    made.logs.mkdir()
    with ExitStack() as stack:
        stack.enter_context(postgres(made, programs))
        stack.enter_context(running(made, "store", [str(STORE / "bin" / "moto_server"), "-p", str(ports["store"])], {}))
        made.until(lambda: answers(made, "store", "/"), "the store")
        made.type(*made.command("bucket"), service="bucket")
        pages = (("prefect", "/api/health"), ("mlflow", "/health"), ("dashboard", "/api/meta"))
        for service, _ in pages:
            stack.enter_context(running(made, service, made.command(service), made.environment(service)))
        for service, health in pages:
            made.until(lambda at=(service, health): answers(made, *at), service)
        made.type(*made.command("deploy"), service="deploy")
        for name in ("worker-1", "worker-2"):
            own = {"PREFECT_WORKER_WEBSERVER_PORT": str(ports[name]), "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1"}
            command = [*made.command("worker"), "--name", name]
            stack.enter_context(running(made, name, command, made.environment("worker") | own))
            made.until(lambda name=name: answers(made, name, "/health"), name)
        yield made


@contextmanager
def postgres(team: Team, programs: Path) -> Iterator[None]:
    """A cluster of its own, with the databases that the image and ``infra/postgres`` make."""
    # Its processes belong to an ordinary user, who must be able to enter all folders above.
    user = "postgres" if os.geteuid() == 0 else None
    home = Path(tempfile.mkdtemp(prefix="protofl-postgres-"))
    (home / "password").write_text(team.secrets["POSTGRES_PASSWORD"])
    if user is not None:
        for path in (home, home / "password"):
            shutil.chown(path, user)
    data, port = str(home / "data"), str(team.ports["postgres"])
    try:
        begun = [str(programs / "initdb"), "-D", data, "-U", "protofl", "--auth=scram-sha-256", "--encoding=UTF8"]
        subprocess.run([*begun, f"--pwfile={home / 'password'}"], check=True, capture_output=True, user=user, cwd=home)
        (home / "password").unlink()
        server = [str(programs / "postgres"), "-D", data, "-h", "127.0.0.1", "-p", port, "-k", str(home)]
        with running(team, "postgres", server, dict(os.environ), user=user, folder=home):
            ready = [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", port]
            team.until(lambda: subprocess.run(ready, capture_output=True).returncode == 0, "PostgreSQL")
            team.sql("postgres", f"CREATE DATABASE {COMPOSE['postgres']['environment']['POSTGRES_DB']}")
            for line in (PROJECT / "infra" / "postgres" / "databases.sql").read_text().splitlines():
                if not line.startswith("--"):
                    team.sql("postgres", line)
            yield
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def running(
    team: Team,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    user: str | None = None,
    folder: Path | None = None,
) -> Iterator[None]:
    """A service until the end of the block, and all that it has started."""
    with (team.logs / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder or team.folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            user=user,
        )
        try:
            yield
        finally:
            polite = (
                signal.SIGINT if name == "postgres" else signal.SIGTERM
            )  # of PostgreSQL: without waiting for clients
            with suppress(ProcessLookupError):
                os.killpg(process.pid, polite)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def answers(team: Team, service: str, path: str) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{team.ports[service]}{path}", timeout=3):
        return True


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def project_in(folder: Path) -> Path:
    """The files of this checkout, as a repository of its own; a smaller comparison, which is due every minute."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (PROJECT / name).exists() and not name.startswith(("tests/", "docs/")) and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, folder / name)
    params = yaml.safe_load((folder / "params.yaml").read_text())
    for section, values in PARAMS.items():
        params[section] |= values
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    deployments = yaml.safe_load((folder / "infra" / "prefect.yaml").read_text())
    [nightly] = [each for each in deployments["deployments"] if each["name"] == "nightly-comparison"]
    nightly["schedules"][0] |= {"cron": "* * * * *", "active": True}
    (folder / "infra" / "prefect.yaml").write_text(yaml.safe_dump(deployments))
    (folder / "bin").mkdir()
    script = folder / "bin" / "protofl"  # as infra/Dockerfile makes it
    script.write_text('#!/bin/sh\nexec python -m pipelines.cli "$@"\n')
    script.chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


# ---- what they do together ---------------------------------------------------------------------------------------


def test_two_workers_share_a_schedule_and_a_study(team: Team) -> None:
    """A comparison that nobody started, and a study beside it: each worker takes one flow at a time."""
    found = team.ask("prefect", "/api/deployments/filter", {"sort": "NAME_ASC"})
    nightly, tuning = (
        next(each for each in found if each["name"] == name) for name in ("nightly-comparison", "weekly-tuning")
    )
    asked = tuning["parameters"] | {"trials": 3, "out": "runs/study"}
    study = team.ask("prefect", f"/api/deployments/{tuning['id']}/create_flow_run", {"parameters": asked})["id"]

    def flow_run(**filters: Any) -> dict[str, Any] | None:
        found = team.ask("prefect", "/api/flow_runs/filter", {"flow_runs": filters, "sort": "EXPECTED_START_TIME_ASC"})
        # The first that was due; those of the minutes after it find its folder in use.
        first = next(iter(found), None)
        return first if first and first["state_type"] in ("COMPLETED", "FAILED", "CRASHED") else None

    tuned = team.until(lambda: flow_run(id={"any_": [study]}), "the study")
    assert tuned["state_type"] == "COMPLETED", f"{tuned['state']}\n{team.ends()}"
    found = team.until(
        lambda: flow_run(deployment_id={"any_": [nightly["id"]]}),
        "the scheduled comparison",
    )
    assert found["state_type"] == "COMPLETED" and found["auto_scheduled"], f"{found['state']}\n{team.ends()}"

    # A worker says of each flow that it takes which one it is; each flow is one worker's alone.
    team.until(lambda: all(taken_by(team, name) for name in ("worker-1", "worker-2")), "a flow for each worker")
    taken = {name: taken_by(team, name) for name in ("worker-1", "worker-2")}
    assert not taken["worker-1"] & taken["worker-2"]
    assert {found["id"], study} <= taken["worker-1"] | taken["worker-2"]

    counted = team.sql("optuna", "SELECT count(*) FROM trials WHERE state IN ('COMPLETE', 'PRUNED')")
    assert int(counted) == 3
    assert not (team.folder / ".protofl" / "studies.journal").exists()
    assert int(team.sql("prefect", "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'")) >= 2
    print(f"taken: {taken}", file=sys.stderr)


def test_the_comparison_is_in_mlflow_with_its_files_in_the_store(team: Team) -> None:
    api = "/api/2.0/mlflow"
    experiments = team.ask("mlflow", f"{api}/experiments/search", {"max_results": 100})["experiments"]
    [digits] = [each["experiment_id"] for each in experiments if each["name"] == "digits/dirichlet"]
    runs = team.ask("mlflow", f"{api}/runs/search", {"experiment_ids": [digits], "max_results": 100})["runs"]
    tags = {run["info"]["run_id"]: {tag["key"]: tag["value"] for tag in run["data"]["tags"]} for run in runs}
    compared = {
        tags[run].get("method"): tags[run]["mlflow.parentRunId"] for run in tags if "mlflow.parentRunId" in tags[run]
    }
    assert {"fedavg", "fedproto"} <= set(compared)
    parent = compared["fedproto"]
    assert "fedproto" in tags[parent]["mlflow.note.content"]
    assert int(team.sql("mlflow", "SELECT count(*) FROM runs WHERE status = 'FINISHED'")) >= 3

    page = f"http://127.0.0.1:{team.ports['mlflow']}/get-artifact?path=report.html&run_uuid={parent}"
    with urllib.request.urlopen(page, timeout=30) as answer:
        shown = answer.read()
    assert b"fedproto" in shown
    assert any(key.endswith(f"{parent}/artifacts/report.html") for key in stored(team, "mlflow/"))


def test_no_secret_is_in_a_file_or_in_prefects_database(team: Team) -> None:
    for name, secret in team.secrets.items():
        files = [path for base in (team.folder, team.logs) for path in base.rglob("*") if path.is_file()]
        assert [path for path in files if secret.encode() in path.read_bytes()] == [], name
    dumped = subprocess.run(
        [
            str(postgres_programs() / "pg_dump"),
            "-h",
            "127.0.0.1",
            f"-p{team.ports['postgres']}",
            "-Uprotofl",
            "prefect",
        ],
        env=os.environ | {"PGPASSWORD": team.secrets["POSTGRES_PASSWORD"]},
        capture_output=True,
        check=True,
    ).stdout
    assert b"nightly-comparison" in dumped
    assert not any(secret.encode() in dumped for secret in team.secrets.values())


def test_results_travel_by_the_store_and_are_not_computed_again(team: Team) -> None:
    """Pushed, wiped, pulled: what ``docs/how-to/share-dvc.md`` says of S3; then nothing is to do."""
    team.type("dvc", "repro", "--quiet")
    lock = (team.folder / "dvc.lock").read_bytes()
    team.type("dvc", "remote", "add", "--default", "team", "s3://protofl/dvc")
    team.type("dvc", "remote", "modify", "team", "endpointurl", f"http://127.0.0.1:{team.ports['store']}")
    pushed = team.type("dvc", "push", service="bucket")  # whose environment holds the store's keys
    assert "pushed" in pushed and stored(team, "dvc/files/md5/")
    metrics = team.folder / "artifacts" / "comparison" / "metrics.json"
    in_git = metrics.read_bytes()  # small: git has it, not the store
    for name in (".dvc/cache", ".dvc/tmp", "artifacts", ".protofl"):
        shutil.rmtree(team.folder / name)
    metrics.parent.mkdir(parents=True)
    metrics.write_bytes(in_git)
    pulled = team.type("dvc", "pull", service="bucket")
    assert (team.folder / "artifacts" / "comparison" / "comparison.json").exists()
    assert "Data and pipelines are up to date." in team.type("dvc", "repro")
    assert (team.folder / "dvc.lock").read_bytes() == lock
    print(f"{pushed.splitlines()[-1:]} {pulled.splitlines()[-1:]}", file=sys.stderr)


def taken_by(team: Team, worker: str) -> set[str]:
    """The ids of the flow runs that a worker says it has begun; where two reach for one, one of them is refused."""
    said = (team.logs / f"{worker}.log").read_text()
    reached, refused = (
        set(re.findall(rf"{what} flow run '([0-9a-f-]{{36}})'", said))
        for what in ("submitting", "Aborted submission of")
    )
    return reached - refused


def stored(team: Team, prefix: str) -> list[str]:
    """Names of what the store holds below a prefix."""
    address = f"http://127.0.0.1:{team.ports['store']}/protofl?list-type=2&prefix={prefix}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return re.findall(r"<Key>([^<]*)</Key>", answer.read().decode())
