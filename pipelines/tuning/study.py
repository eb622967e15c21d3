"""A study's trials in Optuna's storage: begin, end and rank them."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from flcore.io import disk
from pipelines.addresses import without_password
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.problem import Problem
from pipelines.tuning.sampler import LaggedPruner, LaggedSampler, PruningCheck, pruner_by_name, sampler_by_name
from pipelines.tuning.storage import JOURNAL, open_storage

_IDENTITY = "identity"  # user attribute of the study


class Trials:
    """A study's trials. Ask and tell only while its folder is locked."""

    def __init__(self, problem: Problem, files: StudyFiles, storage: str | None) -> None:
        """Open or create the study in a storage; a given one may also have its trials from other folders."""
        tune, rounds = problem.config.tune, problem.config.federation.rounds
        self._problem, self._files, self._lag = problem, files, tune.parallel
        self._url, self._is_shared = storage, storage is not None
        self._storage = open_storage(storage)
        name = problem.name if self._is_shared else _place(files.directory)
        if not self._is_shared:
            self._delete_replaced(name)
        make, pruner = sampler_by_name(tune.sampler, tune.startup), tune.pruner if problem.prunes else "none"
        self.study = optuna.create_study(
            storage=self._storage,
            study_name=name,
            directions=list(problem.directions),
            sampler=LaggedSampler(make, problem.config.seed, self._lag, problem.starts),
            pruner=LaggedPruner(pruner_by_name(pruner, rounds), self._lag),
            load_if_exists=True,
        )
        if self.study.metric_names is None:
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                self.study.set_metric_names([problem.metric, "bytes"][: len(problem.directions)])
            self.study.set_user_attr(_IDENTITY, problem.hash)

    @property
    def dashboard(self) -> str:
        return f"optuna-dashboard {shlex.quote(without_password(self._url or str(JOURNAL)))}"

    def running(self) -> list[int]:
        """Return this folder's trials that have begun and not ended, in order; killed processes leave some."""
        begun = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [trial.number for trial in begun if self._is_ours(trial.number)]

    def ask(self) -> bool:
        """Begin the next trial; return False if it must wait for a running one."""
        trials = self.study.get_trials(deepcopy=False)
        # A trial enqueued in the dashboard, or a new one.
        number = next((trial.number for trial in trials if trial.state == TrialState.WAITING), len(trials))
        all_running = [trial.number for trial in trials if trial.state == TrialState.RUNNING]
        running = list(filter(self._is_ours, all_running))
        # Only wait for trials of this folder: processes of other folders may have been killed.
        is_behind = running == all_running and min(running, default=number) <= number - self._lag
        if len(running) >= self._lag or is_behind:
            return False
        for earlier in running:
            self.values(earlier)  # complete a trial of a process killed while asking
        trial = self.study.ask()
        disk.make_folder(self._files.trial(trial.number).directory)  # marks the trial as this folder's
        self._problem.suggest(trial)
        return True

    def values(self, number: int) -> dict[str, Any]:
        return self._problem.suggest(Trial(self.study, self._id(number)))

    def check(self, number: int, rounds: int) -> PruningCheck:
        return PruningCheck(self.study, self._storage, number, rounds)

    def tell(self, number: int, state: TrialState, values: Sequence[float] | None, **attributes: Any) -> None:
        """Store how a trial ended; attributes are the trial's user attributes."""
        trial_id = self._id(number)
        for name, value in attributes.items():
            if value is not None:
                self._storage.set_trial_user_attr(trial_id, name, value)
        if self._problem.max_bytes is not None and attributes.get("bytes") is not None:
            Trial(self.study, trial_id).set_constraint("bytes", float(attributes["bytes"] - self._problem.max_bytes))
        self.study.tell(number, values, state=state)

    def is_of_data(self, fingerprints: Mapping[str, str]) -> bool:
        """Return whether the study began with these data; a new study begins with them."""
        known = self.study.user_attrs
        for name, fingerprint in fingerprints.items():
            if known.get(name, fingerprint) != fingerprint:
                return False
            if name not in known:
                self.study.set_user_attr(name, fingerprint)
        return True

    def _is_ours(self, number: int) -> bool:
        return not self._is_shared or self._files.trial(number).directory.exists()

    def _id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _delete_replaced(self, name: str) -> None:
        """Delete a study from the journal if its folder was deleted or now contains another study."""
        if name not in optuna.get_all_study_names(self._storage):
            return
        study = optuna.load_study(study_name=name, storage=self._storage)
        if not self._files.record.config.exists() or study.user_attrs.get(_IDENTITY) != self._problem.hash:
            optuna.delete_study(study_name=name, storage=self._storage)


def _place(directory: Path) -> str:
    """Return a folder's name in the dashboard: relative to the current folder if inside it."""
    absolute, current = directory.absolute(), Path.cwd()
    return str(absolute.relative_to(current) if absolute.is_relative_to(current) else absolute)


def fingerprints_of(study: Study) -> dict[str, Any]:
    """Return the fingerprints of the data that a study began with."""
    return {name: value for name, value in study.user_attrs.items() if name.endswith("_fingerprint")}


def of_other_code(study: Study, code: str) -> list[FrozenTrial]:
    """Return the trials that ended under another code fingerprint."""
    return [trial for trial in ended_trials(study) if trial.user_attrs.get("code", code) != code]


def ended_trials(study: Study) -> list[FrozenTrial]:
    """Return the finished, pruned and failed trials, in order."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def best_trials(problem: Problem, study: Study) -> list[FrozenTrial]:
    """Return the finished trials, the best first; among equals fewer bytes sent, then earlier, come first.

    Trials that send more than is allowed are left out.
    """
    sign = -1 if problem.direction == "maximize" else 1
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    allowed = [trial for trial in finished if problem.within(trial.user_attrs["bytes"])]
    return sorted(allowed, key=lambda trial: (sign * trial.values[0], trial.user_attrs["bytes"], trial.number))


def front(best: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the non-dominated ones of :func:`best_trials`: the best one, or the front of two objectives."""
    nondominated = list(best[:1])
    for trial in best[1:]:  # a worse one belongs to the front if it sends less
        if len(trial.values) > 1 and trial.values[1] < nondominated[-1].values[1]:
            nondominated.append(trial)
    return nondominated
