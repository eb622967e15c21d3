"""A study, logged afterwards from whichever of its folders is named; and that its trials are no runs to be best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flcore.config.schema import Config
from flcore.core.errors import DataError
from pipelines.cli.results import best, track_runs
from pipelines.execution.operation import Operation
from pipelines.execution.progress import Watcher
from pipelines.execution.steps import InlineSteps
from pipelines.tuning import search
from pipelines.tuning.log import study_of
from pipelines.tuning.request import StudyRequest
from pipelines.tuning.search import study
from tests.following import NoFollower
from tests.one_process import ThisProcess

SETTINGS: dict[str, Any] = {
    "data": {"name": "digits", "limit_per_class": 20},
    "partition": {"name": "iid", "num_clients": 2, "validation": 0.25},
    "method": {"name": "fedprox"},
    "federation": {"rounds": 1},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two trials that nobody has logged."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOFL_CACHE", str(folder / "cache"))
        patch.setattr(search, "RunPool", ThisProcess)
        patch.setattr(search, "most_at_once", lambda runs: 1)
        patch.chdir(folder)
        operation = Operation(InlineSteps(), Watcher(), NoFollower(), True)  # type: ignore[arg-type]
        study(Config.from_mapping(SETTINGS), StudyRequest(2), folder / "study-of-mu", operation)
    return folder / "study-of-mu"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in an empty folder."""
    monkeypatch.chdir(tmp_path)


def runs_in(uri: str) -> dict[str, Any]:
    """The study's own run as ``study``, its trials by their numbers."""
    from mlflow.tracking.client import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits/iid")
    assert experiment is not None
    return {run.data.tags.get("trial", "study"): run for run in client.search_runs([experiment.experiment_id])}


@pytest.mark.parametrize("part", [".", "study", "trials/0001"])
def test_a_study_is_logged_whole_whichever_part_of_it_is_named(finished: Path, fresh_store: str, part: str) -> None:
    """And logged again it is the same: three runs, two of which are below the first."""
    for _ in range(2):
        assert track_runs(finished / part, uri=fresh_store) == 0
        found = runs_in(fresh_store)
        assert found.keys() == {"study", "0", "1"}
        assert {run.info.status for run in found.values()} == {"FINISHED"}
        parent = found["study"]
        assert [found[name].info.run_name for name in "01"] == [f"{parent.info.run_name} trial {n}" for n in "01"]
        assert {found[name].data.tags["mlflow.parentRunId"] for name in "01"} == {parent.info.run_id}
        note = parent.data.tags["mlflow.note.content"]
        assert note == (finished / "study.md").read_text(), "its page says what was searched and found"
    with pytest.raises(DataError, match="no finished run has final/top1_global"):
        best(metric="top1_global", uri=fresh_store)  # trials are not runs


def test_a_study_that_is_still_going_is_logged_as_far_as_it_is(
    finished: Path, tmp_path: Path, fresh_store: str
) -> None:
    """Its second trial has not ended, and nothing is known to be the best."""
    going = shutil.copytree(finished, tmp_path / "going")
    for path in ("best.yaml", "study.md", "study/metrics.json"):
        (going / path).unlink()
    results = json.loads((going / "study.json").read_text())
    (going / "study.json").write_text(json.dumps({**results, "best": [], "trials": results["trials"][:1]}))
    assert track_runs(going, uri=fresh_store) == 0
    found = runs_in(fresh_store)
    assert {name: run.info.status for name, run in found.items()} == {"study": "RUNNING", "0": "FINISHED"}


def test_what_is_no_part_of_a_study_is_not_taken_for_one(finished: Path, tmp_path: Path) -> None:
    (finished / "figures").mkdir(exist_ok=True)
    assert study_of(finished / "figures") is None
    assert study_of(finished.parent) is None
    assert study_of(tmp_path) is None
    with pytest.raises(DataError, match="no run, comparison or study there"):
        track_runs(tmp_path, uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
