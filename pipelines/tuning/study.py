"""The trials of a study, in Optuna's storage: which one is next, when one is given up, and how each has ended.

The sampler of a trial is seeded by the study's seed and the trial's number, so that a study which was interrupted
proposes what an uninterrupted one would have, and nothing of the sampler has to be stored.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import optuna
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from flcore.config import Config
from flcore.errors import ConfigError, RunError
from flcore.rng import numpy_stream
from pipelines.tracking.addresses import without_password
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.problem import Problem
from pipelines.tuning.trial import TrialOutcome

SAMPLER = "TPESampler(multivariate, constant_liar), seeded per trial"
_STARTUP_TRIALS = 10  # at random, before the sampler has something to learn from
_TRIALS_BEFORE_PRUNING = 5
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "fail": TrialState.FAIL}


class Trials:
    """A study's trials; one process at a time asks for the next one."""

    def __init__(self, problem: Problem, files: StudyFiles, storage: str | None) -> None:
        """Open or create the study; a new one begins with the given values.

        Args:
            problem: what is searched.
            files: of the study.
            storage: Optuna's storage as an SQLAlchemy URL, in which there may be trials of other folders; None for a
                SQLite file in the study's own.

        Raises:
            ConfigError: the storage cannot be opened.
        """
        self._problem, self._files = problem, files
        self._is_shared = storage is not None
        self._storage = _open_storage(storage, files)
        directions = problem.directions
        self.study = optuna.create_study(
            storage=self._storage,
            study_name=problem.name,
            directions=list(directions),
            pruner=_pruner(problem.config) if len(directions) == 1 else NopPruner(),
            load_if_exists=True,
        )
        if self.study.metric_names is None:
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                self.study.set_metric_names([problem.metric, "bytes"][: len(directions)])  # for Optuna's dashboard
        if not self.study.trials:
            self.study.enqueue_trial(problem.given_values)

    def next(self) -> Trial:
        """The trial that a killed process left behind, else one that waits, else a new one."""
        interrupted = [
            trial.number
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if not self._is_shared or self._files.trial(trial.number).directory.exists()
        ]
        waiting = [trial.number for trial in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))]
        number = next(iter(interrupted + waiting), len(self.study.trials))
        self.study.sampler = _sampler(self._problem.config.seed, number)
        return self._take_up(number) if interrupted else self.study.ask()

    def _take_up(self, number: int) -> Trial:
        """A trial that another process began: the storage knows the id that a Trial is made from."""
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        return Trial(self.study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number))

    def is_hopeless(self, number: int, rounds: Mapping[int, float]) -> bool:
        """Whether a trial is to be given up after these rounds; never where there are several objectives.

        The storage learns of rounds when the trial has ended: of one that begins again it would keep the old ones.
        """
        asked = copy.copy(self.study.get_trials(deepcopy=False)[number])
        asked.intermediate_values = dict(rounds)
        return self.study.pruner.prune(self.study, asked)

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
            self.study.set_user_attr(name, fingerprint)
        return True


def of_other_code(study: Study, code: str) -> list[FrozenTrial]:
    """Trials that ended under other code than this, by its fingerprint."""
    return [trial for trial in ended_trials(study) if trial.user_attrs.get("code", code) != code]


def ended_trials(study: Study) -> list[FrozenTrial]:
    """Finished, pruned and failed trials, in order."""
    return study.get_trials(deepcopy=False, states=_ENDED)


def best_trials(study: Study) -> list[FrozenTrial]:
    """Finished trials, the most accurate first, and among equals the one that sends least, then the earliest."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(finished, key=lambda trial: (-trial.values[0], trial.user_attrs["bytes"], trial.number))


def front(best: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Of :func:`best_trials` those that no other beats in everything: for one objective the best, for two the front."""
    found = list(best[:1])
    for trial in best[1:]:  # falling accuracy: a later one belongs to the front if it sends less
        if len(trial.values) > 1 and trial.values[1] < found[-1].values[1]:
            found.append(trial)
    return found


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn a storage that is lost in the middle into an error of one line."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise RunError(f"--storage: lost during the study ({reason}); the same command goes on") from error


def _open_storage(url: str | None, files: StudyFiles) -> RDBStorage:
    """Open Optuna's storage, making its tables where there are none."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return RDBStorage(f"sqlite:///{files.database.resolve()}" if url is None else url)
    # SQLAlchemy's own for addresses and connections, ImportError for a missing driver, RuntimeError for the tables of
    # another version of Optuna.
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if url is None:
            raise ConfigError(f"{files.database}: cannot be opened ({reason}); delete it, or that folder") from error
        raise ConfigError(
            f"--storage {without_password(url)}: cannot be opened ({reason}); expected such as sqlite:///study.db"
        ) from error


def _pruner(config: Config) -> BasePruner:
    """Stop a trial that is below the median of the earlier ones at the same round, after a third of the rounds."""
    return MedianPruner(n_startup_trials=_TRIALS_BEFORE_PRUNING, n_warmup_steps=config.federation.rounds // 3)


def _sampler(seed: int, number: int) -> TPESampler:
    """The sampler of one trial: a function of seed and number, whichever process asks."""
    stream = numpy_stream(seed, "tuning", number)
    return TPESampler(
        seed=int(stream.integers(2**31)), n_startup_trials=_STARTUP_TRIALS, multivariate=True, constant_liar=True
    )
