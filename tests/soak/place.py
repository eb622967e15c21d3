"""A folder in which somebody types commands, with real servers on loopback: how they start, are found and are asked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import yaml

from flcore.engine.pool import child as child_process

PROJECT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 1600.0
_PATIENT = """
import sys
from pipelines.cli.app import main
from pipelines.orchestration import services

services._SECONDS_TO_START = 1500.0
services._PORTS |= {name: 20000 + port + %d for name, port in services._PORTS.items()}
sys.exit(main())
"""
"""The command ``protofl`` on a machine that does much else beside: it waits longer for servers, on ports other than
those that everybody takes."""
_MARK = "PROTOFL_SOAK"
_DISK_MEGABYTES = 48

ROUNDS = 12
PARAMS: dict[str, Any] = {
    "data": {"name": "digits", "limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": ROUNDS},
    "local": {"lr": 0.05, "epochs": 2},
    "compare": {"methods": ["harmed", "fedproto"], "seeds": [0], "baseline": "harmed"},
    "tracking": {"log_model": False},  # a third of the time, for what is made of finished files alone
    "plugins": ["harmed.py"],
}
WORKS: Mapping[str, tuple[str, ...]] = {
    "compare": ("compare",),
    "tune": ("tune", "--method", "fedproto", "--trials", "2"),
}
SIDE_FILES = {"config.json", "timing.json", "inputs.json", "times.csv"}
"""What names this machine, this moment or what was asked of Optuna, and is no result."""
_TELLS_TIMES = "report.html"
"""A comparison's page, which shows what is in ``times.csv``; the pages of its runs do not."""


@dataclass
class Typed:
    """A command under way.

    Attributes:
        process: of the command. log: what it says.
    """

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """The processes that carry out runs."""
        return [child for child in self.children() if f"{child_process.__name__} import begin" in _words(child)]

    def follower(self) -> list[psutil.Process]:
        """The process that draws and logs."""
        return [child for child in self.children() if "pipelines.orchestration.follow" in _words(child)]


