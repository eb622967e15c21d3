"""A study in MLflow, logged from its folder alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.tracking.client import MlflowClient
from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial

from flcore.io.files import read_json
from pipelines.tuning import study
from pipelines.tuning.log import StudyTracker
from tests.cases import quick

from .conftest import Configure, Search


class AllButTheFirst(BasePruner):
    """Stops every trial but the first."""

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        return trial.number > 0


def test_mlflow_shows_the_study_with_its_trials_below_it(
    tmp_path: Path, fresh_store: str, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that refuses connections takes nothing and stops nothing; another one is given everything, once."""
    monkeypatch.setattr(study, "pruner_by_name", lambda name, rounds: AllButTheFirst())
    out, uri = tmp_path / "study", fresh_store
    search(config_with(), 2, out)
    assert not StudyTracker(out, uri="http://127.0.0.1:9").sync()
    while_it_grows = StudyTracker(out, uri=uri)
    assert while_it_grows.sync()
    for _ in range(2):
        assert StudyTracker(out, uri=uri).finish()

    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "digits/iid"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    trials = {run.data.tags["trial"]: run for run in runs if run is not parent}
    assert {run.data.tags["mlflow.parentRunId"] for run in trials.values()} == {parent.info.run_id}
    assert [trials[number].info.status for number in ("0", "1")] == ["FINISHED", "KILLED"]
    assert parent.info.status == "FINISHED"
    name = parent.info.run_name
    assert name == parent.data.tags["study"] == trials["0"].data.tags["study"]
    assert [trials[number].info.run_name for number in ("0", "1")] == [f"{name} trial 0", f"{name} trial 1"]
    assert parent.data.metrics["study/best_trial"] == 0
    assert parent.data.metrics["study/best_top1_global"] == trials["0"].data.metrics["accuracy/top1_global"]
    logged = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert logged >= {"study.json", "study.md", "trials.csv", "best.yaml"}
    assert trials["0"].data.params["method.mu"] == "0.01"


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric", quick(["bytes_up", "num_parameters", "alternatives.before_calibration.top1_global"], 1)
)
def test_mlflow_has_whatever_figure_a_study_optimises(
    metric: str, fresh_store: str, config_with: Configure, search: Search
) -> None:
    """One of which a round tells bytes by kind of message, one that no round tells, and one within others."""
    config = config_with(method={"name": "fedcspc"}, federation={"rounds": 1}, model={"projection_dim": 8})
    search(config, 1, Path("study"), metric=metric)
    assert StudyTracker(Path("study"), uri=fresh_store).finish()
    [value] = [trial["accuracy"] for trial in read_json(Path("study/study.json"), "")["trials"]]
    assert value is not None
    client = MlflowClient(tracking_uri=fresh_store)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.data.metrics[f"trial/{metric}"] == parent.data.metrics[f"study/best_{metric}"] == value
    assert parent.data.metrics["trial/bytes"] > 0
