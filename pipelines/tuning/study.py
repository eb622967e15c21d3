"""Optuna: the search of a method's hyper-parameters on the clients' validation data; test data are never read.

A study lives in one folder: ``prepared/`` and ``partition/`` made once, an ordinary run per trial below ``trials/``,
and the results in ``study.json``, ``study.md`` and ``study.svg``. It can be killed at any moment: the same command goes
on inside the interrupted round of the interrupted trial. The sampler of a trial is seeded by the study's seed and the
trial's number, so that a study which was interrupted proposes what an uninterrupted one would have, and nothing of the
sampler has to be stored.

In MLflow a study is a run whose rounds are trials, with the trials' runs below it. That run is kept as a run directory
of its own, ``study/``, which :class:`~pipelines.tracking.sync.RunTracker` logs like any other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import optuna
import yaml
from matplotlib.figure import Figure
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from flcore.config import Config
from flcore.engine.rounds import Observers, RoundRecord
from flcore.errors import ConfigError, DataError, RunError
from flcore.experiment import Experiment
from flcore.locks import take_lock
from flcore.methods import METHODS
from flcore.params import Param, declared
from flcore.rng import numpy_stream
from pipelines import stages
from pipelines.reporting.figures.charts import WIDTH, house_style, save
from pipelines.runs.layout import RunFiles, read_json, write_json, write_text
from pipelines.runs.provenance import environment
from pipelines.tracking.addresses import without_password
from pipelines.tracking.sync import RunTracker, flatten, read_history, ui_command

OBJECTIVES: Mapping[str, tuple[Literal["maximize", "minimize"], ...]] = {
    "accuracy": ("maximize",),
    "accuracy,bytes": ("maximize", "minimize"),
}
VALIDATION_SHARE = 0.2
_STARTUP_TRIALS = 10  # at random, before the sampler has something to learn from
_TRIALS_BEFORE_PRUNING = 5
_SHOWN_TRIALS = 10
_PANELS_PER_ROW = 3
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


@dataclass(frozen=True)
class Problem:
    """What a study searches.

    Attributes:
        given: the configuration as given; what a run with the best values starts from.
        config: the same with evaluation on validation data.
        parameters: of the method, those with a search range.
        objective: a key of :data:`OBJECTIVES`.
    """

    given: Config
    config: Config
    parameters: tuple[Param, ...]
    objective: str

    @classmethod
    def of(cls, config: Config, objective: str) -> Problem:
        """The search of a configuration's method.

        Raises:
            ConfigError: there is no such objective, or the method declares no search range.
        """
        if objective not in OBJECTIVES:
            raise ConfigError(f"--objective {objective}: must be one of {' or '.join(OBJECTIVES)}")
        parameters = _searched(type(config.method))
        if not parameters:
            others = ", ".join(name for name, method in METHODS.items() if _searched(method))
            raise ConfigError(
                f"--method {config.method.name}: has no search space; these have one: {others}\n"
                "(a study searches what the method declares; whatever --set says of other keys is kept)"
            )
        share = config.partition.validation or VALIDATION_SHARE
        on_validation = replace(
            config,
            partition=replace(config.partition, validation=share),
            evaluation=replace(config.evaluation, split="validation"),
        )
        return cls(config, Config.from_mapping(on_validation.to_mapping()), parameters, objective)

    @property
    def metric(self) -> str:
        """The accuracy that is maximised: of the global model, or the clients' mean where there is none."""
        return "top1_global" if self.config.method.has_global_model else "mean_local"

    @property
    def space(self) -> dict[str, Any]:
        """The search ranges by dotted key, as JSON values."""
        return {_key(parameter): parameter.describe()["search"] for parameter in self.parameters}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that can change a study's values except what it searches, as JSON values."""
        identity = self.config.identity()
        identity["method"] = {
            key: value for key, value in identity["method"].items() if f"method.{key}" not in self.space
        }
        whole = {**identity, "objective": self.objective, "space": self.space}
        return dict(json.loads(json.dumps(whole)))

    @property
    def hash(self) -> str:
        """SHA-256 of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The study's name: method and the beginning of its hash."""
        return f"{self.config.method.name}-{self.hash[:8]}"

    def config_of(self, params: Mapping[str, Any]) -> Config:
        """The configuration of a trial.

        Args:
            params: dotted keys of the method and their values.

        Raises:
            ConfigError: the method refuses this combination.
        """
        mapping = self.config.to_mapping()
        mapping["method"] |= {key.removeprefix("method."): value for key, value in params.items()}
        return Config.from_mapping(mapping)

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """A value for every searched parameter; values that the trial has already stay."""
        return {_key(parameter): _suggest(trial, parameter) for parameter in self.parameters}

    def first_guess(self) -> dict[str, Any] | None:
        """The given configuration's own values, which begin the study; None if one lies outside its search range."""
        guess = {_key(parameter): getattr(self.given.method, parameter.name) for parameter in self.parameters}
        inside = all(_is_inside(parameter, guess[_key(parameter)]) for parameter in self.parameters)
        return guess if inside else None


