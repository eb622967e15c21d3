"""A study's trials in Optuna's terms: which are best, and what Optuna reads in the storage."""

from __future__ import annotations

from collections.abc import Callable

import optuna

from flcore.config.schema import Config
from pipelines.tuning.problem import Problem
from pipelines.tuning.study import best_trials, front


def test_the_front_is_what_no_other_trial_beats_in_both(config_with: Callable[..., Config]) -> None:
    """(accuracy, bytes): (0.9, 200) loses to (0.9, 100), and (0.7, 60) to (0.8, 50)."""
    problem = Problem.of(config_with(), "accuracy,bytes")
    study = optuna.create_study(directions=["maximize", "minimize"])
    for accuracy, sent in ((0.7, 60), (0.9, 200), (0.8, 50), (0.9, 100), (0.5, 10)):
        study.add_trial(optuna.trial.create_trial(values=[accuracy, sent], user_attrs={"bytes": sent}))
    best = best_trials(problem, study)
    assert [trial.number for trial in best] == [3, 1, 2, 0, 4]
    assert [trial.number for trial in front(best)] == [3, 2, 4]
    assert front(best_trials(problem, optuna.create_study())) == []


def test_what_sends_too_much_is_no_result(config_with: Callable[..., Config]) -> None:
    """At most 100 bytes: the most accurate one sends 200."""
    study = optuna.create_study(directions=["maximize", "minimize"])
    for accuracy, sent in ((0.7, 60), (0.9, 200), (0.8, 100)):
        study.add_trial(optuna.trial.create_trial(values=[accuracy, sent], user_attrs={"bytes": sent}))
    best = best_trials(Problem.of(config_with(), "accuracy,bytes", max_bytes=100), study)
    assert [trial.number for trial in best] == [2, 0]


def test_of_a_cost_less_is_better(config_with: Callable[..., Config]) -> None:
    study = optuna.create_study(direction="minimize")
    for cost in (30.0, 10.0, 20.0):
        study.add_trial(optuna.trial.create_trial(value=cost, user_attrs={"bytes": 1}))
    best = best_trials(Problem.of(config_with(), "accuracy", "bytes_up"), study)
    assert [trial.number for trial in best] == [1, 2, 0]
    assert [trial.number for trial in front(best)] == [1]
