"""A real MLflow server takes what a SQLite file takes, and shows it; the password in its address is kept nowhere."""

from __future__ import annotations

import contextlib
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
from pipelines.tracking.comparisons import log_comparison
from pipelines.tracking.store import set_mlflow_environment
from pipelines.tracking.sync import RunTracker

pytestmark = pytest.mark.services

SECRET = "s3cr3t-w0rd"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Host and port of a server on loopback, with a fresh SQLite store behind it."""
    set_mlflow_environment()
    place = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", place.partition(":")[2]]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path / 'served.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "served")]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path)
        try:
            deadline = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{place}/health", timeout=2):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the MLflow server did not start:\n{(tmp_path / 'server.log').read_text()}")
                time.sleep(0.3)
            yield place
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def test_a_comparison_with_a_model_in_a_server(tmp_path: Path, server: str) -> None:
    from mlflow.tracking.client import MlflowClient

    settings: dict[str, Any] = {"data": {"name": "digits"}, "federation": {"rounds": 2}, "local": {"steps": 2}}
    uri, folder = f"http://protofl:{SECRET}@{server}", tmp_path / "compared"
    runs = [folder / "runs" / f"fedavg-s{seed}" for seed in (0, 1)]
    for seed, directory in enumerate(runs):
        run({**settings, "seed": seed, "tracking": {"uri": uri}}, directory)
    (folder / "report.html").write_text("<html/>")
    assert log_comparison(folder, runs, uri)
    assert log_comparison(folder, runs, uri), "again, which changes nothing"
    assert RunTracker(runs[0], uri=uri).log_model(register=True) is not None

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
    assert {"served.db", "server.log", "MLmodel", "config.json"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


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