def _searched(method: type) -> tuple[Param, ...]:
    return tuple(parameter for parameter in declared(method) if parameter.search is not None)


def _key(parameter: Param) -> str:
    return f"method.{parameter.name}"


def _suggest(trial: Trial, parameter: Param) -> Any:
    search = parameter.search
    assert search is not None
    if search.choices is not None:
        return trial.suggest_categorical(_key(parameter), search.choices)
    assert search.low is not None
    assert search.high is not None
    if parameter.type.startswith("int"):
        return trial.suggest_int(_key(parameter), int(search.low), int(search.high), log=search.log)
    return trial.suggest_float(_key(parameter), search.low, search.high, log=search.log)


def _is_inside(parameter: Param, value: Any) -> bool:
    search = parameter.search
    assert search is not None
    if search.choices is not None:
        return value in search.choices
    assert search.low is not None
    assert search.high is not None
    return value is not None and search.low <= value <= search.high


@dataclass(frozen=True)
class StudyFiles:
    """Where things lie in a study's folder."""

    directory: Path

    @property
    def database(self) -> Path:
        """Optuna's storage, unless another is named."""
        return self.directory / "study.db"

    @property
    def prepared(self) -> Path:
        """The prepared data."""
        return self.directory / "prepared"

    @property
    def partition(self) -> Path:
        """The partition, with validation data."""
        return self.directory / "partition"

    @property
    def params(self) -> Path:
        """The given configuration, as a parameter file."""
        return self.directory / "params.yaml"

    @property
    def record(self) -> RunFiles:
        """The study as a run, for MLflow; its configuration also says whose folder this is."""
        return RunFiles(self.directory / "study")

    @property
    def results(self) -> Path:
        """All trials, for programs."""
        return self.directory / "study.json"

    @property
    def table(self) -> Path:
        """All trials, for people."""
        return self.directory / "study.md"

    @property
    def figure(self) -> Path:
        """Accuracy by trial and by parameter."""
        return self.directory / "study.svg"

    def trial(self, number: int) -> RunFiles:
        """The run directory of a trial."""
        return RunFiles(self.directory / "trials" / f"{number:04d}")


