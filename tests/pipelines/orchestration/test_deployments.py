"""Deployments and schedules that a server has; the server here is a small one with given answers."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import Flow

from flcore.core.errors import ConfigError, RunError
from pipelines.orchestration import artifacts, deployments, flows, paper_flow, schedules
from pipelines.orchestration.address import Address

OURS = {"name": {"any_": ["protofl-process"]}}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """A server that is busy at first and asks for a key.

    It has five deployments: one stands in the file, one of the same name is of a flow that was renamed, one is paused,
    and one is in the pool of somebody else. Others have so many flows that a question for all leaves ours out.
    """
    cron = {"id": "at-3", "slug": "nightly", "schedule": {"cron": "0 3 * * *", "timezone": "UTC"}, "active": True}
    theirs = {"id": "0", "name": "payroll", "flow_id": "2", "schedules": [cron], "paused": False}
    known: dict[str, list[dict[str, Any]]] = {
        "/flows/filter": [
            *({"id": f"theirs-{number}", "name": f"theirs-{number}"} for number in range(200)),
            {"id": "0", "name": "compare"},
            {"id": "1", "name": "protofl-compare"},
            {"id": "2", "name": "federated-experiment"},
        ],
        "/deployments/filter": [
            {"id": "1", "name": "nightly-comparison", "flow_id": "0", "schedules": [cron], "paused": False},
            {"id": "2", "name": "nightly-comparison", "flow_id": "1", "schedules": [cron], "paused": False},
            {"id": "3", "name": "nightly", "flow_id": "2", "schedules": [cron], "paused": True},
            {"id": "4", "name": "mine", "flow_id": "2", "schedules": [], "paused": False},
        ],
    }

    monkeypatch.setattr(deployments, "_DELAYS_SECONDS", (0.0, 0.0))
    busy = ["/flows/filter"] * 2

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != "Bearer a key":
                self.send_error(401)
                return
            if self.path in busy:
                busy.remove(self.path)
                self.send_error(503)
                return
            self.send_response(200 if self.path in known else 409)
            self.end_headers()
            is_of_all = self.path == "/deployments/filter" and asked.get("work_pools") != OURS
            wanted = asked.get("flows", {}).get("id", {}).get("any_")
            found = [each for each in known.get(self.path, []) if wanted is None or each["id"] in wanted]
            self.wfile.write(json.dumps([*found[:200], *([theirs] if is_of_all else [])]).encode())

        def log_message(self, *about: Any) -> None:
            """Nothing on the terminal."""

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Address(f"http://127.0.0.1:{server.server_port}", "the profile lab", {"PREFECT_API_KEY": "a key"})
    server.shutdown()
    server.server_close()


def test_what_the_file_does_not_have_any_more_is_shown_with_what_ends_it(
    api: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody else has on the server is not shown, or it would be with a command that deletes it."""
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "prefect.yaml").write_text("deployments: [{name: nightly-comparison}]")
    monkeypatch.chdir(tmp_path)
    assert list(schedules.schedule_lines(api)) == [
        "nightly-comparison: 0 3 * * * UTC (not in the file: "
        "`prefect deployment delete compare/nightly-comparison` ends it)",
        "nightly-comparison: 0 3 * * * UTC",
        "nightly: 0 3 * * * UTC (off) (not in the file: "
        "`prefect deployment delete federated-experiment/nightly` ends it)",
        "mine: by hand (not in the file: `prefect deployment delete federated-experiment/mine` ends it)",
    ]


