"""``protofl up``, ``status`` and ``down``: Prefect with a worker, MLflow and Optuna's dashboard, on loopback.

Prefect is started by ``prefect server start`` and not by its ``--background``, which remembers a process id alone:
after a restart of the machine it may stop somebody else's process with it, or refuse to start. What runs is kept in
``.protofl/services.json``, see :mod:`pipelines.orchestration.background`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from flcore import disk
from flcore.errors import ConfigError, RunError
from pipelines.orchestration import background, deployments
from pipelines.orchestration.background import Service
from pipelines.tracking.addresses import without_password

_HOST = "127.0.0.1"
_PORTS = {"prefect": 4200, "mlflow": 5000, "dashboard": 8080, "worker": 8090}
_PORTS_TRIED = 50
_SECONDS_TO_START = 240.0
_PATIENCE_SECONDS = 2.0
_WHAT = {
    "prefect": "flows: what runs, what ran, what is scheduled",
    "mlflow": "runs: metrics, figures, models",
    "dashboard": "studies of protofl tune",
    "worker": "carries out what is scheduled",
}
_HEALTH = {"prefect": "/health", "mlflow": "/health", "dashboard": "/api/meta", "worker": "/health"}


@dataclass(frozen=True)
class _Plan:
    """How a service is started.

    Attributes:
        url: where it will answer.
        arguments: of the Python interpreter.
        environment: variables beside those of this process.
        shows: of MLflow, the store, without a password.
    """

    url: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    shows: str = ""


def up(*, prefect: bool = True, mlflow: bool = True, dashboard: bool = True, worker: bool = True) -> None:
    """Start what does not run yet, wait until it answers, and print where.

    Args:
        prefect: the server that shows flows. mlflow: the one that shows runs. dashboard: the one that shows studies.
        worker: what carries out scheduled flows; needs ``prefect``.

    Raises:
        ConfigError: no free port, or settings that cannot be read.
        RunError: a service did not start; the others go on.
    """
    wanted = {"prefect": prefect, "mlflow": mlflow, "dashboard": dashboard, "worker": worker and prefect}
    with background.one_command_at_a_time():
        running = _forget_what_has_ended()
        notes = []
        plans: dict[str, Callable[[int], _Plan]] = {"prefect": _prefect, "dashboard": _dashboard}
        store = _store()
        if store.startswith(("http://", "https://")):
            wanted["mlflow"] = False
            notes.append(f"mlflow      not started: runs are logged to {without_password(store)}")
        else:
            plans["mlflow"] = lambda port: _mlflow(port, store)
        names = [name for name in ("prefect", "mlflow", "dashboard") if wanted[name] and name not in running]
        running |= _start({name: plans[name] for name in names}, running)
        if wanted["worker"]:
            api = running["prefect"].url
            if "worker" not in running or deployments.changed_after(running["worker"].started):
                with _waiting("deployments"):
                    deployments.register(api, background.LOGS / "deployments.log")
            if "worker" not in running:
                deployments.settle(api)
                running |= _start({"worker": lambda port: _worker(port, api)}, running)
            notes += [f"scheduled   {line}" for line in deployments.schedules(api)]
    for name in _PORTS:
        if name in running:
            print(f"{name:<10}  {_page(running[name]):<29}  {_WHAT[name]}")
    print("\n".join([*notes, _hint()]))


def status(*, as_json: bool = False) -> None:
    """Print what was started here: where, since when, and whether it answers.

    Args:
        as_json: a list of objects, and nothing else.
    """
    found = [
        {
            "name": service.name,
            "address": _page(service),
            "pid": service.pid,
            "state": _state(service),
            "since": datetime.fromtimestamp(service.started, UTC).astimezone().isoformat(sep=" ", timespec="seconds"),
            "log": service.log,
        }
        for service in background.recorded()
    ]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        print("nothing runs here that `protofl up` has started")
        return
    rows = [list(found[0]), *([str(value) for value in service.values()] for service in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def down() -> None:
    """Stop what was started here and everything that came of it, the worker first; nothing else."""
    with background.one_command_at_a_time():
        services = background.recorded()
        if not services:
            print("nothing to stop: nothing runs here that `protofl up` has started")
            return
        for service in sorted(services, key=lambda service: list(_PORTS)[::-1].index(service.name)):
            was_running = background.is_running(service)
            background.stop(service.name)
            services.remove(service)
            background.record(services)
            if service.name == "worker":
                _settle(services)
            print(f"{service.name}: " + (f"stopped (pid {service.pid})" if was_running else "had ended by itself"))


def _settle(services: Sequence[Service]) -> None:
    """Let Prefect's pages show that the worker's flows have ended with it, where Prefect can still be told."""
    for service in services:
        if service.name == "prefect" and background.is_running(service):
            with suppress(RunError):
                deployments.settle(service.url)


# ---- starting ----------------------------------------------------------------------------------------------------


def _forget_what_has_ended() -> dict[str, Service]:
    running = {}
    for service in background.recorded():
        if background.is_running(service):
            running[service.name] = service
        else:
            background.stop(service.name)  # helpers that it may have left
            kept = background.set_log_aside(service)
            print(f"{service.name}: had ended by itself; {kept} may say why", file=sys.stderr)
    background.record(list(running.values()))
    return running


def _start(plans: dict[str, Callable[[int], _Plan]], running: dict[str, Service]) -> dict[str, Service]:
    """Start services side by side, and wait for all of them."""
    started: dict[str, Service] = {}
    taken = {int(service.url.split(":")[2].split("/")[0]) for service in running.values()}
    for name, plan_at in plans.items():
        port = _free_port(name, taken)
        taken.add(port)
        plan = plan_at(port)
        command = [sys.executable, *plan.arguments]
        started[name] = background.start(name, plan.url, command, plan.environment, plan.shows)
        background.record([*running.values(), *started.values()])  # so that `down` finds it whatever happens here
    if not started:
        return {}
    failed = []
    with _waiting(", ".join(started)):
        deadline = time.monotonic() + _SECONDS_TO_START
        for name, service in started.items():
            while not _answers(service):
                if not background.is_running(service) or time.monotonic() > deadline:
                    background.stop(name)
                    failed.append(name)
                    break
                time.sleep(0.2)
    background.record([service for name, service in (running | started).items() if name not in failed])
    if failed:
        logs = ", ".join(started[name].log for name in failed)
        raise RunError(
            f"{' and '.join(failed)} did not start; {logs} says why: {_last_line(started[failed[0]])}\n"
            "what did start runs on: see `protofl status`, or stop it with `protofl down`"
        )
    return started


def _prefect(port: int) -> _Plan:
    environment = {
        "PREFECT_HOME": os.environ.get("PREFECT_HOME") or str((background.HOME / "prefect").absolute()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Many small writes at once: the default is a transaction for every change of every task.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    }
    api = f"http://{_HOST}:{port}/api"
    arguments = ["-m", "prefect", "server", "start", "--host", _HOST, "--port", str(port)]
    return _Plan(api, arguments, {**environment, **deployments.environment(api)})


def _worker(port: int, api: str) -> _Plan:
    environment = {"PREFECT_WORKER_WEBSERVER_HOST": _HOST, "PREFECT_WORKER_WEBSERVER_PORT": str(port)}
    # One flow at a time, since one flow uses all cores.
    arguments = ["-m", "prefect", "worker", "start", "--pool", deployments.POOL, "--type", "process", "--limit", "1"]
    arguments += ["--with-healthcheck", "--install-policy", "never"]
    return _Plan(f"http://{_HOST}:{port}", arguments, {**environment, **deployments.environment(api)})


def _mlflow(port: int, store: str) -> _Plan:
    from pipelines.tracking.store import sqlite_file

    database = sqlite_file(store)
    home = Path("mlruns").absolute() if database is None else database.parent
    disk.make_folder(home)
    arguments = ["-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"]
    environment = {
        "MLFLOW_BACKEND_STORE_URI": store,  # an argument would show everybody a password in it
        "MLFLOW_ARTIFACTS_DESTINATION": str(home / "artifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes for features that nothing here uses
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    return _Plan(f"http://{_HOST}:{port}", arguments, environment, without_password(store))


def _dashboard(port: int) -> _Plan:
    return _Plan(f"http://{_HOST}:{port}", ["-m", "pipelines.tuning.dashboard", "--port", str(port)])


def _store() -> str:
    """Where runs that are begun here are logged."""
    from pipelines.config.files import read_params
    from pipelines.tracking.store import resolve_uri

    section = read_params(None).get("tracking")
    uri = section.get("uri") if isinstance(section, dict) else None
    return resolve_uri(uri if isinstance(uri, str) else None)


def _free_port(name: str, taken: set[int]) -> int:
    """The service's usual port, or the next one that is free.

    Raises:
        ConfigError: there is none.
    """
    first = _PORTS[name]
    for port in range(first, first + _PORTS_TRIED):
        if port in taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"{name}: no free port from {first} to {first + _PORTS_TRIED - 1}; stop what holds them")


# ---- what is shown -----------------------------------------------------------------------------------------------


def _answers(service: Service) -> bool:
    request = urllib.request.Request(service.url + _HEALTH[service.name])
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_PATIENCE_SECONDS):
            return True
    except (OSError, ValueError):  # refused, late, or answered with an error
        return False


def _state(service: Service) -> str:
    if not background.is_running(service):
        return "ended"
    return "healthy" if _answers(service) else "no answer"


def _page(service: Service) -> str:
    """What to open in a browser."""
    return service.url + "/health" if service.name == "worker" else service.url.removesuffix("/api")


def _last_line(service: Service) -> str:
    lines = Path(service.log).read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it is empty")


def _hint() -> str:
    elsewhere = os.environ.get("PREFECT_API_URL")
    if elsewhere:
        return (
            f"note: PREFECT_API_URL is set, so commands report to {without_password(elsewhere)} and not to this server"
        )
    return "commands typed here report to these servers; stop them with `protofl down`"


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Say what is waited for, on standard error; on a terminal only as long as it takes."""
    if not sys.stderr.isatty():
        print(f"starting {what} ...", file=sys.stderr)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"starting {what} ..."):
        yield