def tune(config: Config, trials: int, objective: str, storage: str | None, directory: Path) -> None:
    """``protofl tune``: search the hyper-parameters of ``config.method``, or go on searching.

    Args:
        config: all values that are not searched, and a first guess of those that are.
        trials: how many ended trials (finished, pruned or failed) are wanted in all.
        objective: ``accuracy`` or ``accuracy,bytes``.
        storage: Optuna's storage as an SQLAlchemy URL; None for a SQLite file in ``directory``.
        directory: the study's folder.

    Raises:
        ConfigError: the method has no search space, the folder holds another study or is in use, or the storage
            cannot be opened; all before any data are read.
        DataError: data are missing, or no client has validation data.
        RunError: no trial has finished, or the storage was lost on the way.
    """
    if trials < 1:
        raise ConfigError(f"--trials {trials}: must be at least 1")
    problem, files = Problem.of(config, objective), StudyFiles(directory)
    _refuse_other_study(problem, files)
    with _only_one_process(directory), _storage_errors():
        opened = _open_storage(storage, files)
        study = _open_study(problem, opened)
        console = Console(stderr=True)
        _make_data(problem, study, files, console)
        searcher = _Searcher(problem, study, opened, files, shares_storage=storage is not None)
        searcher.search(trials, console)
        best = _best_trials(study)
        if not best:
            error = study.trials[-1].user_attrs.get("error", "pruned")
            raise RunError(f"{directory}: none of the {len(study.trials)} trials has finished; the last one: {error}")
        searcher.finish()
        _say_result(problem, best, files)


def _refuse_other_study(problem: Problem, files: StudyFiles) -> None:
    if not files.record.config.exists():
        return
    held = read_json(files.record.config)["identity"]
    if held == problem.identity:
        return
    there, here = flatten(held), flatten(problem.identity)
    differing = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    shown = ", ".join(f"{key} is {there.get(key, 'not set')} there" for key in differing[:3])
    raise ConfigError(
        f"{files.directory}: holds the study of another configuration ({shown})\n"
        "choose another --out, or delete that folder"
    )


@contextmanager
def _only_one_process(directory: Path) -> Iterator[None]:
    """Hold a lock on a study's folder that ends with the process, however it ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = (directory / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{directory}: cannot write there ({error.strerror}); choose another --out") from error
    with handle:
        if not take_lock(handle, wait=False):
            raise ConfigError(f"{directory}: another process works on this study; wait for it, or choose another --out")
        yield


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Turn a storage that is lost in the middle into an error of one line."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise RunError(f"--storage: lost during the study ({reason}); the same command goes on") from error


def _open_storage(url: str | None, files: StudyFiles) -> RDBStorage:
    """Open Optuna's storage, making its tables where there are none.

    Raises:
        ConfigError: it cannot be opened.
    """
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


def _open_study(problem: Problem, storage: RDBStorage) -> Study:
    """Create the study or find it again; a new one begins with the given values."""
    directions = OBJECTIVES[problem.objective]
    study = optuna.create_study(
        storage=storage,
        study_name=problem.name,
        directions=list(directions),
        pruner=_pruner(problem.config) if len(directions) == 1 else NopPruner(),
        load_if_exists=True,
    )
    guess = problem.first_guess()
    if guess is not None and not study.trials:
        study.enqueue_trial(guess)
    return study


def _pruner(config: Config) -> BasePruner:
    """Stop a trial that is below the median of the earlier ones at the same round, after a third of the rounds."""
    return MedianPruner(n_startup_trials=_TRIALS_BEFORE_PRUNING, n_warmup_steps=config.federation.rounds // 3)


def _make_data(problem: Problem, study: Study, files: StudyFiles, console: Console) -> None:
    """Prepare and partition, once for all trials, and mark the folder as this study's."""
    config = problem.config
    if problem.given.partition.validation == 0:
        console.print(
            f"partition.validation is 0: the study sets aside {VALIDATION_SHARE:g} of each client's training data",
            soft_wrap=True,
        )
    dataset = stages.prepare(config, files.prepared)
    partition = stages.partition(config, files.prepared, files.partition)
    if not any(len(client.val) for client in partition.clients):
        raise DataError(
            f"partition.validation = {config.partition.validation:g}: leaves no client any validation data; "
            "choose a larger share"
        )
    fingerprints = {
        "data_fingerprint": dataset.meta.fingerprint,
        "partition_fingerprint": partition.fingerprint,
    }
    for name, fingerprint in fingerprints.items():
        if study.user_attrs.get(name, fingerprint) != fingerprint:
            raise ConfigError(f"{files.directory}: this study began with other data; choose another --out")
        study.set_user_attr(name, fingerprint)
    Experiment.open(config, files.prepared, files.partition)  # a missing device is an error before the first trial
    write_text(files.params, yaml.safe_dump(problem.given.to_mapping(), sort_keys=False))
    _write_record_config(problem, files)


