"""Single trials: begun again under other code, failed, given up, found elsewhere, and never a failure by accident."""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial

from flcore import running
from flcore.config.schema import Config
from flcore.core.errors import RunError
from flcore.core.loaded_code import EditedError
from flcore.core.params import Search as Range
from flcore.io.files import sealed, unsealed
from pipelines.runs.folder import RunFolder
from pipelines.tuning import space, study
from pipelines.tuning import trial as trials
from pipelines.tuning.folder import StudyFiles
from tests.cases import quick

from .conftest import Configure, Search, interrupt, results_of, states_of


def test_a_trial_repeated_from_its_params_reaches_exactly_the_same(
    tmp_path: Path, config_with: Configure, finished: Path
) -> None:
    trial = results_of(finished)["trials"][1]
    mapping = config_with(evaluation={"split": "validation"}).to_mapping()
    for key, value in trial["params"].items():
        section, name = key.split(".")
        mapping[section][name] = value
    inputs = RunFolder(StudyFiles(finished).trial(1).directory).inputs
    running.train(Config.from_mapping(mapping), inputs.prepared, inputs.partition, tmp_path)
    history = RunFolder(tmp_path).history
    assert [record["top1_global"] for record in history] == list(trial["rounds"].values())
    assert history[-1]["top1_global"] == trial["accuracy"]
    assert sum(history[-1]["bytes_up"].values()) + sum(history[-1]["bytes_down"].values()) == trial["bytes"]


@pytest.mark.slow
def test_a_trial_that_other_code_began_is_begun_again(
    tmp_path: Path, config_with: Configure, search: Search, told: Any, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    """Rounds of two versions of the code are never mixed, and that the code has changed is no failure of a trial."""
    with monkeypatch.context() as patch:
        patch.setattr(running, "evaluate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(config_with(), 2, tmp_path / "study")
    run = StudyFiles(tmp_path / "study").trial(0)
    about = unsealed(json.loads(run.config.read_text()))
    assert about is not None
    run.config.write_text(json.dumps(sealed(about | {"code": "of another day"})))
    run.history.write_text(run.history.read_text().replace('"round": 2', '"round": 3'))
    search(config_with(), 2, tmp_path / "study")
    assert (tmp_path / "study" / "study.json").read_bytes() == (finished / "study.json").read_bytes()

    monkeypatch.setattr(trials, "code_fingerprint", lambda config: "of tomorrow")
    search(config_with(), 2, tmp_path / "study", told=told)
    assert told.lines[:1] == [
        "2 of the 2 trials ran with another code version; choose another --out for a study by one version"
    ]


def test_a_trial_that_another_study_has_finished_is_not_trained_again(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study of another metric begins with the same run; its own outcome is told, not that of the other's trial."""
    search(config_with(), 1, tmp_path / "one")
    monkeypatch.setattr(running, "run_rounds", interrupt)
    search(config_with(), 1, tmp_path / "two", metric="mean_local")
    history = RunFolder(StudyFiles(tmp_path / "one").trial(0).directory).history
    (found,) = results_of(tmp_path / "two")["trials"]
    assert found["rounds"] == {str(record["round"]): record["mean_local"] for record in history}


def test_values_that_the_data_refuse_are_a_failed_trial_and_the_study_goes_on(
    tmp_path: Path, config_with: Configure, search: Search, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DEFECTS B13: GFPL's projection must have a dimension for each of the ten classes; 5 does not."""

    def only_the_projection(config: Config) -> Any:
        yield "method.projection_dim", Range(choices=(5,)), True, config.method

    monkeypatch.setattr(space, "_own", only_the_projection)
    monkeypatch.setattr(space, "_shared", lambda config: ())
    # null or 5: the chance that seven draws are all null is below 1 %, and the draws are the same in every run
    outcome = search(config_with(method={"name": "gfpl"}, federation={"rounds": 1}), 8, tmp_path, told=told)
    refused = "method.projection_dim = 5: a frame of 10 classes needs as many"
    by_value = {trial["params"]["method.projection_dim"]: trial["error"] for trial in results_of(tmp_path)["trials"]}
    assert by_value == {None: None, 5: refused}
    assert outcome.failed
    assert set(outcome.failed.values()) == {refused}
    assert f"{next(iter(outcome.failed))} failed: {refused}" in told.lines
    assert yaml.safe_load((outcome.directory / "best.yaml").read_text())["method"]["projection_dim"] is None


def test_a_trial_that_diverges_counts_and_a_study_without_any_other_says_why(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = running.train

    def diverges(config: Config, prepared: Path, partition: Path, directory: Path, **keywords: Any) -> bool:
        if directory.name == "0000":
            raise RunError("round 1, client 0: the weights are not finite")
        return original(config, prepared, partition, directory, **keywords)

    monkeypatch.setattr(running, "train", diverges)
    with pytest.raises(RunError, match="none of the 1 trials has finished; the last one: round 1, client 0"):
        search(config_with(), 1, tmp_path)
    search(config_with(), 2, tmp_path)
    assert states_of(tmp_path) == [("fail", "round 1, client 0: the weights are not finite"), ("complete", None)]
    assert results_of(tmp_path)["best"] == [1]


@pytest.mark.slow
def test_what_the_machine_refuses_is_no_failure_of_a_trial(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    """A disk that is full stops the study; a process that still is in the trial's folder is waited for."""

    def full(*arguments: Any, **keywords: Any) -> None:
        raise RunError("round 1, server step aggregate: no space left") from OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(running, "train", full)
        with pytest.raises(RunError, match="no space left"):
            search(config_with(), 2, tmp_path / "study")
    lock = StudyFiles(tmp_path / "study").trial(0).directory / ".running"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(1.5, file.close).start()
        search(config_with(), 2, tmp_path / "study")
    assert (tmp_path / "study" / "study.json").read_bytes() == (finished / "study.json").read_bytes()


def test_an_edited_file_stops_the_study_and_is_no_failure_of_a_trial(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any, **keywords: Any) -> None:
        raise EditedError.of("flcore/methods/fedavg.py")

    with monkeypatch.context() as patch:
        patch.setattr(running, "train", refused)
        with pytest.raises(RunError, match=r"fedavg\.py was edited"):
            search(config_with(), 1, tmp_path)
    search(config_with(), 1, tmp_path)
    assert states_of(tmp_path) == [("complete", None)]


class AllButTheFirst(BasePruner):
    """Stops every trial but the first, at its second round."""

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        return trial.number > 0 and trial.last_step == 2


@pytest.mark.parametrize("is_interrupted", quick([True, False], 1))
def test_a_pruned_trial_counts_and_leaves_its_history_alone(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """At the same round if the process was killed after that was reported, and before the pruner was asked."""
    monkeypatch.setattr(study, "pruner_by_name", lambda name, rounds: AllButTheFirst())
    config = config_with(federation={"rounds": 4})
    if is_interrupted:
        search(config, 1, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(AllButTheFirst, "prune", interrupt)
            with pytest.raises(KeyboardInterrupt):
                search(config, 2, tmp_path)
    search(config, 2, tmp_path)
    first, pruned = results_of(tmp_path)["trials"]
    assert (first["state"], pruned["state"], pruned["accuracy"]) == ("complete", "pruned", None)
    assert list(pruned["rounds"]) == ["1", "2"]
    left = sorted(path.name for path in StudyFiles(tmp_path).trial(1).directory.rglob("*"))
    assert left == ["checkpoint", "config.json", "history.jsonl", "inputs.json"]
    rounds = [record["round"] for record in RunFolder(StudyFiles(tmp_path).trial(1).directory).history]
    assert rounds == [1, 2]
