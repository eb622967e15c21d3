"""``protofl up``, ``deploy``, ``status``, ``down``: Prefect with a worker, MLflow and Optuna's dashboard, on loopback.

Each server checks where a request comes from (:mod:`pipelines.same_origin`), and Prefect's requires a password, because
its clients can run programs. :mod:`pipelines.orchestration.background` records what runs.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from flcore.core.errors import MLOPS, ConfigError, RunError, require
from flcore.core.host import python, user_cache
from pipelines.addresses import without_password
from pipelines.orchestration import background, deployments, plans, schedules
from pipelines.orchestration.address import Address, configured, started_here
from pipelines.orchestration.background import LOCK, Service
from pipelines.orchestration.deployments import WEBHOOK
from pipelines.orchestration.gpus import limit_name, visible_gpus
from pipelines.orchestration.plans import Plan
from pipelines.orchestration.serving import HOST
from pipelines.runs.standard_error import console, tell

_PORTS = {"prefect": 4200, "mlflow": 5000, "dashboard": 8080, "worker": 8090}
_PORTS_TRIED = 50
_SECONDS_TO_START = 240.0
_PATIENCE_SECONDS = 2.0
_WHAT = {
    "prefect": "flows: what runs, what ran, what is scheduled",
    "mlflow": "runs: metrics, figures, models",
    "dashboard": "studies of protofl tune",
    "worker": "runs what is scheduled",
}
_HEALTHY = "healthy"
_EXPORT = "export PREFECT_API_URL="
_HEALTH = {"prefect": "/health", "mlflow": "/health", "dashboard": "/api/meta", "worker": "/health"}


def up(
    *,
    prefect: bool = True,
    mlflow: bool = True,
    dashboard: bool = True,
    worker: bool = True,
    flows_per_gpu: int = 1,
) -> None:
    """Start services that do not run, wait until they respond, and print their addresses.

    ``worker`` needs ``prefect``: one for the queue ``cpu``, one for each GPU with ``flows_per_gpu`` flows at a time.

    Raises:
        ConfigError: no free port, or unreadable settings or deployments; nothing is started then.
        RunError: a service did not start; the others run.
    """
    wanted = {"prefect": prefect, "mlflow": mlflow, "dashboard": dashboard, "worker": worker and prefect}
    for service, package in {"prefect": "prefect", "mlflow": "mlflow", "dashboard": "optuna_dashboard"}.items():
        if wanted[service]:
            require(package, service, MLOPS)
    if wanted["worker"]:
        deployments.declared()
    # A port that the `up` of another folder has chosen looks free until its server listens.
    with background.one_at_a_time(LOCK), background.one_at_a_time(user_cache() / "ports.lock"):
        running = _forget_what_has_ended()
        notes = []
        known: dict[str, Callable[[int], Plan]] = {"prefect": plans.prefect, "dashboard": plans.dashboard}
        store = plans.store()
        if store.startswith(("http://", "https://")):
            wanted["mlflow"] = False
            notes.append(f"mlflow      not started: runs are logged to {without_password(store)}")
        else:
            known["mlflow"] = partial(plans.mlflow, address=store)
        new = {name: known[name] for name in ("prefect", "mlflow", "dashboard") if wanted[name] and name not in running}
        running |= _start(new, running)
        if wanted["worker"]:
            address = started_here(running["prefect"].url)
            wanted_workers = plans.workers(address.url, visible_gpus(), flows_per_gpu)
            workers = {name: plan for name, plan in wanted_workers.items() if name not in running}
            there = [service for name, service in running.items() if _kind(name) == "worker"]
            is_new = bool(workers or os.environ.get(WEBHOOK))
            if is_new or deployments.changed_after(min(service.started for service in there)):
                _register(address, flows_per_gpu)
            if not there:
                deployments.settle(address)
            running |= _start(workers, running)
            notes += schedules.notes(address)
    for name in sorted(running, key=_order):
        print(f"{name:<12}  {_page(running[name]):<29}  {_WHAT[_kind(name)]}")
    for line in [*notes, *_hint(running)]:
        print(line)


def deploy(*, flows_per_gpu: int = 1) -> None:
    """Register deployments with the configured server, as ``up`` does with its own.

    Raises:
        ConfigError: no server is configured. RunError: it does not respond, or refuses a request.
    """
    deployments.declared()
    address = schedules.answering()
    _register(address, flows_per_gpu)
    print("\n".join(schedules.notes(address)))


def _register(address: Address, flows_per_gpu: int) -> None:
    limits = {limit_name(gpu): flows_per_gpu for gpu in visible_gpus()}
    with _waiting("deployments"):
        deployments.register(address, background.LOGS, limits, schedules.switched_on(address))


def status(*, as_json: bool = False) -> bool:
    """Print the services that were started here, and return whether there are any and all respond."""
    services = background.recorded()
    found = [
        {
            "name": service.name,
            "address": _page(service),
            "pid": service.pid,
            "state": _state(service),
            "since": datetime.fromtimestamp(service.started, UTC).astimezone().isoformat(sep=" ", timespec="seconds"),
            "log": service.log,
        }
        for service in services
    ]
    is_well = bool(found) and all(service["state"] == _HEALTHY for service in found)
    if as_json:
        print(json.dumps(found, indent=2))
        return is_well
    if not found:
        print("nothing runs here that `protofl up` has started")
        return is_well
    rows = [list(found[0]), *([str(value) for value in service.values()] for service in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for service in services:
        if service.name == "prefect" and background.is_running(service):
            print("\n".join(_export(service)))
    return is_well


def down() -> None:
    """Stop the services that were started here and their children, the worker first; nothing else."""
    with background.one_at_a_time(LOCK):
        services = background.recorded()
        if not services:
            print("nothing to stop: nothing runs here that `protofl up` has started")
            return
        for service in sorted(services, key=lambda service: _order(service.name), reverse=True):
            was_running = background.is_running(service)
            background.stop(service.name)
            services.remove(service)
            background.record(services)
            if _kind(service.name) == "worker" and not any(_kind(left.name) == "worker" for left in services):
                server = next((left for left in services if left.name == "prefect"), None)
                if server is not None and background.is_running(server):
                    with suppress(RunError):  # its pages do not show that the worker's flows have ended
                        deployments.settle(started_here(server.url))
            print(f"{service.name}: " + (f"stopped (pid {service.pid})" if was_running else "had ended by itself"))


# ---- starting ----------------------------------------------------------------------------------------------------


def _forget_what_has_ended() -> dict[str, Service]:
    running = {}
    for service in background.recorded():
        if background.is_running(service):
            running[service.name] = service
        else:
            background.stop(service.name)  # helpers that it may have left
            kept = background.set_log_aside(service)
            tell(f"{service.name}: had ended by itself; {kept} may say why")
    background.record(list(running.values()))
    return running


def _start(wanted: dict[str, Callable[[int], Plan]], running: dict[str, Service]) -> dict[str, Service]:
    """Start services in parallel, and wait for all of them."""
    started: dict[str, Service] = {}
    taken = {int(service.url.split(":")[2].split("/")[0]) for service in running.values()}
    for name, plan_at in wanted.items():
        port = _free_port(name, taken)
        taken.add(port)
        plan = plan_at(port)
        started[name] = background.start(name, plan.url, python(*plan.arguments), plan.environment, plan.shows)
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


def _free_port(name: str, taken: set[int]) -> int:
    """Return the service's default port, or the next free one; ConfigError if there is none."""
    first = _PORTS[_kind(name)]
    for port in range(first, first + _PORTS_TRIED):
        with suppress(OSError), socket.create_server((HOST, port)):
            if port not in taken:
                return port
    raise ConfigError(f"{name}: no free port from {first} to {first + _PORTS_TRIED - 1}; stop what holds them")