def _write_record_config(problem: Problem, files: StudyFiles) -> None:
    mapping = problem.config.to_mapping()
    for parameter in problem.parameters:
        mapping["method"][parameter.name] = "searched: " + json.dumps(parameter.describe()["search"], sort_keys=True)
    described = {
        "config": mapping,
        "config_hash": problem.hash,
        "identity": problem.identity,
        "environment": environment(problem.config),
    }
    write_json(files.record.config, described)


class _Searcher:
    """Runs trials one after the other and keeps the study's files up to date."""

    def __init__(
        self, problem: Problem, study: Study, storage: RDBStorage, files: StudyFiles, *, shares_storage: bool
    ) -> None:
        """Search ``problem``; ``shares_storage`` says that trials of other folders may be in the storage."""
        self._problem = problem
        self._study = study
        self._files = files
        self._storage = storage
        self._shares_storage = shares_storage
        self._tracking = _StudyTracking(problem, files) if problem.config.tracking.enabled else None

    def search(self, wanted: int, console: Console) -> None:
        """Run trials until ``wanted`` have ended."""
        with _Progress(console, self._problem, wanted) as progress:
            while (ended := len(_ended(self._study))) < wanted:
                trial = self._next_trial()
                self._files.trial(trial.number).directory.mkdir(parents=True, exist_ok=True)
                self._run(trial, self._problem.suggest(trial), progress)
                frozen = self._study.trials[trial.number]
                progress.trial_ended(frozen, ended + 1)
                write_results(self._problem, self._study, self._files)
                if self._tracking is not None:
                    self._tracking.log_trial(frozen)

    def finish(self) -> None:
        """Write the results of all trials, and bring MLflow up to date."""
        write_results(self._problem, self._study, self._files)
        draw_study(self._problem, self._study, self._files.figure)
        if self._tracking is not None:
            self._tracking.finish(self._study)

    def _next_trial(self) -> Trial:
        """The trial that a killed process left behind, else a new one."""
        interrupted = [
            trial.number
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if not self._shares_storage or self._files.trial(trial.number).directory.exists()
        ]
        waiting = [trial.number for trial in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))]
        number = next(iter(interrupted + waiting), len(self._study.trials))
        self._study.sampler = _sampler(self._problem.config.seed, number)
        return self._take_up(number) if interrupted else self._study.ask()

    def _take_up(self, number: int) -> Trial:
        """A trial that another process began: the storage knows the id that a Trial is made from."""
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        return Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number))

    def _run(self, trial: Trial, params: Mapping[str, Any], progress: _Progress) -> None:
        """Train one trial and tell the study how it ended; an interruption leaves it to be taken up again."""
        progress.trial_starts(trial.number, params)
        try:
            config = self._problem.config_of(params)
        except ConfigError as error:  # values that do not go together
            self._fail(trial, error)
            return
        run = self._files.trial(trial.number)
        try:
            values = self._train(config, trial, run, progress)
        except optuna.TrialPruned:
            self._study.tell(trial, state=TrialState.PRUNED)
            _drop_weights(run)
        except RunError as error:
            self._fail(trial, error)
            _drop_weights(run)
        else:
            self._study.tell(trial, values)

    def _fail(self, trial: Trial, error: Exception) -> None:
        trial.set_user_attr("error", str(error))
        self._study.tell(trial, state=TrialState.FAIL)

    def _train(self, config: Config, trial: Trial, run: RunFiles, progress: _Progress) -> list[float]:
        reported = set(self._study.trials[trial.number].intermediate_values)
        rounds, metric = config.federation.rounds, self._problem.metric
        prunes = len(self._study.directions) == 1

        def report(number: int, record: RoundRecord) -> None:
            if prunes and number not in reported:
                trial.report(record[metric], number)
                reported.add(number)
            # A trial that has come to its last round costs nothing more.
            if prunes and number < rounds and trial.should_prune():
                raise optuna.TrialPruned

        def on_round(number: int, record: RoundRecord | None) -> None:
            progress.round_ended(number, record)
            if record is not None:
                report(number, record)

        # What a killed process committed and could not report any more.
        for record in read_history(run.checkpoint / run.history.name):
            report(record["round"], record)
        stages.train(config, self._files.prepared, self._files.partition, run.directory, observers=Observers(on_round))
        stages.evaluate(config, self._files.prepared, self._files.partition, run.directory)
        last = read_history(run.history)[-1]
        sent = sum(last["bytes_up"].values()) + sum(last["bytes_down"].values())
        trial.set_user_attr("bytes", sent)
        return [last[metric], sent][: len(self._study.directions)]


