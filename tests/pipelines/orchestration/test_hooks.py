"""What a flow that ended badly leaves in MLflow: its unfinished runs are marked, where its parameters say."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flcore import run
from pipelines.orchestration import flow_runs
from pipelines.orchestration.flow_runs import HOOKS, mark_runs
from pipelines.orchestration.flows import (
    compare,
    federated_experiment,
    federated_training,
    retrain_on_new_data,
    sweep,
    tune,
)
from pipelines.orchestration.paper_flow import paper_table
from pipelines.papers.catalogue import table_named
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.papers.run_table import folder_of
from pipelines.tracking.run_status import mark_flow
from pipelines.tracking.sync import RunTracker


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_papers_runs_are_marked_where_its_assignments_say_that_they_are_logged(
    is_logged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The parameter file beside it is that of other flows; a method's own value would fit no default configuration."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(f"tracking: {{enabled: {not is_logged}}}")
    marked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flow_runs, "mark_flow", lambda *given: marked.append(given))
    monkeypatch.setattr(flow_runs, "flow_run_logger", lambda *_: logging.getLogger("test"))
    asked = {"id": "fedpa.table2", "assignments": [f"tracking.enabled={is_logged}".lower(), "method.mu=0.1"]}
    flow: Any = SimpleNamespace(id="0123", parameters=asked, deployment_id=None)
    state: Any = SimpleNamespace(name="Crashed", message="killed", is_failed=lambda: False)
    mark_runs(paper_table, flow, state)
    assert marked == [], "a command started it"
    flow.deployment_id = "one"
    mark_runs(paper_table, flow, state)
    assert marked == [(None, "0123", "KILLED", "Crashed: killed")] * is_logged
    assert ("did not respond" in caplog.text) == is_logged, "this stand-in returns None"


def test_of_a_flow_the_unfinished_runs_without_a_reason_are_marked(
    tmp_path: Path, fresh_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four runs one has finished, one has failed with its own reason, and one is another flow's."""
    from mlflow.tracking.client import MlflowClient

    tiny: dict[str, Any] = {"data": {"limit_per_class": 20}, "partition": {"name": "iid", "num_clients": 2}}
    for name, flow in (("begun", "a"), ("finished", "a"), ("failed", "a"), ("other", "b")):
        monkeypatch.setenv("PREFECT__FLOW_RUN_ID", flow)
        run({**tiny, "federation": {"rounds": 1}}, tmp_path / name)
        if name != "finished":
            (tmp_path / name / "metrics.json").unlink()
            (tmp_path / name / "seal.json").unlink()
        tracker = RunTracker(tmp_path / name, uri=fresh_store, name=name)
        assert tracker.sync(final=True)
        if name == "failed":
            assert tracker.mark_stopped(failed=True, reason="diverged")
    mark_flow(fresh_store, "a", "KILLED", "Crashed: killed")
    client = MlflowClient(tracking_uri=fresh_store)
    experiment = client.get_experiment_by_name("digits/iid")
    assert experiment is not None
    found = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert {name: (one.info.status, one.data.tags.get("protofl.stopped")) for name, one in found.items()} == {
        "begun": ("KILLED", "Crashed: killed"),
        "finished": ("FINISHED", None),
        "failed": ("FAILED", "diverged"),
        "other": ("RUNNING", None),
    }


def test_the_committed_table_says_all_that_it_needs() -> None:
    """Its flow takes the parameters; where data lie and results go is among them; one at a time is carried out."""
    text = (Path(__file__).resolve().parents[3] / "infra" / "prefect.yaml").read_text()
    found = next(each for each in yaml.safe_load(text)["deployments"] if each["name"] == "paper-table")
    given = found["parameters"]
    assert {*given} <= {*paper_table.parameters.model_dump()["properties"]}
    asked = TableSelection(
        columns=given["columns"], rounds_scale=given["rounds_scale"], assignments=tuple(given["assignments"])
    )
    planned = plan_table(table_named(given["id"]), asked, with_data=False)
    assert planned.settings and not planned.refused
    assert planned.settings[0].parameters["data"]["root"]
    assert given["out"] == str(folder_of(planned))
    assert found["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


@pytest.mark.parametrize(
    "flow", [compare, federated_experiment, federated_training, paper_table, retrain_on_new_data, sweep, tune]
)
def test_every_flow_has_the_hooks_and_says_what_its_parameters_mean(flow: Any) -> None:
    """Prefect's form shows what a docstring says of a parameter, where that begins a line of its own."""
    for name, expected in HOOKS.items():
        assert getattr(flow, f"{name}_hooks") == expected
    properties = flow.parameters.model_dump()["properties"]
    assert [name for name, about in properties.items() if not about.get("description")] == []
    assert "limit_hours" in properties