def test_a_schedule_is_switched_with_its_deployment(
    api: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two deployments of a name, that of the file; one that is paused is resumed; an unknown one changes nothing."""
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "prefect.yaml").write_text("deployments: [{name: nightly-comparison}]")
    monkeypatch.chdir(tmp_path)
    sent: list[tuple[str, dict[str, Any]]] = []

    def ask(address: Address, method: str, path: str, body: dict[str, Any]) -> Any:
        if path.endswith("/filter"):
            return deployments.ask(address, method, path, body)
        sent.append((f"{method} {path}", body))
        return None

    monkeypatch.setattr(schedules, "ask", ask)
    for names in (["nightly", "payroll"], ["nightly", "mine"]):
        with pytest.raises(ConfigError, match=f"schedule {names[1]}"):
            schedules.switch(api, names, on=False)
    assert sent == []
    schedules.switch(api, ["nightly-comparison"], on=False)
    schedules.switch(api, ["nightly"], on=True)
    assert sent == [
        ("PATCH /deployments/2/schedules/at-3", {"active": False}),
        ("PATCH /deployments/3/schedules/at-3", {"active": True}),
        ("POST /deployments/3/resume_deployment", {}),
    ]
    assert schedules.switched_on(api) == {("nightly-comparison", "nightly")}


def test_only_a_schedule_that_was_switched_on_is_registered_as_active(tmp_path: Path) -> None:
    """On by hand, by the file, not at all; and one that Prefect refuses."""
    file = tmp_path / "prefect.yaml"
    file.write_text(
        "deployments: [{name: a, schedules: [{slug: x, active: false}, {slug: y, active: true}, {slug: z}, 3]}]"
    )
    written = json.loads(deployments._completed(file, tmp_path / "logs", {("a", "x")}).read_text())
    found = written["deployments"][0]["schedules"]
    assert found.pop() == 3
    assert {each["slug"]: each["active"] for each in found} == {"x": True, "y": True, "z": False}


@pytest.mark.parametrize(
    ("deployment", "flow", "key"),
    [
        ("nightly-comparison", "protofl-compare", "protofl-nightly-comparison-table"),
        (None, "protofl-compare", "protofl-compare-table"),
        ("Compare, of Ward 3", "protofl-compare", "protofl-compare-of-ward-3-table"),
    ],
)
def test_artifacts_of_two_deployments_are_no_versions_of_one(
    deployment: str | None, flow: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are of a whole server, of small letters, digits and hyphens."""
    monkeypatch.setattr(artifacts, "deployment", SimpleNamespace(name=deployment))
    monkeypatch.setattr(artifacts, "flow_run", SimpleNamespace(flow_name=flow))
    assert artifacts.artifact_key("table") == key


def test_flows_have_names_that_no_other_project_takes() -> None:
    modules = (flows, paper_flow)
    names = {flow.name for module in modules for flow in vars(module).values() if isinstance(flow, Flow)}
    assert len(names) == 7
    assert all(name.startswith(("protofl-", "federated-")) for name in names)


def test_a_server_that_is_busy_for_a_moment_is_asked_again(api: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses twice: asked once it is an error, asked twice more it answers the second time."""
    monkeypatch.setattr(deployments, "_DELAYS_SECONDS", ())
    with pytest.raises(RunError, match=r"does not take a request \(/flows/filter: HTTP 503\)"):
        deployments.ask(api, "POST", "/flows/filter", {})
    monkeypatch.setattr(deployments, "_DELAYS_SECONDS", (0.0,))
    assert len(deployments.ask(api, "POST", "/flows/filter", {})) == 200


def test_however_many_runs_have_lost_their_worker_all_are_settled(
    api: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 450 a third is under way, a third was due, and a third is due later."""
    days = {"RUNNING": "2026-01-01", "SCHEDULED": "2026-01-01", "LATER": "2999-01-01"}
    runs = [
        {
            "id": str(number),
            "state_type": "RUNNING" if kind == "RUNNING" else "SCHEDULED",
            "auto_scheduled": True,
            "run_count": 0,
            "expected_start_time": f"{days[kind]}T00:00:00Z",
        }
        for number, kind in enumerate([*days] * 150)
    ]
    states: list[str] = []

    def ask(address: Address, method: str, path: str, body: dict[str, Any]) -> Any:
        if path == "/flow_runs/filter":
            return runs[body["offset"] :][: body["limit"]]
        states.append(body["state"]["name"])
        return {}

    monkeypatch.setattr(deployments, "ask", ask)
    deployments.settle(api)
    assert Counter(states) == {"Crashed": 150, "Missed": 150}


def test_what_is_there_already_is_not_made_and_a_refusal_is_one_line(api: Address) -> None:
    assert deployments._make(api, "/flows/filter", {})
    assert not deployments._make(api, "/work_pools/", {"name": "there"})
    with pytest.raises(RunError, match=r"does not take a request \(/work_pools/: HTTP 409\)"):
        deployments.ask(api, "POST", "/work_pools/", {})


def test_who_may_use_a_server_may_deploy_to_it(api: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a key of a profile, which Prefect's own process would not find in the home that it is given.

    A module of the working folder is never taken for Prefect.
    """
    monkeypatch.delenv("PREFECT_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "prefect.yaml").write_text("deployments: []")
    names = ("PREFECT_API_URL", "PREFECT_API_KEY")
    stand_in = tmp_path / "elsewhere" / "prefect.py"
    stand_in.parent.mkdir()
    stand_in.write_text(f"import os; print(*(os.environ.get(name) for name in {names})); raise SystemExit")
    monkeypatch.setenv("PYTHONPATH", str(stand_in.parent))
    (tmp_path / "prefect.py").write_text("raise RuntimeError('of the working folder')")
    deployments.register(api, tmp_path / "logs", {}, ())
    assert (tmp_path / "logs" / "deployments.log").read_text() == f"{api.url} a key\n"
    with pytest.raises(RunError, match=r"^the Prefect server at http\S* does not take a request \(\S*: HTTP 401\)$"):
        deployments.register(Address(api.url, "the profile lab"), tmp_path / "logs", {}, ())