def _sampler(seed: int, number: int) -> TPESampler:
    """The sampler of one trial: a function of seed and number, whichever process asks."""
    stream = numpy_stream(seed, "tuning", number)
    return TPESampler(
        seed=int(stream.integers(2**31)), n_startup_trials=_STARTUP_TRIALS, multivariate=True, constant_liar=True
    )


def _drop_weights(run: RunFiles) -> None:
    """Free what a trial that is not continued would need to continue; its history stays."""
    kept = run.checkpoint / run.history.name
    history = kept.read_text() if kept.exists() else ""
    shutil.rmtree(run.checkpoint, ignore_errors=True)
    if history:
        write_text(kept, history)


def _ended(study: Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=_ENDED)


def _best_trials(study: Study) -> list[FrozenTrial]:
    """Finished trials, the most accurate first, and among equals the one that sends least, then the earliest."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(finished, key=lambda trial: (-trial.values[0], trial.user_attrs["bytes"], trial.number))


class _Progress:
    """A line on standard error per trial, and on a terminal what the trial under way is doing."""

    def __init__(self, console: Console, problem: Problem, wanted: int) -> None:
        """Report a study of ``wanted`` trials."""
        self._console = console
        self._metric = problem.metric
        self._rounds = problem.config.federation.rounds
        self._wanted = wanted
        self._trial = ""
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> _Progress:
        """Begin."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """End."""
        if self._status is not None:
            self._status.stop()

    def trial_starts(self, number: int, params: Mapping[str, Any]) -> None:
        """A trial begins or goes on."""
        self._trial = f"trial {number}  {_assignments(params)}"
        self._show(self._trial)

    def round_ended(self, number: int, record: RoundRecord | None) -> None:
        """A round of it has ended."""
        score = f"  {100 * record[self._metric]:.2f} %" if record is not None else ""
        self._show(f"{self._trial}  round {number}/{self._rounds}{score}")

    def trial_ended(self, trial: FrozenTrial, ended: int) -> None:
        """A trial has ended."""
        outcome = " ".join(_shown_values(trial)) or trial.user_attrs.get("error", trial.state.name.lower())
        self._console.print(f"{ended}/{self._wanted}  {self._trial}  {outcome}", soft_wrap=True, highlight=False)

    def _show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)


class _StudyTracking:
    """The study in MLflow: its own run, and one per trial below it. An unreachable store costs a warning."""

    def __init__(self, problem: Problem, files: StudyFiles) -> None:
        """Log to the configured store."""
        self._problem = problem
        self._files = files
        self._tags = {"study": problem.name}
        self._parent = RunTracker(files.record.directory, uri=problem.config.tracking.uri, extra_tags=self._tags)
        self._logged: set[int] = set()

    def log_trial(self, trial: FrozenTrial) -> None:
        """Log an ended trial and how far the study is; what fails here is tried again at the end."""
        if self._parent.sync() and self._parent.run_id is not None:
            self._log_run(trial, self._parent.run_id)

    def finish(self, study: Study) -> None:
        """Log whatever is not logged yet, the results and the best trial."""
        best = _best_trials(study)[0]
        summary = {
            **study.user_attrs,
            self._problem.metric: best.values[0],
            "best_round": best.number,
        }
        write_json(self._files.record.metrics, summary)
        for path in (self._files.results, self._files.table, self._files.figure):
            write_text(self._files.record.directory / path.name, path.read_text())
        if not self._parent.sync(final=True) or self._parent.run_id is None:
            return
        for trial in _ended(study):
            if trial.number not in self._logged and not self._log_run(trial, self._parent.run_id):
                return
        print(f"study in MLflow: {ui_command(self._problem.config.tracking.uri)}", file=sys.stderr)

    def _log_run(self, trial: FrozenTrial, parent_run_id: str) -> bool:
        """Log one trial's run; False if the store could not take it."""
        run = self._files.trial(trial.number)
        if not run.config.exists():  # another folder's, or a combination that the method refused
            return True
        tracker = RunTracker(
            run.directory,
            uri=self._problem.config.tracking.uri,
            parent_run_id=parent_run_id,
            extra_tags={**self._tags, "trial": str(trial.number)},
        )
        if trial.state == TrialState.COMPLETE:
            is_logged = tracker.sync(final=True)
        else:
            is_logged = tracker.mark_stopped(failed=trial.state == TrialState.FAIL)
        if is_logged:
            self._logged.add(trial.number)
        return is_logged


