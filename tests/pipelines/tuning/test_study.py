"""A study's trials in Optuna's terms: which are best, and what Optuna reads in the storage."""

from __future__ import annotations

import optuna

from pipelines.tuning.study import best_trials, front


def test_the_front_is_what_no_other_trial_beats_in_both() -> None:
    """(accuracy, bytes): (0.9, 200) loses to (0.9, 100), and (0.7, 60) to (0.8, 50)."""
    study = optuna.create_study(directions=["maximize", "minimize"])
    for accuracy, sent in ((0.7, 60), (0.9, 200), (0.8, 50), (0.9, 100), (0.5, 10)):
        study.add_trial(optuna.trial.create_trial(values=[accuracy, sent], user_attrs={"bytes": sent}))
    best = best_trials(study)
    assert [trial.number for trial in best] == [3, 1, 2, 0, 4]
    assert [trial.number for trial in front(best)] == [3, 2, 4]
    assert front(best_trials(optuna.create_study())) == []
