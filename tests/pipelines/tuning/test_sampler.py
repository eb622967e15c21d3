"""Samplers and pruners: what a trial may see, whoever asks, in whatever order results come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import optuna
import pytest
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from flcore.config.schema import Config
from flcore.config.tuning import TuneConfig
from pipelines.tuning.sampler import (
    LaggedPruner,
    LaggedSampler,
    PruningCheck,
    budget_line,
    pruner_by_name,
    sampler_by_name,
)
from tests.cases import quick

Objective = Callable[[Trial], float]


def objective(trial: Trial) -> float:
    """The peak is at 0.3 and ``b``; only ``b`` has a depth."""
    x, kind = trial.suggest_float("x", 0, 1), trial.suggest_categorical("kind", ("a", "b"))
    depth = trial.suggest_int("depth", 1, 5) if kind == "b" else 0
    return 1 - (x - 0.3) ** 2 + 0.01 * depth


def study_of(name: str, lag: int, directions: Sequence[str] = ("maximize",)) -> Study:
    first = [{"x": 0.9, "kind": "a"}]
    sampler = LaggedSampler(sampler_by_name(name, 3), seed=7, lag=lag, first=first)
    return optuna.create_study(sampler=sampler, directions=list(directions))


def values(study: Study) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


@pytest.mark.parametrize("name", quick(["tpe", "nsgaii", "random", "gp"], 3))
def test_a_study_is_the_same_in_whatever_order_its_trials_end(name: str) -> None:
    """Three at the same time: in turn, and the latest first whenever the oldest of them must end."""
    in_turn = study_of(name, 3)
    in_turn.optimize(objective, n_trials=12)

    late = study_of(name, 3)
    running: dict[int, tuple[Trial, float]] = {}
    for number in range(12):
        if number - 3 in running:  # trial n waits for n - 3
            for earlier in sorted(running, reverse=True):
                late.tell(*running.pop(earlier))
        trial = late.ask()
        running[number] = trial, objective(trial)
    assert values(late) == values(in_turn)
    assert values(in_turn)[0] == {"x": 0.9, "kind": "a"}
    if name != "random":
        with_lag_1 = study_of(name, 1)
        with_lag_1.optimize(objective, n_trials=12)
        assert values(with_lag_1) != values(in_turn)


def test_a_trial_depends_on_results_up_to_the_lag_and_on_values_of_the_later_ones() -> None:
    """Trial 9 with three at the same time knows how 0 to 6 ended, and of 7 and 8 the values."""

    def ninth(changed: int | None = None, value: float = 0.5) -> dict[str, Any]:
        study = study_of("tpe", 3)
        for number in range(9):
            trial = study.ask()
            reached = objective(trial)
            study.tell(trial, value if number == changed else reached)
        trial = study.ask()
        objective(trial)
        return trial.params

    usual = ninth()
    assert ninth(8, 0.1) == ninth(7, 0.1) == usual
    assert ninth(6, 9.0) != usual


def test_two_hosts_that_ask_at_the_same_time_are_given_seeded_trials() -> None:
    """Each has its own sampler; the values of trial n do not depend on the host that asks for it."""

    def by_two_hosts(turns: Sequence[int]) -> list[dict[str, Any]]:
        storage = optuna.storages.InMemoryStorage()
        sampler = LaggedSampler(sampler_by_name("tpe", 3), 7, 2, [{"x": 0.9, "kind": "a"}])
        first = optuna.create_study(storage=storage, study_name="shared", sampler=sampler, direction="maximize")
        hosts = [first, optuna.load_study(storage=storage, study_name="shared", sampler=sampler)]
        for _ in range(5):
            trials = [hosts[turn].ask() for turn in turns]  # both have asked before either has values
            for turn, trial in zip(turns, trials, strict=True):
                hosts[turn].tell(trial, objective(trial))
        return values(hosts[0])

    alone = study_of("tpe", 2)
    alone.optimize(objective, n_trials=10)
    found = by_two_hosts([0, 1])
    assert by_two_hosts([1, 0]) == found
    assert found[:4] == values(alone)[:4], "TPE begins with trial 4, and knows no values of the other host's trial"


def test_an_interrupted_trial_is_given_the_values_that_it_would_have_had() -> None:
    """Its process had asked for one of three values."""
    whole = study_of("tpe", 1)
    whole.optimize(objective, n_trials=6)
    killed = study_of("tpe", 1)
    killed.optimize(objective, n_trials=5)
    killed.ask().suggest_float("x", 0, 1)
    resumed = Trial(killed, killed.trials[5]._trial_id)
    objective(resumed)
    assert resumed.params == values(whole)[5]


@pytest.mark.parametrize("name", ["tpe", "nsgaii"])
def test_two_objectives_are_sampled_too(name: str) -> None:
    def two(trial: Trial) -> tuple[float, float]:
        return objective(trial), trial.params["x"]

    study = study_of(name, 2, ("maximize", "minimize"))
    study.optimize(two, n_trials=10)
    assert len(study.best_trials) > 0


def test_every_name_of_the_configuration_makes_a_sampler_or_a_pruner() -> None:
    options = Config.__dataclass_fields__["tune"].default_factory
    assert options is TuneConfig
    for name in ("tpe", "gp", "nsgaii", "random"):
        assert isinstance(sampler_by_name(name, 2)(0), optuna.samplers.BaseSampler)
        assert Config.from_mapping({"tune": {"sampler": name}}).tune.sampler == name
    for name in ("median", "successive_halving", "none"):
        assert isinstance(pruner_by_name(name, 9), optuna.pruners.BasePruner)
        assert Config.from_mapping({"tune": {"pruner": name}}).tune.pruner == name


def test_with_the_defaults_half_of_twelve_trials_are_a_search() -> None:
    """Trial n is sampled from n - parallel + 1 results: TPE has its 4 from trial 5 on, so 7 of 12."""
    tune = TuneConfig()
    calls: list[int] = []

    class Counting(optuna.samplers.TPESampler):
        def _sample(self, study: Study, trial: FrozenTrial, search_space: Any) -> Any:
            calls.append(trial.number)
            return super()._sample(study, trial, search_space)

    def make(seed: int) -> optuna.samplers.BaseSampler:
        return Counting(seed=seed, n_startup_trials=tune.startup, multivariate=True)

    study = optuna.create_study(sampler=LaggedSampler(make, 0, tune.parallel), direction="maximize")
    study.optimize(objective, n_trials=12)
    assert sorted(set(calls)) == list(range(tune.startup + tune.parallel - 1, 12)) == list(range(5, 12))


def test_a_study_says_how_many_of_its_trials_are_a_search() -> None:
    """Of 12 the first 4 + 2 - 1; all of them where ten results are asked for first, as TPE does by default."""
    assert budget_line(TuneConfig(), 12).startswith("12 trials: 5 given or random, 7 sampled by tpe (")
    assert budget_line(TuneConfig(startup=10, parallel=4), 12).startswith("12 trials: all given or random (")
    assert budget_line(TuneConfig(sampler="random"), 1).startswith("1 trial: all given or random (")


# ---- pruning -----------------------------------------------------------------------------------------------------


def pruned_study(name: str, lag: int, rounds: int) -> Study:
    return optuna.create_study(direction="maximize", pruner=LaggedPruner(pruner_by_name(name, rounds), lag))


def check(study: Study, rounds: int) -> PruningCheck:
    return PruningCheck(study, study._storage, study.ask().number, rounds)


def add(study: Study, rounds: dict[int, float]) -> None:
    study.add_trial(create_trial(value=1.0, intermediate_values=rounds))


def test_a_trial_is_pruned_below_the_median_of_those_that_it_may_know() -> None:
    """Six rounds, so from round 2 on and before the last. Trials 0 to 5 had k and 2 k at rounds 2 and 5: of 0 to 4 the
    medians are 2 and 4.

    With two at the same time trial 6 knows 0 to 4; with three it knows 0 to 3, too few.
    """

    def pruned_at(lag: int, *values: float) -> int | None:
        study = pruned_study("median", lag, 6)
        for number in range(6):
            add(study, {1: 9.0, 2: float(number), 5: 2.0 * number, 6: 100.0})
        trial = check(study, 6)
        trial.report(dict(enumerate(values, start=1)))
        return trial.pruned_at

    assert pruned_at(2, 0.0, 1.9, 9.0) == 2
    assert pruned_at(2, 0.0, 2.0, 2.0, 2.0, 3.9, 9.0) == 5
    assert pruned_at(2, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0) is None, "the best round until then counts"
    assert pruned_at(2, 0.0, 2.0, 2.0, 2.0, 4.0, 0.0) is None, "nothing is saved at the last round"
    assert pruned_at(3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) is None
    assert pruned_at(1, 0.0, 2.4) == 2, "of 0 to 5 the median is 2.5"
    assert pruned_at(2, math.nan, math.nan) == 2


@pytest.mark.parametrize("name", ["median", "successive_halving"])
def test_a_trial_is_pruned_at_the_same_round_after_an_interruption(name: str) -> None:
    """All of its rounds are in the storage, and with successive halving its rungs, but nobody was told."""
    study = pruned_study(name, 1, 9)
    for number in range(6):
        earlier = check(study, 9)
        earlier.report({at: number + 0.1 * at for at in range(1, 10)})
        number_of_it = len(study.trials) - 1
        if earlier.pruned_at is None:
            study.tell(number_of_it, 1.0)
        else:
            study.tell(number_of_it, state=TrialState.PRUNED)
    trial = check(study, 9)
    bad = {at: 0.05 * at for at in range(1, 10)}
    trial.report(bad)
    again = PruningCheck(study, study._storage, len(study.trials) - 1, 9)
    for at, value in bad.items():
        again.report({at: value})
    assert trial.pruned_at == again.pruned_at is not None
    assert max(study.trials[-1].intermediate_values) == trial.pruned_at
