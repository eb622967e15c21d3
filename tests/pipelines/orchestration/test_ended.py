"""Which runs a flow that ended badly had begun: those in its folder that it touched and did not finish."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flcore.locks import sole_use
from pipelines.orchestration.ended import HOOKS, mark_runs, unfinished_runs
from pipelines.orchestration.flows import compare, federated_experiment, retrain_on_new_data, sweep, tune
from pipelines.orchestration.paper_flow import paper_table

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
    for flow in ("compare", "sweep"):
        assert unfinished_runs(flow, flow_run("runs/nightly/{date}")) == [under_way]
    # Of a paper's table each setting is a comparison in a folder of its own.
    assert unfinished_runs("paper-table", flow_run("runs/nightly")) == [of_another_day, under_way]


def test_what_another_process_is_at_work_on_is_not_of_a_flow_that_was_in_its_way() -> None:
    """Two flows were given one folder: the second fails at once, and must not mark what the first trains."""
    run = a_run(Path("run"))
    with sole_use(run):
        assert unfinished_runs("federated-experiment", flow_run("run")) == []
    assert unfinished_runs("federated-experiment", flow_run("run")) == [run]


def test_of_one_run_its_folder_and_of_a_study_its_record_and_not_its_trials() -> None:
    assert unfinished_runs("federated-experiment", flow_run("run")) == []
    run = a_run(Path("run"))
    assert unfinished_runs("federated-experiment", flow_run("run")) == [run]
    record = a_run(Path("study/study"))
    a_run(Path("study/trials/0000"))
    assert unfinished_runs("tune", flow_run("study")) == [record]
    of_new_data = a_run(Path("retrained/0123456789abcdef"))
    a_run(Path("retrained/before"), finished=True)
    assert unfinished_runs("retrain-on-new-data", flow_run("retrained")) == [of_new_data]


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