def is_alive(process: psutil.Process) -> bool:
    """Not one that has ended and waits for its parent."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Place:
    """The folder and its servers.

    Attributes:
        home: the folder. has_disk: whether ``disk`` in it is a small file system of its own.
        database: PostgreSQL under Prefect's server, where it is installed.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        outside = {
            key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "PROTOFL_"))
        }
        self._environment = outside | {"PYTHONPATH": str(PROJECT), _MARK: str(home), "OMP_NUM_THREADS": "1"}
        self.database = PostgreSQL.where_installed()
        self.has_disk = False
        self._store = ""
        self._commands = 0

    def open(self) -> None:
        """Write what commands need, and start the servers."""
        (self.home / "params.yaml").write_text(yaml.safe_dump(PARAMS))
        shutil.copy(Path(__file__).with_name("harmed.py"), self.home / "harmed.py")
        disk = self.home / "disk"
        disk.mkdir()
        if os.geteuid() == 0:
            size = f"size={_DISK_MEGABYTES}m"
            mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True)
            self.has_disk = mounted.returncode == 0
        if self.database is not None:
            self.database.create()
        self.up()

    def close(self) -> None:
        """Stop all of it."""
        self._run("down")
        if self.database is not None:
            self.database.remove()
        if self.has_disk:
            subprocess.run(["umount", "--lazy", str(self.home / "disk")], check=False)

    def up(self) -> None:
        """Start the servers that do not run."""
        variables = {}
        if self.database is not None:
            self.database.start()
            variables["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self.database.url
        done = self._run("up", "--no-dashboard", "--no-worker", variables=variables)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        self._store = next(each["address"] for each in self.services() if each["name"] == "mlflow")

    def services(self) -> list[dict[str, Any]]:
        return list(json.loads(self._run("status", "--json").stdout))

    def server(self, name: str) -> list[psutil.Process]:
        """A server's process with its helpers, those first; none where it has ended."""
        for entry in json.loads((self.home / ".protofl" / "services.json").read_text())["services"]:
            if entry["name"] == name and psutil.pid_exists(entry["pid"]):
                process = psutil.Process(entry["pid"])
                return [*process.children(recursive=True), process] if is_alive(process) else []
        return []

    def is_up(self) -> bool:
        """Whether all servers run."""
        database = self.database is None or self.database.process()
        return bool(self.server("prefect") and self.server("mlflow") and database)

    def left_over(self) -> list[psutil.Process]:
        """Processes of commands that have ended, servers aside."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            is_ours = environment.get(_MARK) == str(self.home) and "PROTOFL_SERVICE" not in environment
            if is_ours and process.pid != os.getpid():
                found.append(process)
        return found

    def _run(self, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _PATIENT % (os.getpid() % 1000), *arguments],
            cwd=self.home,
            env=self._environment | dict(variables or {}),
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_START,
            check=False,
        )

    def type(self, work: str, out: Path, variables: Mapping[str, str] | None = None) -> Typed:
        """Begin a command whose results go to a folder, with a cache of that folder's own."""
        return self.begin([*WORKS[work], "--out", str(out)], {"PROTOFL_CACHE": f"{out}.cache", **(variables or {})})

    def begin(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Typed:
        """Begin any command that logs to the server."""
        self._commands += 1
        log = self.home / "logs" / f"{self._commands:04d}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*_obeying_permissions(), sys.executable, "-m", "pipelines.cli", *arguments],
                cwd=self.home,
                env=self._environment | {"MLFLOW_TRACKING_URI": self._store} | dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Typed(process, log)

    def logged(self) -> list[dict[str, Any]]:
        """Every MLflow run that is there, with its metrics and tags as mappings."""
        experiments = self._ask("experiments/search", {"max_results": 100})["experiments"]
        asked = {"experiment_ids": [each["experiment_id"] for each in experiments], "max_results": 500}
        found = []
        for run in self._ask("runs/search", asked).get("runs", []):
            data = run["data"]
            tags = {tag["key"]: tag["value"] for tag in data.get("tags", [])}
            metrics = {metric["key"]: metric["value"] for metric in data.get("metrics", [])}
            found.append({**run["info"], "tags": tags, "metrics": metrics})
        return found

    def rounds_of(self, run: str, metric: str) -> dict[int, float]:
        """A metric's history in MLflow, by round."""
        with _opener().open(
            f"{self._store}/api/2.0/mlflow/metrics/get-history?run_id={run}&metric_key={metric}"
        ) as answer:
            return {point["step"]: point["value"] for point in json.load(answer).get("metrics", [])}

    def forget_logged(self) -> None:
        """Delete every MLflow run, so that the next ones are logged and not found."""
        for run in self.logged():
            self._ask("runs/delete", {"run_id": run["run_id"]})

    def _ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._store}/api/2.0/mlflow/{what}", json.dumps(body).encode(), headers)
        with _opener().open(request, timeout=60) as answer:
            return dict(json.load(answer))


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _obeying_permissions() -> list[str]:
    """For a root user: without the right to write where permissions forbid it, which nobody else has."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return []
    rights = "-dac_override,-dac_read_search"
    return ["setpriv", "--bounding-set", rights, "--inh-caps", rights]


def results(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that has to be the same each time, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_file() and not hidden and path.name not in SIDE_FILES and inside.as_posix() != _TELLS_TIMES:
            found[inside.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@dataclass
class PostgreSQL:
    """A server of its own, on loopback, as the user ``postgres`` where this one may not run it.

    Attributes:
        programs: folder of ``initdb`` and ``postgres``. data: folder of the database. port: where it answers.
    """

    programs: Path
    data: Path
    port: int

    @classmethod
    def where_installed(cls) -> PostgreSQL | None:
        """In a folder that another user can enter; None where there is no ``initdb``."""
        there = shutil.which("initdb")
        if there is None:
            return None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            data = Path(tempfile.mkdtemp(prefix="soak-postgresql-"))
            return cls(Path(there).resolve().parent, data, int(probe.getsockname()[1]))

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/postgres"

    def create(self) -> None:
        if os.geteuid() == 0:
            shutil.chown(self.data, "postgres", "postgres")
        self._program("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust")

    def start(self) -> None:
        """Unless it runs."""
        if self.process():
            return
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.data}"
        self._program("pg_ctl", "-D", str(self.data), "-l", str(self.data / "log"), "-w", "-o", options, "start")

    def remove(self) -> None:
        """Stop it, with all that it holds."""
        if self.process():
            self._program("pg_ctl", "-D", str(self.data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(self.data)

    def process(self) -> list[psutil.Process]:
        """Its first process, whose end is that of all others; none where it does not run."""
        try:
            number = int((self.data / "postmaster.pid").read_text().split()[0])
            process = psutil.Process(number)
            return [process] if is_alive(process) and process.name().startswith("postgres") else []
        except (OSError, ValueError, psutil.Error):
            return []

    def _program(self, name: str, *arguments: str) -> None:
        command = [str(self.programs / name), *arguments]
        if os.geteuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        done = subprocess.run(command, cwd=self.data, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"
