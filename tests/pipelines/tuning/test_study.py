"""A study's trials in Optuna's terms: which are best, and what Optuna reads in the storage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.problem import Problem
from pipelines.tuning.study import Trials, best_trials, front

from .conftest import Configure


def test_the_front_is_what_no_other_trial_beats_in_both(config_with: Configure) -> None:
    """(accuracy, bytes): (0.9, 200) loses to (0.9, 100), and (0.7, 60) to (0.8, 50)."""
    problem = Problem.of(config_with(), "accuracy,bytes")
    study = optuna.create_study(directions=["maximize", "minimize"])
    for accuracy, sent in ((0.7, 60), (0.9, 200), (0.8, 50), (0.9, 100), (0.5, 10)):
        study.add_trial(optuna.trial.create_trial(values=[accuracy, sent], user_attrs={"bytes": sent}))
    best = best_trials(problem, study)
    assert [trial.number for trial in best] == [3, 1, 2, 0, 4]
    assert [trial.number for trial in front(best)] == [3, 2, 4]
    assert front(best_trials(problem, optuna.create_study())) == []


def test_what_sends_too_much_is_no_result(config_with: Configure) -> None:
    """At most 100 bytes: the most accurate one sends 200."""
    study = optuna.create_study(directions=["maximize", "minimize"])
    for accuracy, sent in ((0.7, 60), (0.9, 200), (0.8, 100)):
        study.add_trial(optuna.trial.create_trial(values=[accuracy, sent], user_attrs={"bytes": sent}))
    best = best_trials(Problem.of(config_with(), "accuracy,bytes", max_bytes=100), study)
    assert [trial.number for trial in best] == [2, 0]


def test_of_a_cost_less_is_better(config_with: Configure) -> None:
    study = optuna.create_study(direction="minimize")
    for cost in (30.0, 10.0, 20.0):
        study.add_trial(optuna.trial.create_trial(value=cost, user_attrs={"bytes": 1}))
    best = best_trials(Problem.of(config_with(), "accuracy", "bytes_up"), study)
    assert [trial.number for trial in best] == [1, 2, 0]
    assert [trial.number for trial in front(best)] == [1]


@pytest.mark.parametrize("storage", [None, "named.journal"])
def test_a_trial_waits_for_the_results_that_it_is_sampled_from(config_with: Configure, storage: str | None) -> None:
    """Two at the same time: trial 2 waits for trial 0, also where trial 1 has ended."""
    trials = Trials(Problem.of(config_with(tune={"parallel": 2}), "accuracy"), StudyFiles(Path("study")), storage)
    assert [trials.ask() for _ in range(3)] == [True, True, False]
    trials.tell(1, TrialState.COMPLETE, [0.5], bytes=1)
    assert not trials.ask()
    trials.tell(0, TrialState.COMPLETE, [0.5], bytes=1)
    assert [trials.ask() for _ in range(3)] == [True, True, False]


def test_folders_that_share_a_storage_are_given_seeded_values(config_with: Configure) -> None:
    """None waits for another's trial, or takes it. Trials 0 to 3 are given or random, by seed and number."""
    problem = Problem.of(config_with(tune={"parallel": 1}), "accuracy")

    def values_by(storage: str, folders: str) -> list[dict[str, Any]]:
        opened = {name: Trials(problem, StudyFiles(Path(storage, name)), f"{storage}.journal") for name in folders}
        for name in folders:
            assert opened[name].ask()
        study = opened[folders[0]].study
        assert {number for trials in opened.values() for number in trials.running()} == set(range(len(folders)))
        return [trial.params for trial in study.trials]

    assert values_by("first", "abcd") == values_by("second", "dbca")
    alone = Trials(problem, StudyFiles(Path("alone")), None)
    for number in range(4):
        assert alone.ask()
        alone.tell(number, TrialState.COMPLETE, [0.5], bytes=1)
    assert values_by("third", "dcba") == [trial.params for trial in alone.study.trials]


@pytest.mark.slow
def test_who_logs_studies_imports_no_torch_and_who_trains_no_mlflow() -> None:
    code = (
        "import sys; import pipelines.tuning.log; assert not {'torch', 'optuna'} & set(sys.modules);"
        "import pipelines.tuning.search; assert not {'mlflow', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    project = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=project).returncode == 0
