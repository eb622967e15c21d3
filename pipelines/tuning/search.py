"""``protofl tune``: a search of hyper-parameters on the clients' validation data; test data are never read.

A study lives in one folder: a run per trial below ``trials/``, and the results in ``study.json``, ``study.md``,
``trials.csv``, ``best.yaml`` and ``figures/``. Data and partition come from the cache. Trials are carried out side by
side (:mod:`pipelines.execution.admission`). The study can be killed at any moment, and several processes may work on
it: the same command goes on inside the interrupted rounds of the interrupted trials, or takes those that nobody
carries out, and it ends with the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.trial import Trial, TrialState

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError
from flcore.data.dataset import Dataset
from flcore.data.partition import Partition
from flcore.engine.pool.executors import StoppedError
from flcore.experiment.experiment import Experiment, refuse_missing
from flcore.io import disk
from flcore.io.files import remove_stale_temp
from flcore.io.locks import run_lock, take_lock
from pipelines.execution.admission import most_at_once
from pipelines.execution.run_pool import RunPool, ThisProcess
from pipelines.execution.side_by_side import side_by_side
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs
from pipelines.runs.ownership import claim_folder
from pipelines.tuning.asked import Asked
from pipelines.tuning.folder import StudyFiles, alone, claim, refuse_other_study
from pipelines.tuning.meanwhile import Meanwhile
from pipelines.tuning.problem import VALIDATION_SHARE, Problem
from pipelines.tuning.results import describe, markdown, printed, reason, write_results
from pipelines.tuning.study import Trials, best_trials, ended_trials, of_other_code, storage_errors
from pipelines.tuning.trial import TrialRuns

if TYPE_CHECKING:
    from pipelines.execution.one_run import PlacedRun
    from pipelines.execution.operation import Operation


@dataclass(frozen=True)
class StudyOutcome:
    """What a study leaves.

    Attributes:
        directory: its folder. best: in it, the parameter file with the best values.
        table: what was found, for a terminal. markdown: the same for a page.
        failed: by trial, why.
        store: where it is logged: what to type, or an address; None where it is not, or where nobody waited.
        was_finished: no trial had to be carried out.
    """

    directory: Path
    best: Path
    table: str
    markdown: str
    failed: Mapping[str, str]
    store: str | None = None
    was_finished: bool = False


def study(config: Config, asked: Asked, out: Path, operation: Operation) -> StudyOutcome:
    """Search the hyper-parameters of ``config.method``, or go on searching.

    A trial that fails is named and counts; the next ones are carried out all the same.

    Args:
        config: all values that are not searched, and those with which the study begins.
        asked: what is wanted. out: the study's folder. operation: how.

    Raises:
        ConfigError: the configuration cannot be run or scored like that, the folder holds another study, or the
            storage cannot be opened; all before any trial.
        DataError: data are missing or damaged, or no client has validation data.
        RunError: no trial has finished, or the storage was lost on the way.
    """
    search = Search(config, asked, out, operation)
    carry_out([search], operation)
    return search.outcome()


def carry_out(searches: Sequence[Search], operation: Operation, meanwhile: Meanwhile | None = None) -> None:
    """Carry out the trials of studies, side by side; those of the study that has come least far first.

    Args:
        searches: the studies.
        operation: how.
        meanwhile: has runs for cores that no trial can use, and is told of studies that have ended, by their folders'
            names.
    """
    beside = meanwhile or Meanwhile(Path())
    trials = sum(search.wanted for search in searches)
    operation.watcher.runs(trials + len(beside.waiting), sum(search.ended for search in searches))
    by_label: dict[str, Search] = {}

    def more(room: int) -> list[PlacedRun] | None:
        found: list[PlacedRun] = []
        over = True
        for search in sorted(searches, key=lambda search: search.begun):
            appeared = search.more(room - len(found))
            if appeared is None:
                beside.study_ended(search.name)
                continue
            over = False
            found += appeared
            by_label.update((run.label, search) for run in appeared)
        return None if over else [*found, *beside.more(room - len(found))]

    def ended(run: PlacedRun, error: ProtoflError | None) -> None:
        if run.label in by_label:  # else the comparison looks at it
            by_label[run.label].note_end(run, error)

    trying = [search.config for search in searches for _ in range(search.at_once)]
    at_once = most_at_once([*trying, *beside.waiting])
    pool = RunPool(at_once, operation.watcher) if at_once > 1 else ThisProcess(operation.watcher)
    with pool:
        side_by_side(
            pool,
            at_once,
            operation,
            lambda run: None,
            ended,
            name=lambda run: run.label,
            more=more,
            restart=lambda run: run.label in by_label,
        )


class Search:
    """One study under way in this process: it begins trials, and tells Optuna and people how trials have ended."""

    def __init__(self, config: Config, asked: Asked, out: Path, operation: Operation, *, prefix: str = "") -> None:
        """Open or begin the study; its data are prepared.

        Args:
            config: all values that are not searched. asked: what is wanted. out: the study's folder. operation: how.
            prefix: what its trials are called by, beside ``trial 3``.

        Raises:
            ConfigError: see :func:`study`. DataError: likewise.
        """
        if asked.trials < 1:
            raise ConfigError(f"--trials {asked.trials}: must be at least 1")
        self._problem, self._files = _problem_of(config, asked), StudyFiles(out)
        self._operation, self._prefix, self.wanted = operation, prefix, asked.trials
        claim_folder("study", out)
        refuse_missing(config)
        refuse_other_study(self._problem, self._files)
        with alone(out), storage_errors():
            remove_stale_temp(out)
            self._found = Trials(self._problem, self._files, asked.storage, asked.at_once)
            self._runs = TrialRuns(self._problem, self._files, self._inputs(), Cache.here(), operation.copies)
            claim(self._problem, self._files)
            self.ended = len(ended_trials(self._found.study))
            self._was_finished = self.ended >= self.wanted
            others = len(of_other_code(self._found.study, self._runs.code))
        if others:
            operation.watcher.say(
                f"{others} of the {self.ended} trials were carried out by other code than today's; choose another "
                "--out for a study by one code"
            )
        self.begun = 0
        self._trials: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._claims: dict[int, disk.LockFile] = {}
        self._broken: ProtoflError | None = None

    @property
    def name(self) -> str:
        return self._files.directory.name

    @property
    def config(self) -> Config:
        """What trials have in common."""
        return self._problem.config

    @property
    def at_once(self) -> int:
        """So many trials may be under way."""
        return self._found.at_once

    # ---- trials --------------------------------------------------------------------------------------------------

    def more(self, room: int) -> list[PlacedRun] | None:
        """At most so many trials that may begin and that nobody carries out; None if all that are wanted have ended.

        Raises:
            ProtoflError: a trial ended with what is no failure of its own; or the storage is lost.
        """
        if self._broken is not None:
            raise self._broken
        offered: list[PlacedRun] = []
        with alone(self._files.directory), storage_errors():
            while True:
                self._tell_what_has_ended()
                if self.ended >= self.wanted:
                    return None
                while self.ended + len(self._found.under_way()) < self.wanted and self._found.ask():
                    pass
                news = False
                for trial in self._found.under_way():
                    if len(offered) < room and self._take(trial.number):
                        run = self._place(trial)
                        offered += [] if run is None else [run]
                        news = news or run is None
                if not news:
                    return offered

    def note_end(self, run: PlacedRun, error: ProtoflError | None) -> None:
        """A trial has ended; called from any thread. :meth:`more` tells of it."""
        number, values = self._trials[run.label]
        try:
            if not isinstance(error, StoppedError):
                self._runs.end(number, values, run, error)
        except ProtoflError as raised:
            self._broken = raised
        self._claims.pop(number).close()

    def _place(self, trial: Trial) -> PlacedRun | None:
        """The run of a trial that is ours to carry out; None if its outcome is known."""
        number, values = trial.number, self._problem.suggest(trial)
        run = None
        if self._runs.outcome(number, values) is None:
            run = self._runs.place(number, values, self._found.hurdles(number))
        if run is None:
            self._claims.pop(number).close()
            return None
        run = replace(run, label=f"{self._prefix}trial {number}")
        self._trials[run.label] = number, values
        self.begun += 1
        return run

    def _take(self, number: int) -> bool:
        """Have a trial to ourselves; False if somebody carries it out."""
        if number in self._claims:
            return False
        file = disk.open_lock(self._files.claim(number))
        if not take_lock(file, wait=False) or _is_in_use(self._files.trial(number).directory):
            file.close()
            return False
        self._claims[number] = file
        return True

    def _tell_what_has_ended(self) -> None:
        """Tell Optuna, people and MLflow of trials that have ended, whoever carried them out."""
        for trial in self._found.under_way():
            number = trial.number
            outcome = self._runs.outcome(number, self._problem.suggest(trial))
            if outcome is None:
                continue
            self._found.tell(trial, outcome, self._runs.code)
            told = self._found.study.get_trials(deepcopy=False)[number]
            self._operation.watcher.say(self._prefix + describe(self._problem, told))
            write_results(self._problem, self._found.study, self._files)
            self._operation.recorder.trial(self._files.directory, number)
        self.ended = len(ended_trials(self._found.study))

    # ---- before and after them -----------------------------------------------------------------------------------

    def outcome(self) -> StudyOutcome:
        """What was found, written, and logged where somebody waits for that.

        Raises:
            RunError: none of the trials has finished.
        """
        files, operation = self._files, self._operation
        with alone(files.directory), storage_errors():
            found = self._found.study
            write_results(self._problem, found, files)
            ended = ended_trials(found)
            if not best_trials(self._problem, found):
                last = reason(ended[-1])
                raise RunError(f"{files.directory}: none of the {len(ended)} trials has finished; the last one: {last}")
            outcome = StudyOutcome(
                files.directory,
                files.best,
                table=printed(self._problem, found, files, **operation.console),
                markdown=markdown(self._problem, found),
                failed={f"trial {trial.number}": reason(trial) for trial in ended if trial.state == TrialState.FAIL},
                was_finished=self._was_finished,
            )
        record = operation.recorder.study
        if not operation.wait:
            record(files.directory)
            return outcome
        return replace(outcome, store=operation.steps.call("report", lambda: record(files.directory).result())["store"])

    def _inputs(self) -> Inputs:
        """Data and partition, once for all trials.

        Raises:
            ConfigError: the given configuration does not fit the data, or the study began with others.
            DataError: data are missing, or no client has validation data.
        """
        problem, config, cache, operation = self._problem, self._problem.config, Cache.here(), self._operation
        if problem.given.partition.validation == 0:
            operation.watcher.say(
                f"partition.validation is 0: the study sets aside {VALIDATION_SHARE:g} of each client's training data"
            )
        operation.watcher.step("prepare")
        prepared = operation.steps.call("prepare-data", cache.prepared, config)
        operation.watcher.step(f"partition (seed {config.partition_seed})")
        inputs = Inputs(prepared, operation.steps.call("partition-data", cache.partition, config, prepared))
        partition = Partition.load(inputs.partition)
        if not any(len(client.val) for client in partition.clients):
            raise DataError(
                f"partition.validation = {config.partition.validation:g}: leaves no client any validation data; "
                "choose a larger share"
            )
        # Of the given values; others that the data, or the model, refuse are a trial's failure.
        experiment = Experiment.open(config, inputs.prepared, inputs.partition)
        experiment.method.start_server(experiment.setting)
        fingerprints = {
            "data_fingerprint": Dataset.load(prepared).meta.fingerprint,
            "partition_fingerprint": partition.fingerprint,
        }
        if not self._found.same_data(fingerprints):
            raise ConfigError(f"{self._files.directory}: this study began with other data; choose another --out")
        return inputs


def _problem_of(config: Config, asked: Asked) -> Problem:
    return Problem.of(config, asked.objective, asked.metric, asked.max_bytes, asked.max_steps)


def _is_in_use(run: Path) -> bool:
    """Whether a process trains in a folder, such as one whose parent was just killed."""
    try:
        with run_lock(run):
            return False
    except RunError:
        return True
