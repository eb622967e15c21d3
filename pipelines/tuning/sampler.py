"""Optuna's samplers and pruners by name, made independent of how fast trials run.

With ``lag`` trials in parallel, trial ``n`` is sampled and pruned from the results of the trials up to ``n - lag``.
Later trials count as running: their values are known, their results are not. Each trial has a seed of its own. So a
study is the same on any number of cores and processes, with or without interruptions.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from flcore.config.tuning import TuneConfig
from flcore.core.rng import numpy_stream
from pipelines.reporting.formats import plural

Make = Callable[[int], BaseSampler]
"""Makes a sampler from a seed."""

_RESULTS = ("constraints", "completed_rung_")
"""Prefixes of the system attributes set by a trial's results. The others are set when it is sampled."""


def sampler_by_name(name: str, startup: int) -> Make:
    """Return a factory for ``tune.sampler``; until ``startup`` results are known, trials are random."""
    makers: Mapping[str, Make] = {
        # group: learn a parameter that only some trials have from those trials
        "tpe": lambda seed: TPESampler(
            seed=seed, n_startup_trials=startup, multivariate=True, group=True, constant_liar=True
        ),
        "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False),
        "nsgaii": lambda seed: NSGAIISampler(seed=seed, population_size=max(startup, 2)),
        "random": lambda seed: RandomSampler(seed=seed),
    }
    return makers[name]


def pruner_by_name(name: str, rounds: int) -> BasePruner:
    """Return the pruner of ``tune.pruner`` for trials of ``rounds`` rounds; none prunes before a ninth of them."""
    makers: Mapping[str, Callable[[], BasePruner]] = {
        "median": lambda: MedianPruner(n_startup_trials=5, n_warmup_steps=max(rounds // 3, 1)),
        "successive_halving": lambda: SuccessiveHalvingPruner(min_resource=max(rounds // 9, 1), reduction_factor=3),
        "none": NopPruner,
    }
    return makers[name]()


def budget_line(tune: TuneConfig, trials: int) -> str:
    """Return a line on how many of a study's trials the sampler chooses."""
    first = trials if tune.sampler == "random" else min(tune.startup + tune.parallel - 1, trials)
    split = "all" if first == trials else str(first)
    rest = "" if first == trials else f", {trials - first} sampled by {tune.sampler}"
    return f"{plural(trials, 'trial')}: {split} given or random{rest} (tune.sampler, tune.startup, tune.parallel)"


class LaggedSampler(BaseSampler):
    """Sample trial ``n`` by another sampler, from the trials up to ``n - lag`` and a seed of its own."""

    def __init__(self, make: Make, seed: int, lag: int, first: Sequence[Mapping[str, Any]] = ()) -> None:
        """Set the source of trials' values; ``first`` has those of trial 0, 1, ..., later trials are sampled."""
        self._make, self._seed, self._lag, self._first = make, seed, lag, tuple(first)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        if trial.number < len(self._first):
            return {}
        return self._sampler(trial).infer_relative_search_space(seen_by(study, trial, self._lag), trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if trial.number < len(self._first):
            return {}
        sampler, seen = self._sampler(trial), seen_by(study, trial, self._lag)
        sampler.infer_relative_search_space(seen, trial)  # TPE keeps its groups
        return sampler.sample_relative(seen, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if trial.number < len(self._first) and param_name in self._first[trial.number]:
            return self._first[trial.number][param_name]
        seen = seen_by(study, trial, self._lag)
        return self._sampler(trial, param_name).sample_independent(seen, trial, param_name, param_distribution)

    def _sampler(self, trial: FrozenTrial, param_name: str = "") -> BaseSampler:
        stream = numpy_stream(self._seed, f"tuning {param_name}".rstrip(), trial.number)
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            return self._make(int(stream.integers(2**31)))


class LaggedPruner(BasePruner):
    """Prune trial ``n`` by another pruner, from the trials up to ``n - lag``."""

    def __init__(self, pruner: BasePruner, lag: int) -> None:
        self._pruner, self._lag = pruner, lag

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether to stop a trial after its last reported round."""
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # NumPy warns if all values are NaN
            return self._pruner.prune(seen_by(study, trial, self._lag), trial)


class PruningCheck:
    """Report a trial's rounds to the storage, and ask the pruner after each of them.

    The answer depends on the rounds alone: after an interruption the pruner is asked again from the first round on.
    """

    def __init__(self, study: Study, storage: BaseStorage, number: int, rounds: int) -> None:
        """Start before the first of a trial's ``rounds``; pruning after the last one would save nothing."""
        self._study, self._storage, self._last = study, storage, rounds
        self._trial = study.get_trials()[number]
        self._stored = self._trial.intermediate_values
        self._trial.intermediate_values = {}
        self._trial.system_attrs = _without_results(self._trial.system_attrs)
        self.pruned_at: int | None = None

    def report(self, values: Mapping[int, float]) -> None:
        """Report values by round; values reported before are skipped.

        Rounds after the one at which the trial was pruned are ignored.
        """
        rounds = self._trial.intermediate_values
        for number, value in values.items():
            if self.pruned_at is not None:
                return
            if number in rounds:
                continue
            rounds[number] = value
            if self._stored.get(number) != value and not math.isnan(value):
                self._storage.set_trial_intermediate_value(self._trial._trial_id, number, value)
            if number < self._last and self._study.pruner.prune(self._study, self._trial):
                self.pruned_at = number


def seen_by(study: Study, trial: FrozenTrial, lag: int) -> Study:
    """Return the study as a trial may see it."""
    seen = copy.copy(study)  # without the per-thread cache of trials
    seen._storage = _SeenTrials(study._storage, trial, lag)  # type: ignore[assignment]
    return seen


class _SeenTrials:
    """A storage in which a trial's most recent predecessors appear to be running."""

    def __init__(self, storage: BaseStorage, trial: FrozenTrial, lag: int) -> None:
        self._storage, self._trial, self._lag = storage, trial, lag

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = self._storage.get_all_trials(study_id, deepcopy=deepcopy)[: self._trial.number + 1]
        known = [trial if trial.number <= self._trial.number - self._lag else _running(trial) for trial in trials]
        return [trial for trial in known if states is None or trial.state in states]

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set it in the trial's own copy too, which may be older than the storage's."""
        self._storage.set_trial_system_attr(trial_id, key, value)
        if trial_id == self._trial._trial_id:
            self._trial.system_attrs[key] = value


def _running(trial: FrozenTrial) -> FrozenTrial:
    if trial.state == TrialState.WAITING:
        return trial
    running = copy.copy(trial)
    running.state, running.values, running.datetime_complete = TrialState.RUNNING, None, None
    running.intermediate_values, running.user_attrs = {}, {}
    running.system_attrs = _without_results(trial.system_attrs)
    return running


def _without_results(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if not key.startswith(_RESULTS)}
