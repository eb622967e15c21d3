"""How to start each service: address, arguments and environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flcore.io import disk
from pipelines.addresses import folder_address, sqlite_address, without_password
from pipelines.orchestration import background, deployments
from pipelines.orchestration.gpus import VISIBLE
from pipelines.orchestration.serving import HOST

_DATABASE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")
"""How the variables begin that name another database."""


@dataclass(frozen=True)
class Plan:
    """How to start a service: its address, arguments of Python, and variables in addition to those of this process.

    ``shows`` is the store of MLflow's server, without a password.
    """

    url: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    shows: str = ""


def prefect(port: int) -> Plan:
    """Prefect's server."""
    asked = background.password()
    environment = {
        # What it is asked by: its own pages, at either name, and programs that know the password.
        "PREFECT_SERVER_API_AUTH_STRING": asked,
        "PREFECT_API_AUTH_STRING": asked,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Where training takes all cores, an answer may take longer than the default of 10 s.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        # Many small writes at once: the default is a transaction for every change of every task.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        # Who holds a deployment's only place. In memory, as by default, a killed server forgets it, and the place would
        # stay taken for ever.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }
    api = f"http://{HOST}:{port}/api"
    database = Path(os.environ.get("PREFECT_HOME") or background.HOME / "prefect") / "prefect.db"
    if "?" in str(database.absolute()) and not any(name.startswith(_DATABASE) for name in os.environ):
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = sqlite_address(database, "sqlite+aiosqlite")
    arguments = ["-m", "pipelines.orchestration.serving", "prefect", str(port)]
    return Plan(api, arguments, {**deployments.environment(api), **environment})


def workers(api: str, gpus: Sequence[str], flows_per_gpu: int) -> dict[str, Callable[[int], Plan]]:
    """Return a worker for flows on the CPU, and one for each GPU, which sees no other GPU.

    ``api`` is the server's address; ``gpus`` are as in CUDA_VISIBLE_DEVICES, each for some flows at a time.
    """
    # One flow at a time, since one flow uses all cores. Deployments of one's own may be in the pool's first queue.
    hidden = {VISIBLE: ""} if gpus else {}
    found = {"worker": partial(_worker, api, ("cpu", "default"), 1, hidden)}
    for gpu in gpus:
        found[f"worker-gpu-{gpu}"] = partial(_worker, api, ("gpu",), flows_per_gpu, {VISIBLE: gpu})
    return dict(found)


def _worker(api: str, queues: Sequence[str], flows: int, environment: Mapping[str, str], port: int) -> Plan:
    address = {"PREFECT_WORKER_WEBSERVER_HOST": HOST, "PREFECT_WORKER_WEBSERVER_PORT": str(port)}
    address |= {"PREFECT_API_AUTH_STRING": background.password()}
    device = f"gpu-{environment[VISIBLE]}" if environment.get(VISIBLE) else "cpu"
    arguments = ["-m", "prefect", "worker", "start", "--pool", deployments.POOL, "--type", "process"]
    # Its name is what Prefect's pages show: which machine, and which device.
    arguments += ["--name", f"{socket.gethostname()}-{device}-{port}", "--limit", str(flows)]
    arguments += [word for queue in queues for word in ("--work-queue", queue)]
    arguments += ["--with-healthcheck", "--install-policy", "never"]
    return Plan(f"http://{HOST}:{port}", arguments, {**address, **environment, **deployments.environment(api)})


def mlflow(port: int, address: str) -> Plan:
    """MLflow's server, on a store."""
    from pipelines.tracking.store import sqlite_file

    database = sqlite_file(address)
    home = Path("mlruns").absolute() if database is None else database.parent
    disk.make_folder(home)
    arguments = ["-m", "pipelines.orchestration.serving", "mlflow", str(port)]
    environment = {
        "MLFLOW_BACKEND_STORE_URI": address,  # an argument would show everybody a password in it
        "MLFLOW_ARTIFACTS_DESTINATION": folder_address(home / "artifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes for features that nothing here uses
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    return Plan(f"http://{HOST}:{port}", arguments, environment, without_password(address))


def dashboard(port: int) -> Plan:
    """Optuna's dashboard."""
    return Plan(f"http://{HOST}:{port}", ["-m", "pipelines.tuning.dashboard", "--port", str(port)])


def store() -> str:
    """Return the address of the store of runs of this folder."""
    from pipelines.plan.files import read_params
    from pipelines.tracking.store import resolve_uri

    section = read_params(None).get("tracking")
    uri = section.get("uri") if isinstance(section, dict) else None
    return resolve_uri(uri if isinstance(uri, str) else None)
