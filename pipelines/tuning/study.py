"""The trials of a study, in Optuna's storage: which one is next, when one is given up, and how each has ended.

Several trials are under way at once, and yet a study does not depend on how fast each of them is, on the number of
cores or processes, or on interruptions: of ``at_once`` trials, number n is chosen when all up to n - at_once have
ended, and from those alone; of the others it is only known that they are under way. Its sampler is seeded by the
study's seed and by n, so that nothing of a sampler has to be stored. So the storage is a record of what was chosen,
and the choice itself is a function (:func:`chosen`).
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from flcore.core.errors import ConfigError, RunError
from flcore.core.rng import numpy_stream
from flcore.io import disk
from pipelines.addresses import redact, remember, sqlite_address, without_password
from pipelines.execution.one_run import NO_HURDLES, Hurdles
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.journal import open_journal
from pipelines.tuning.problem import Problem
from pipelines.tuning.trial import TrialOutcome

SAMPLER = "TPESampler(multivariate, group, constant_liar), seeded per trial"
AT_ONCE = 4
"""Trials under way at the same time, where nobody says. More fill more cores, and know less of one another."""
_STARTUP_TRIALS = 10  # at random, before the sampler has something to learn from
_TRIALS_BEFORE_PRUNING = 5
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "fail": TrialState.FAIL}


class Trials:
    """A study's trials; one process at a time may ask, tell or look."""

    def __init__(self, problem: Problem, files: StudyFiles, storage: str | None, at_once: int | None) -> None:
        """Open or create the study.

        Args:
            problem: what is searched.
            files: of the study.
            storage: Optuna's storage as an SQLAlchemy URL, in which there may be trials of other folders; None for a
                journal in the study's own.
            at_once: so many trials are under way at most, in all processes of this folder; None: as the study began.

        Raises:
            ConfigError: the storage cannot be opened, or the study began with another ``at_once``.
        """
        self._problem, self._files = problem, files
        self._is_shared = storage is not None
        self._storage = _open_storage(storage, files)
        directions = problem.directions
        self.study = optuna.create_study(
            storage=self._storage, study_name=problem.name, directions=list(directions), load_if_exists=True
        )
        if self.study.metric_names is None:
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                self.study.set_metric_names([problem.metric, "bytes"][: len(directions)])  # for Optuna's dashboard
        self.at_once = int(self.study.user_attrs.get("at_once", at_once or AT_ONCE))
        if at_once not in (None, self.at_once):
            raise ConfigError(
                f"--at-once {at_once}: this study began with {self.at_once}, which its trials depend on; leave it out, "
                "or choose another --out"
            )
        if "at_once" not in self.study.user_attrs:
            self.study.set_user_attr("at_once", self.at_once)

    def under_way(self) -> list[Trial]:
        """The trials of this folder that were begun and have not ended, in order; killed processes leave some too."""
        begun = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [self._trial(one.number) for one in begun if self._is_ours(one.number)]

    def ask(self) -> bool:
        """Begin the next trial if it may: False where it has to wait for one that is under way."""
        known = self.study.get_trials(deepcopy=False)
        waiting = [trial.number for trial in known if trial.state == TrialState.WAITING]
        number = waiting[0] if waiting else len(known)
        ours = [trial.number for trial in self.under_way()]
        if len(ours) >= self.at_once or (ours and ours[0] <= number - self.at_once and not self._is_shared):
            return False
        if not waiting:  # else a killed process had chosen it
            self.study.enqueue_trial(chosen(self._problem, known, self.at_once))
        trial = self.study.ask()
        disk.make_folder(self._files.trial(trial.number).directory)  # which makes it ours
        self._problem.suggest(trial)
        return True

    def hurdles(self, number: int) -> Hurdles:
        """Where a trial is to be given up: below the median of what the earlier ones that it knows had there.

        From a third of the rounds on, if five of those have finished. Not at the last round, where nothing is saved,
        and never where there are several objectives, or less is better.
        """
        rounds = self._problem.config.federation.rounds
        known = [
            trial.intermediate_values
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if trial.number <= number - self.at_once
        ]
        prunes = self._problem.prunes and self._problem.direction == "maximize"
        if not prunes or len(known) < _TRIALS_BEFORE_PRUNING:
            return NO_HURDLES
        there = {at: [values[at] for values in known if at in values] for at in range(max(rounds // 3, 1), rounds)}
        return Hurdles(self._problem.metric, {at: statistics.median(values) for at, values in there.items() if values})

    def tell(self, trial: Trial, outcome: TrialOutcome, code: str) -> None:
        """Store how a trial has ended, and under which code; told once more after an interruption, rounds stay."""
        known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        if len(self.study.directions) == 1:
            for number, value in sorted(outcome.rounds.items()):
                if number not in known:
                    trial.report(value, number)
        for name, found in (("bytes", outcome.bytes), ("error", outcome.error), ("code", code)):
            if found is not None:
                trial.set_user_attr(name, found)
        if self._problem.max_steps is not None and outcome.last_round is not None:
            trial.set_user_attr("rounds", outcome.last_round)
        if self._problem.max_bytes is not None and outcome.bytes is not None:
            trial.set_constraint("bytes", float(outcome.bytes - self._problem.max_bytes))
        values = [outcome.accuracy, outcome.bytes][: len(self.study.directions)]
        self.study.tell(
            trial,
            [float(value) for value in values if value is not None] if outcome.state == "complete" else None,
            state=_STATES[outcome.state],
        )

    def same_data(self, fingerprints: Mapping[str, str]) -> bool:
        """Whether the study began on these data; a new one does now."""
        known = self.study.user_attrs
        if any(known.get(name, fingerprint) != fingerprint for name, fingerprint in fingerprints.items()):
            return False
        for name, fingerprint in fingerprints.items():
            if name not in known:
                self.study.set_user_attr(name, fingerprint)
        return True

    def _is_ours(self, number: int) -> bool:
        return not self._is_shared or self._files.trial(number).directory.exists()

    def _trial(self, number: int) -> Trial:
        """A trial that perhaps another process began: the storage knows the id that a Trial is made from."""
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        return Trial(self.study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number))


def chosen(problem: Problem, known: Sequence[FrozenTrial], at_once: int) -> dict[str, Any]:
    """The values of the trial after these.

    Args:
        problem: what is searched.
        known: all trials so far, in order.
        at_once: of the last ``at_once`` - 1 of them only the values are looked at, not how they have ended.
    """
    number = len(known)
    starts = problem.starts
    if number < len(starts):
        return dict(starts[number])
    seen = optuna.create_study(directions=list(problem.directions), sampler=_sampler(problem.config.seed, number))
    seen.add_trials([trial if trial.number <= number - at_once else _as_under_way(trial) for trial in known])
    return problem.suggest(seen.ask())


def _as_under_way(trial: FrozenTrial) -> FrozenTrial:
    return create_trial(state=TrialState.RUNNING, params=trial.params, distributions=trial.distributions)


def of_other_code(study: Study, code: str) -> list[FrozenTrial]:
    """Trials that ended under other code than this, by its fingerprint."""
    return [trial for trial in ended_trials(study) if trial.user_attrs.get("code", code) != code]


def ended_trials(study: Study) -> list[FrozenTrial]:
    """Finished, pruned and failed trials, in order."""
    return study.get_trials(deepcopy=False, states=_ENDED)


def best_trials(problem: Problem, study: Study) -> list[FrozenTrial]:
    """Finished trials, the best first, and among equals the one that sends least, then the earliest.

    Without those that send more than is allowed.
    """
    sign = -1 if problem.direction == "maximize" else 1
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    allowed = [trial for trial in finished if problem.within(trial.user_attrs["bytes"])]
    return sorted(allowed, key=lambda trial: (sign * trial.values[0], trial.user_attrs["bytes"], trial.number))


def front(best: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Of :func:`best_trials` those that no other beats in everything: for one objective the best, for two the front."""
    found = list(best[:1])
    for trial in best[1:]:  # a worse one belongs to the front if it sends less
        if len(trial.values) > 1 and trial.values[1] < found[-1].values[1]:
            found.append(trial)
    return found


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn a storage that is lost in the middle into an error of one line."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = redact(str(error.__cause__ or error)).partition("\n")[0]
        raise RunError(f"--storage: lost during the study ({reason}); the same command goes on") from error


def _open_storage(url: str | None, files: StudyFiles) -> BaseStorage:
    """Open Optuna's storage, making it where there is none."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is None and not files.database.exists():  # as earlier versions made it
        return open_journal(files.journal)
    remember(url or "")
    try:
        return RDBStorage(sqlite_address(files.database.resolve()) if url is None else url)
    # SQLAlchemy's own for addresses and connections, ImportError for a missing driver, RuntimeError for the tables of
    # another version of Optuna.
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, ImportError, RuntimeError) as error:
        reason = redact(str(error)).partition("\n")[0]
        if url is None:
            raise ConfigError(f"{files.database}: cannot be opened ({reason}); delete it, or that folder") from error
        raise ConfigError(
            f"--storage {without_password(url)}: cannot be opened ({reason}); expected such as sqlite:///study.db"
        ) from error


def _sampler(seed: int, number: int) -> TPESampler:
    """The sampler of one trial: a function of seed and number, whichever process asks."""
    stream = numpy_stream(seed, "tuning", number)
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        return TPESampler(
            seed=int(stream.integers(2**31)),
            n_startup_trials=_STARTUP_TRIALS,
            multivariate=True,
            group=True,  # keys that only some trials have are learnt from those
            constant_liar=True,
        )