def write_results(problem: Problem, study: Study, files: StudyFiles) -> None:
    """Write ``study.json``, ``study.md`` and the history for MLflow; the same trials give the same bytes."""
    ended, best = _ended(study), _best_trials(study)
    described = {
        "study": problem.name,
        "method": problem.config.method.name,
        "seed": problem.config.seed,
        "objective": problem.objective,
        "metric": problem.metric,
        "split": problem.config.evaluation.split,
        "sampler": "TPESampler(multivariate, constant_liar), seeded per trial",
        "space": problem.space,
        **study.user_attrs,
        "best": [trial.number for trial in _front(best)],
        "trials": [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "params": trial.params,
                "accuracy": trial.values[0] if trial.state == TrialState.COMPLETE else None,
                "bytes": trial.user_attrs.get("bytes"),
                "rounds": {str(number): value for number, value in sorted(trial.intermediate_values.items())},
            }
            for trial in ended
        ],
    }
    write_json(files.results, described)
    write_text(files.table, _markdown(problem, best, ended))
    records = "".join(json.dumps(_as_round(problem, trial), sort_keys=True) + "\n" for trial in ended)
    write_text(files.record.history, records)


def _as_round(problem: Problem, trial: FrozenTrial) -> dict[str, Any]:
    """A trial as a record of a history: its number is the round."""
    accuracy = trial.values[0] if trial.state == TrialState.COMPLETE else None
    sent = {"both": trial.user_attrs.get("bytes", 0)}
    return {"round": trial.number, problem.metric: accuracy, "bytes_up": sent, "bytes_down": {}}


