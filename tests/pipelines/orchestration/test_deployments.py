"""Deployments and schedules that a server has; the server here is an object with given answers."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import prefect
import pytest
from prefect.client.schemas.filters import FlowFilter, WorkPoolFilter
from prefect.client.schemas.objects import DeploymentSchedule, Flow
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule

from flcore.core.errors import ConfigError, RunError
from pipelines.orchestration import artifacts, deployments, flows, paper_flow, schedules
from pipelines.orchestration.address import Address

OURS = WorkPoolFilter.model_validate({"name": {"any_": ["protofl-process"]}})
API = Address("http://127.0.0.1:1/api", "the profile lab")
AT_THREE = DeploymentSchedule(
    id=uuid4(), slug="nightly", schedule=CronSchedule(cron="0 3 * * *", timezone="UTC"), active=True
)
EXPERIMENT, COMPARE = Flow(id=uuid4(), name="federated-experiment"), Flow(id=uuid4(), name="protofl-compare")
NIGHTLY, PAUSED, BY_HAND, THEIRS = (
    DeploymentResponse(id=uuid4(), name=name, flow_id=flow.id, schedules=schedules, paused=name == "paused")
    for name, flow, schedules in (
        ("nightly-comparison", COMPARE, [AT_THREE]),
        ("paused", EXPERIMENT, [AT_THREE]),
        ("mine", EXPERIMENT, []),
        ("payroll", EXPERIMENT, [AT_THREE]),
    )
)


class Server:
    """A server with three deployments in our pool and one in the pool of somebody else."""

    def __init__(self) -> None:
        self.changes: list[tuple[Any, ...]] = []

    def read_deployments(self, *, work_pool_filter: WorkPoolFilter, sort: Any) -> list[DeploymentResponse]:
        return [NIGHTLY, PAUSED, BY_HAND, *([] if work_pool_filter == OURS else [THEIRS])]

    def read_flows(self, *, flow_filter: FlowFilter) -> list[Flow]:
        assert flow_filter.id is not None
        return [flow for flow in (EXPERIMENT, COMPARE) if flow.id in (flow_filter.id.any_ or ())]

    def update_deployment_schedule(self, deployment: UUID, schedule: UUID, *, active: bool) -> None:
        self.changes.append((deployment, schedule, active))

    def resume_deployment(self, deployment: UUID) -> None:
        self.changes.append((deployment, "resumed"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server of a folder whose file has one deployment."""
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "prefect.yaml").write_text("deployments: [{name: nightly-comparison}]")
    monkeypatch.chdir(tmp_path)
    server = Server()
    for module in (deployments, schedules):
        monkeypatch.setattr(module, "connected", lambda address: nullcontext(server))
    return server


@pytest.mark.usefixtures("server")
def test_what_the_file_does_not_have_any_more_is_shown_with_what_ends_it() -> None:
    """What somebody else has on the server is not shown, or it would be with a command that deletes it."""
    assert list(schedules.schedule_lines(API)) == [
        "nightly-comparison: 0 3 * * * UTC",
        "paused: 0 3 * * * UTC (off) (not in the file: "
        "`prefect deployment delete federated-experiment/paused` ends it)",
        "mine: by hand (not in the file: `prefect deployment delete federated-experiment/mine` ends it)",
    ]


def test_a_schedule_is_switched_with_its_deployment(server: Server) -> None:
    """One that is paused is resumed; an unknown one changes nothing."""
    for names in (["nightly-comparison", "payroll"], ["paused", "mine"]):
        with pytest.raises(ConfigError, match=f"schedule {names[1]}"):
            schedules.switch(API, names, on=False)
    assert server.changes == []
    schedules.switch(API, ["nightly-comparison"], on=False)
    schedules.switch(API, ["paused"], on=True)
    assert server.changes == [
        (NIGHTLY.id, AT_THREE.id, False),
        (PAUSED.id, AT_THREE.id, True),
        (PAUSED.id, "resumed"),
    ]
    assert schedules.switched_on(API) == {("nightly-comparison", "nightly")}


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
    names = {flow.name for module in modules for flow in vars(module).values() if isinstance(flow, prefect.Flow)}
    assert len(names) == 7
    assert all(name.startswith(("protofl-", "federated-")) for name in names)


def test_however_many_runs_have_lost_their_worker_all_are_settled(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 450 a third is under way, a third was due, and a third is due later."""
    years = {"RUNNING": 2026, "SCHEDULED": 2026, "LATER": 2999}
    runs = [
        SimpleNamespace(
            id=number,
            state_type="RUNNING" if kind == "RUNNING" else "SCHEDULED",
            auto_scheduled=True,
            run_count=0,
            expected_start_time=datetime(years[kind], 1, 1, tzinfo=UTC),
        )
        for number, kind in enumerate([*years] * 150)
    ]
    states: list[str] = []

    def read(*, limit: int, offset: int, **filters: Any) -> list[Any]:
        return runs[offset:][:limit]

    monkeypatch.setattr(server, "read_flow_runs", read, raising=False)
    note: Any = lambda run, state, force: states.append(state.name)  # noqa: E731
    monkeypatch.setattr(server, "set_flow_run_state", note, raising=False)
    deployments.settle(API)
    assert Counter(states) == {"Crashed": 150, "Missed": 150}


def test_a_server_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(RunError, match=r"^the Prefect server at ftp://lab/api does not answer"):
        list(schedules.schedule_lines(Address("ftp://lab/api", "the profile lab")))


def test_who_may_use_a_server_may_deploy_to_it(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a key of a profile, which Prefect's own process would not find in the home that it is given.

    A module of the working folder is never taken for Prefect.
    """
    made: list[Any] = []
    monkeypatch.setattr(deployments, "_register_automations", lambda client, path: made.append(path.name))
    for name in ("create_work_pool", "create_work_queue", "upsert_global_concurrency_limit_by_name"):
        monkeypatch.setattr(server, name, lambda *what, **named: made.append(what[0]), raising=False)
    monkeypatch.setenv("PREFECT_API_KEY", "key")
    names = ("PREFECT_API_URL", "PREFECT_API_KEY")
    stand_in = tmp_path / "elsewhere" / "prefect.py"
    stand_in.parent.mkdir()
    stand_in.write_text(f"import os; print(*(os.environ.get(name) for name in {names})); raise SystemExit")
    monkeypatch.setenv("PYTHONPATH", str(stand_in.parent))
    (tmp_path / "prefect.py").write_text("raise RuntimeError('of the working folder')")
    deployments.register(API, tmp_path / "logs", {"protofl-gpu-lab-0": 1}, ())
    assert (tmp_path / "logs" / "deployments.log").read_text() == f"{API.url} key\n"
    assert made[1:] == ["cpu", "gpu", "protofl-gpu-lab-0", "automations.yaml"]
