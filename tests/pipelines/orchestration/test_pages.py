"""Where runs can be looked at: a real process in place of MLflow's server (the real one: tests/services)."""

from __future__ import annotations

import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from flcore.io.files import sealed, write_json
from pipelines.orchestration import background
from pipelines.orchestration.pages import runs_page

SERVER = """\
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path.endswith("get-by-name?experiment_name=digits%2Fdirichlet")
        self.send_response(200 if known else 404)
        self.end_headers()
        if known:
            self.wfile.write(json.dumps({"experiment": {"experiment_id": "7"}}).encode())

HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Shows the store that is used here where none is named, and knows of one experiment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shows = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    started = background.start("mlflow", f"http://127.0.0.1:{port}", [sys.executable, "-c", SERVER, port], {}, shows)
    background.record([started])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{started.url}/get-by-name?experiment_name=digits%2Fdirichlet", timeout=2).close()
            break
        except OSError:
            time.sleep(0.1)
    yield started.url
    background.stop("mlflow")


def logged(folder: Path, partition: str) -> Path:
    """A run's folder, with as much as says where it belongs."""
    folder.mkdir()
    config = {"data": {"name": "digits"}, "partition": {"name": partition}}
    write_json(folder / "config.json", sealed({"config": config, "identity": {}, "config_hash": "0" * 64}))
    return folder


def test_runs_are_shown_by_the_server_that_was_started_on_their_store(server: str, tmp_path: Path) -> None:
    assert runs_page(None) == server
    known, other = logged(tmp_path / "one", "dirichlet"), logged(tmp_path / "two", "iid")
    assert runs_page(None, known) == f"{server}/#/experiments/7/runs?workflowType=machine_learning"
    assert runs_page(None, other) == server  # it knows nothing of that experiment
    assert runs_page("http://me:secret@elsewhere:5000", known) == "http://***@elsewhere:5000"
    assert runs_page("sqlite:///other.db") == "mlflow ui --workers 1 --backend-store-uri sqlite:///other.db"


def test_without_a_server_it_is_a_command(server: str) -> None:
    background.stop("mlflow")  # and nobody has said so in the file
    assert runs_page(None) == "mlflow ui --workers 1 --backend-store-uri sqlite:///mlruns/mlflow.db"