def _front(best: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that no other beats in everything: for one objective the best, for two the Pareto front."""
    front = list(best[:1])
    for trial in best[1:]:  # falling accuracy: a later one belongs to the front if it sends less
        if len(trial.values) > 1 and trial.values[1] < front[-1].values[1]:
            front.append(trial)
    return front


def _markdown(problem: Problem, best: Sequence[FrozenTrial], ended: Sequence[FrozenTrial]) -> str:
    keys, front = list(problem.space), {trial.number for trial in _front(best)}
    unfinished = [trial for trial in ended if trial.state != TrialState.COMPLETE]
    columns = ["trial", *keys, problem.metric, "bytes"]
    lines = [
        f"# {problem.name}",
        "",
        f"{len(best)} finished trials of {problem.config.method.name}, scored on validation data; "
        + ("**bold**: the best." if problem.objective == "accuracy" else "**bold**: the Pareto front."),
        "",
        "| " + " | ".join(columns) + " |",
        "| --- " + "| ---: " * (len(columns) - 1) + "|",
    ]
    for trial in [*best, *unfinished]:
        number = f"**{trial.number}**" if trial.number in front else str(trial.number)
        outcome = _shown_values(trial) or [trial.state.name.lower(), ""]
        lines.append("| " + " | ".join([number, *(f"{trial.params.get(key)}" for key in keys), *outcome]) + " |")
    if best:
        command = f"protofl run --params params.yaml {_set_options(best[0].params)}"
        lines += ["", "The best one on all training data, scored on test data, from this folder:", "", f"    {command}"]
    return "\n".join(lines) + "\n"


def _shown_values(trial: FrozenTrial) -> list[str]:
    """What a finished trial reached, as text; empty for others."""
    if trial.state != TrialState.COMPLETE:
        return []
    return [f"{100 * trial.values[0]:.2f} %", f"{trial.user_attrs['bytes'] / 1e6:.2f} MB"]


def _assignments(params: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{key.removeprefix('method.')}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in params.items()
    )


def _set_options(params: Mapping[str, Any]) -> str:
    """``--set`` options that give exactly these values."""
    return " ".join(f"--set {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in params.items())


def _say_result(problem: Problem, best: Sequence[FrozenTrial], files: StudyFiles) -> None:
    table = Table()
    for column in ("trial", *problem.space, problem.metric, "bytes"):
        table.add_column(column, justify="right")
    for trial in best[:_SHOWN_TRIALS]:
        shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.params.values())
        table.add_row(str(trial.number), *shown, *_shown_values(trial))
    console = Console()
    console.print(f"{problem.name}: {len(best)} finished trials, scored on validation data", highlight=False)
    console.print(table)
    console.print(f"all trials: {files.table}, {files.results}, {files.figure}", soft_wrap=True, highlight=False)
    command = f"protofl run --params {shlex.quote(str(files.params))} {_set_options(best[0].params)}"
    # Plain, so that it can be copied whole.
    print(f"the best one, on all training data and scored on test data:\n  {command}")


def draw_study(problem: Problem, study: Study, path: Path) -> None:
    """Draw accuracy by trial with the best so far, and accuracy against each searched parameter."""
    with house_style():
        figure = _study_figure(problem, study)
        save(figure, path)


def _study_figure(problem: Problem, study: Study) -> Figure:
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    accuracy = [trial.values[0] for trial in finished]
    count = 1 + len(problem.parameters)
    rows, columns = -(-count // _PANELS_PER_ROW), min(count, _PANELS_PER_ROW)
    figure = Figure(figsize=(WIDTH, 3.1 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    numbers = [trial.number for trial in finished]
    best_so_far = list(itertools.accumulate(accuracy, max))
    panels[0].plot(numbers, accuracy, "o", markersize=4, color="#0072B2")
    panels[0].plot(numbers, best_so_far, color="#D55E00", label="best so far")
    panels[0].set(xlabel="trial", ylabel=f"{problem.metric} on validation data")
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    panels[0].legend(frameon=False)
    for axes, parameter in zip(panels[1:count], problem.parameters, strict=True):
        values = [trial.params[_key(parameter)] for trial in finished]
        if parameter.choices is not None:
            values = [str(value) for value in values]
        axes.plot(values, accuracy, "o", markersize=4, color="#0072B2")
        if parameter.search is not None and parameter.search.log:
            axes.set_xscale("log")
        axes.set_xlabel(_key(parameter))
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure
