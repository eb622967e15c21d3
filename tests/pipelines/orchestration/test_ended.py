"""Which runs a flow that ended badly had begun: those in its folder that it touched and did not finish."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect.states import Failed

from flcore.core.errors import RunError
from flcore.io.locks import run_lock
from pipelines.execution.outcome import FailedRunsError
from pipelines.orchestration import ended
from pipelines.orchestration.ended import HOOKS, mark_runs, unfinished_runs
from pipelines.orchestration.flows import compare, federated_experiment, retrain_on_new_data, sweep, tune
from pipelines.orchestration.paper_flow import paper_table
from pipelines.papers.carry_out import folder_of
from pipelines.papers.catalogue import table_named
from pipelines.papers.plan import Asked, plan

BEGAN = datetime(2026, 3, 1, 3, 0, 7, tzinfo=UTC)
HOUR = 3600


def a_run(folder: Path, *, finished: bool = False, touched: float = HOUR) -> Path:
    """A run whose files were written so many seconds after the flow began."""
    folder.mkdir(parents=True)
    for name in ("config.json", *(["metrics.json"] if finished else [])):
        (folder / name).write_text("{}")
        os.utime(folder / name, (BEGAN.timestamp() + touched,) * 2)
    return folder


def flow_run(out: str | None) -> Any:
    due = BEGAN - timedelta(seconds=7)
    return SimpleNamespace(parameters={"out": out}, start_time=None, expected_start_time=due, deployment_id=None)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_of_a_comparison_those_that_it_touched_and_did_not_finish() -> None:
    """Four runs in the folder of that day: one under way, one finished, one that an earlier attempt left, one empty."""
    home = Path("runs/nightly/2026-03-01/runs")
    under_way = a_run(home / "fedavg-s0")
    a_run(home / "fedavg-s1", finished=True)
    a_run(home / "fedavg-s2", touched=-HOUR)
    (home / "fedavg-s3").mkdir()
    of_another_day = a_run(Path("runs/nightly/2026-02-28/runs/fedavg-s0"))
    for flow in ("protofl-compare", "protofl-sweep"):
        assert unfinished_runs(flow, flow_run("runs/nightly/{date}")) == [under_way]
    # Of a paper's table each setting is a comparison in a folder of its own.
    assert unfinished_runs("protofl-paper-table", flow_run("runs/nightly")) == [of_another_day, under_way]


def test_a_papers_table_that_names_no_folder_has_gone_to_its_own() -> None:
    """One per table and budget, below runs/papers."""
    tenth = a_run(Path("runs/papers/fedpa.table2-x0.1/mnist_1/runs/fedavg-s0"))
    whole = a_run(Path("runs/papers/fedpa.table2/mnist_1/runs/fedavg-s0"))
    for asked, run in (({"rounds_scale": 0.1}, tenth), ({}, whole), ({"rounds_scale": 1}, whole)):
        flow = flow_run(None)
        flow.parameters |= {"id": "fedpa.table2", **asked}
        assert unfinished_runs("protofl-paper-table", flow) == [run]


@pytest.mark.parametrize("set_so", [True, False])
def test_a_papers_runs_are_marked_where_its_assignments_say_that_they_are_logged(
    set_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameter file beside it is that of other flows; a method's own value would fit no default configuration."""
    run = a_run(Path("runs/papers/fedpa.table2/mnist_1/runs/fedavg-s0"))
    Path("params.yaml").write_text("tracking: {enabled: false}")
    told: list[Any] = []

    class Told:
        def __init__(self, enabled: bool, say: object) -> None:
            told.append(enabled)

        def __enter__(self) -> Told:
            return self

        def __exit__(self, *about: object) -> None:
            pass

        def configure(self, tracking: Any) -> None:
            told.append(tracking["log_model"])

        def watch(self, folder: Path) -> None:
            told.append(folder)

        def stop(self, folder: Path, reason: str, *, failed: bool) -> None:
            told.append((folder, reason, failed))

    monkeypatch.setattr(ended, "Recorder", Told)
    monkeypatch.setattr(ended, "flow_run_logger", lambda *_: logging.getLogger("test"))
    flow = flow_run(None)
    flow.deployment_id = "one"
    flow.parameters |= {"id": "fedpa.table2", "assignments": [f"tracking.log_model={set_so}".lower(), "method.mu=0.1"]}
    state: Any = SimpleNamespace(name="Crashed", message="killed", is_failed=lambda: False)
    mark_runs(paper_table, flow, state)
    assert told == [True, set_so, run, (run, "Crashed: killed", False)]


def test_runs_that_failed_beside_others_keep_their_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are marked when they fail; the flow's end, of which one of them is the cause, says less of each."""
    a_run(Path("all/runs/fedavg-s0"))
    flow = flow_run("all")
    flow.deployment_id = "one"
    told: list[object] = []
    monkeypatch.setattr(ended, "flow_run_logger", lambda *_: logging.getLogger("test"))
    monkeypatch.setattr(ended, "unfinished_runs", lambda *asked: told.append(asked) or [])
    mark_runs(compare, flow, Failed(data=FailedRunsError("1 of 2 runs failed")))
    assert not told
    mark_runs(compare, flow, Failed(data=RunError("the flow took longer than 2 hours")))
    mark_runs(compare, flow, Failed(message="as a worker knows it"))
    assert len(told) == 2


def test_the_committed_table_says_all_that_it_needs() -> None:
    """Its flow takes the parameters; where data lie and results go is among them; one at a time is carried out."""
    text = (Path(__file__).resolve().parents[3] / "infra" / "prefect.yaml").read_text()
    found = next(each for each in yaml.safe_load(text)["deployments"] if each["name"] == "paper-table")
    given = found["parameters"]
    assert {*given} <= {*paper_table.parameters.model_dump()["properties"]}
    asked = Asked(columns=given["columns"], rounds_scale=given["rounds_scale"], assignments=tuple(given["assignments"]))
    planned = plan(table_named(given["id"]), asked, look_at_data=False)
    assert planned.settings and not planned.refused
    assert planned.settings[0].parameters["data"]["root"]
    assert given["out"] == str(folder_of(planned))
    assert found["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_what_another_process_is_at_work_on_is_not_of_a_flow_that_was_in_its_way() -> None:
    """Two flows were given one folder: the second fails at once, and must not mark what the first trains."""
    run = a_run(Path("run"))
    with run_lock(run):
        assert unfinished_runs("federated-experiment", flow_run("run")) == []
    assert unfinished_runs("federated-experiment", flow_run("run")) == [run]


def test_of_one_run_its_folder_and_of_a_study_its_record_and_not_its_trials() -> None:
    assert unfinished_runs("federated-experiment", flow_run("run")) == []
    run = a_run(Path("run"))
    assert unfinished_runs("federated-experiment", flow_run("run")) == [run]
    record = a_run(Path("study/study"))
    a_run(Path("study/trials/0000"))
    assert unfinished_runs("protofl-tune", flow_run("study")) == [record]
    of_new_data = a_run(Path("retrained/0123456789abcdef"))
    a_run(Path("retrained/before"), finished=True)
    assert unfinished_runs("protofl-retrain-on-new-data", flow_run("retrained")) == [of_new_data]


def test_a_flow_that_a_command_started_is_the_commands_to_mark() -> None:
    """And one whose folder is not known is left to its recorder."""
    a_run(Path("run"))
    mark_runs(federated_experiment, flow_run("run"), SimpleNamespace())  # type: ignore[arg-type]
    assert unfinished_runs("federated-experiment", flow_run(None)) == []


@pytest.mark.parametrize("flow", [compare, federated_experiment, paper_table, retrain_on_new_data, sweep, tune])
def test_every_flow_has_the_hooks_and_says_what_its_parameters_mean(flow: Any) -> None:
    """Prefect's form shows what a docstring says of a parameter, where that begins a line of its own."""
    for name, hooks in HOOKS.items():
        assert getattr(flow, f"{name}_hooks") == hooks
    properties = flow.parameters.model_dump()["properties"]
    assert [name for name, about in properties.items() if not about.get("description")] == []
    assert "limit_hours" in properties