def _kind(name: str) -> str:
    """Return the kind of a service: there may be several workers."""
    return name.partition("-")[0]


def _order(name: str) -> tuple[int, str]:
    """Return a sort key: servers before workers."""
    return list(_PORTS).index(_kind(name)), name


# ---- what is shown -----------------------------------------------------------------------------------------------


def _answers(service: Service) -> bool:
    request = urllib.request.Request(service.url + _HEALTH[_kind(service.name)])
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_PATIENCE_SECONDS):
            return True
    except (OSError, ValueError):  # refused, late, or answered with an error
        return False


def _state(service: Service) -> str:
    if not background.is_running(service):
        return "ended"
    return _HEALTHY if _answers(service) else "no answer"


def _page(service: Service) -> str:
    """Return the address for a browser."""
    return service.url + "/health" if _kind(service.name) == "worker" else service.url.removesuffix("/api")


def _last_line(service: Service) -> str:
    lines = Path(service.log).read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it is empty")


def _hint(running: Mapping[str, Service]) -> list[str]:
    """Return which server the commands of this folder use, and a line to copy; nothing if no service runs."""
    if not running:
        return []
    stop = "stop them with `protofl down`"
    server, used = running.get("prefect"), configured()
    if server is None:
        return [stop]
    if used is None or used.url == server.url:
        said = f"commands typed here report to these servers; {stop}"
    else:
        said = f"note: commands report to {used.shown} (from {used.source}) and not to this server; {stop}"
    return [said, *_export(server)]


def _export(server: Service) -> list[str]:
    """Return how a person and Prefect's own commands authenticate, without the password."""
    password = f'"$(cat {shlex.quote(str(background.PASSWORD.absolute()))})"'
    lines = [f"Prefect's pages ask for a password once; to see it: cat {background.PASSWORD}"]
    if os.environ.get("PREFECT_API_URL") != server.url or "PREFECT_API_AUTH_STRING" not in os.environ:
        lines += ["Prefect's own commands, such as `prefect deployment run`, need these lines first:"]
        lines += [_EXPORT + server.url, f"export PREFECT_API_AUTH_STRING={password}"]
    return lines


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Print on standard error what is starting; on a terminal, until the block ends."""
    if not sys.stderr.isatty():
        tell(f"starting {what} ...")
        yield
        return
    with console(stderr=True).status(f"starting {what} ..."):
        yield
