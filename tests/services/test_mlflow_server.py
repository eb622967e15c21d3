"""A real MLflow server takes what a SQLite file takes, and shows it; the password in its address is kept nowhere."""

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
from pathlib import Path
from typing import Any

import pytest

from flcore import run
from flcore.data.dataset import Dataset
from pipelines.runs.folder import RunFolder
from pipelines.tracking.best import CHAMPION, best
from pipelines.tracking.comparisons import log_comparison
from pipelines.tracking.store import set_mlflow_environment
from pipelines.tracking.sync import RunTracker

pytestmark = pytest.mark.services

SECRET = "s3cr3t-w0rd"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    command: list[str], place: str, health: str, folder: Path, environment: dict[str, str] | None = None
) -> Iterator[None]:
    """A server on loopback, until the end of the block, and all that it has started."""
    log_file = folder / f"{place.partition(':')[2]}.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder, env=environment)
        try:
            deadline = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{place}{health}", timeout=2):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the server did not start:\n{log_file.read_text()}")
                time.sleep(0.3)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, and has said why
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Host and port of a server on loopback, with a fresh SQLite store behind it."""
    set_mlflow_environment()
    place = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", place.partition(":")[2]]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path / 'served.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "served")]
    with started(command, place, "/health", tmp_path):
        yield place


def test_a_comparison_with_a_model_in_a_server(tmp_path: Path, server: str) -> None:
    from mlflow.tracking.client import MlflowClient

    settings: dict[str, Any] = {"data": {"name": "digits"}, "federation": {"rounds": 2}, "local": {"steps": 2}}
    uri, folder = f"http://protofl:{SECRET}@{server}", tmp_path / "compared"
    runs = [folder / "runs" / f"fedavg-s{seed}" for seed in (0, 1)]
    for seed, directory in enumerate(runs):
        run({**settings, "seed": seed, "tracking": {"uri": uri}}, directory)
    (folder / "report.html").write_text("<html/>")
    assert log_comparison(folder, [RunFolder(run) for run in runs], uri)
    assert log_comparison(folder, [RunFolder(run) for run in runs], uri), "again, which changes nothing"
    assert RunTracker(runs[0], uri=uri).finish(with_model=True, register=True)

    client = MlflowClient(tracking_uri=f"http://{server}", registry_uri=f"http://{server}")
    [experiment] = [found for found in client.search_experiments() if found.name == "digits/dirichlet"]
    found: dict[Any, Any] = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = found.pop("compared")
    assert len(found) == 2
    assert {run.data.tags["mlflow.parentRunId"] for run in found.values()} == {parent.info.run_id}
    for logged in found.values():
        assert logged.info.status == "FINISHED"
        assert len(client.get_metric_history(logged.info.run_id, "comm/bytes_up")) == 2
        assert len(logged.inputs.dataset_inputs) == 2
    assert len(client.search_model_versions("name = 'digits-dirichlet'")) == 1
    page = f"http://{server}/get-artifact?path=report.html&run_uuid={parent.info.run_id}"
    with urllib.request.urlopen(page, timeout=10) as answer:
        assert answer.read() == b"<html/>"

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"served.db", f"{server.partition(':')[2]}.log", "MLmodel", "config.json"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(("method", "client"), [("fedavg", None), ("fedper", 2)])
def test_the_champion_is_served_and_answers(tmp_path: Path, method: str, client: int | None) -> None:
    """Asked over HTTP it says what the model of the run says: the global one, and a client's own."""
    import mlflow
    import numpy as np
    from mlflow.tracking.client import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    settings = {"data": {"name": "digits", "limit_per_class": 20}, "partition": {"num_clients": 3, "alpha": 0.3}}
    run({**settings, "federation": {"rounds": 1}, "method": {"name": method}}, tmp_path / "run")
    assert RunTracker(tmp_path / "run", uri=uri).finish(with_model=True)
    found = best(uri, "mean_local", promote=True)
    assert found.model == "models:/digits-dirichlet/1"

    images = Dataset.load(tmp_path / "run" / "prepared").test.images[:2].numpy()
    asked = {"inputs": images.tolist()} | ({} if client is None else {"params": {"client": client}})
    place = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", "models:/digits-dirichlet@champion"]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", place.partition(":")[2]]
    # MLflow calls uvicorn by its name, which is found where the environment is active.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri, "PATH": path}
    with started(command, place, "/ping", tmp_path, environment):
        request = urllib.request.Request(f"http://{place}/invocations", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = np.asarray(json.load(answer)["predictions"])

    assert said.shape == (2, 10)
    version = MlflowClient(uri, uri).get_model_version_by_alias("digits-dirichlet", CHAMPION)
    local = mlflow.pyfunc.load_model(version.source)
    np.testing.assert_allclose(said, local.predict(images, params={"client": client} if client else None), atol=1e-6)


def test_a_server_shows_what_was_logged_without_one(tmp_path: Path, server: str) -> None:
    """``mlflow ui`` over a SQLite file finds the files that were stored beside it."""
    from mlflow.tracking.client import MlflowClient

    settings: dict[str, Any] = {"data": {"name": "digits"}, "federation": {"rounds": 1}, "local": {"steps": 1}}
    run(settings, tmp_path / "run")
    assert RunTracker(tmp_path / "run", uri=f"sqlite:///{tmp_path / 'served.db'}").sync(final=True)
    client = MlflowClient(tracking_uri=f"http://{server}")
    [experiment] = [found for found in client.search_experiments() if found.name == "digits/dirichlet"]
    [logged] = client.search_runs([experiment.experiment_id])
    address = f"http://{server}/get-artifact?path=metrics.json&run_uuid={logged.info.run_id}"
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.read() == (tmp_path / "run" / "metrics.json").read_bytes()
