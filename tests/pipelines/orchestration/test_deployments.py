"""What `protofl up` prints of the deployments that a server has; the server here is a small one with given answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from flcore.errors import RunError
from pipelines.orchestration import deployments


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that is busy at first; it has three deployments, one of which stands in the file and one is paused."""
    cron = {"schedule": {"cron": "0 3 * * *", "timezone": "UTC"}, "active": True}
    known: dict[str, list[dict[str, Any]]] = {
        "/flows/filter": [{"id": "1", "name": "compare"}, {"id": "2", "name": "federated-experiment"}],
        "/deployments/filter": [
            {"name": "nightly-comparison", "flow_id": "1", "schedules": [cron], "paused": False},
            {"name": "nightly", "flow_id": "2", "schedules": [cron], "paused": True},
            {"name": "mine", "flow_id": "2", "schedules": [], "paused": False},
        ],
    }

    monkeypatch.setattr(deployments, "_DELAYS_SECONDS", (0.0, 0.0))
    busy = ["/flows/filter"] * 2

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path in busy:
                busy.remove(self.path)
                self.send_error(503)
                return
            self.send_response(200 if self.path in known else 409)
            self.end_headers()
            self.wfile.write(json.dumps(known.get(self.path)).encode())

        def log_message(self, *about: Any) -> None:
            """Nothing on the terminal."""

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_the_file_does_not_have_any_more_is_shown_with_what_ends_it(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "prefect.yaml").write_text("deployments: [{name: nightly-comparison}]")
    monkeypatch.chdir(tmp_path)
    assert deployments.schedules(api) == [
        "nightly-comparison: 0 3 * * * UTC",
        "nightly: 0 3 * * * UTC (paused) (not in the file: "
        "`prefect deployment delete federated-experiment/nightly` ends it)",
        "mine: by hand (not in the file: `prefect deployment delete federated-experiment/mine` ends it)",
    ]


def test_a_server_that_is_busy_for_a_moment_is_asked_again(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses twice: asked once it is an error, asked twice more it answers the second time."""
    monkeypatch.setattr(deployments, "_DELAYS_SECONDS", ())
    with pytest.raises(RunError, match=r"does not take a request \(/flows/filter: HTTP 503\)"):
        deployments._ask(api, "POST", "/flows/filter", {})
    monkeypatch.setattr(deployments, "_DELAYS_SECONDS", (0.0,))
    assert len(deployments._ask(api, "POST", "/flows/filter", {})) == 2


def test_what_is_there_already_is_not_made_and_a_refusal_is_one_line(api: str) -> None:
    assert deployments._make(api, "/flows/filter", {})
    assert not deployments._make(api, "/work_pools/", {"name": "there"})
    with pytest.raises(RunError, match=r"does not take a request \(/work_pools/: HTTP 409\)"):
        deployments._ask(api, "POST", "/work_pools/", {})
