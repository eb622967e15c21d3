"""``protofl tune``: a search of hyper-parameters on the clients' validation data; test data are never read.

A study has one folder: a run per trial below ``trials/``, and the results in ``study.json``, ``study.md``,
``trials.csv`` and ``best.yaml``. Trials run in parallel (:mod:`pipelines.execution.admission`), also in several
processes. An interrupted study resumes inside the interrupted rounds of its trials, and ends with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optuna.trial import TrialState

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError
from flcore.data.dataset import Dataset
from flcore.data.partition import Partition
from flcore.engine.pool.task import StoppedError
from flcore.experiment.experiment import Experiment, refuse_missing
from flcore.io import disk
from flcore.io.files import remove_stale_temp
from flcore.io.locks import take_lock
from pipelines.execution.admission import most_at_once
from pipelines.execution.bodies import inputs_of_runs
from pipelines.execution.outcome import Outcome
from pipelines.execution.run_pool import RunPool
from pipelines.execution.side_by_side import side_by_side
from pipelines.plan.spec import RunSpec
from pipelines.runs.cache import Cache
from pipelines.runs.folder import RunFolder, is_in_use
from pipelines.runs.inputs import Inputs
from pipelines.runs.ownership import claim_folder
from pipelines.tuning.folder import StudyFiles, exclusive_lock, refuse_other_study, write_record
from pipelines.tuning.problem import VALIDATION_SHARE, Problem
from pipelines.tuning.request import StudyRequest
from pipelines.tuning.results import describe, markdown, printed, reason, write_results
from pipelines.tuning.sampler import PruningCheck, budget_line
from pipelines.tuning.storage import storage_errors
from pipelines.tuning.study import Trials, best_trials, ended_trials, of_other_code
from pipelines.tuning.trial import TrialEnd, TrialRuns

if TYPE_CHECKING:
    from pipelines.execution.one_run import PlacedRun
    from pipelines.execution.operation import Operation


def study(config: Config, request: StudyRequest, out: Path, operation: Operation) -> Outcome:
    """Search the hyper-parameters of ``config.method``, or resume the search.

    A failed trial is reported and counts; the others continue.

    ``config`` has all values that are not searched, and the first trial's values.

    Raises:
        ConfigError: the configuration cannot be run or scored so, the folder contains another study, or the storage
            cannot be opened; all before any trial.
        DataError: data are missing or damaged, or no client has validation data.
        RunError: no trial has finished, or the storage was lost during the study.
    """
    search = Search(config, request, out, operation)
    run_trials([search], operation)
    return search.outcome()


def run_trials(searches: Sequence[Search], operation: Operation) -> None:
    """Run the trials of studies in parallel; studies with the fewest begun trials first."""
    operation.watcher.runs(sum(search.wanted for search in searches), sum(search.ended for search in searches))
    for line in dict.fromkeys(budget_line(search.config.tune, search.wanted) for search in searches):
        operation.watcher.say(line)
    by_label: dict[str, Search] = {}

    def more(room: int) -> list[PlacedRun] | None:
        runs: list[PlacedRun] = []
        over = True
        for search in sorted(searches, key=lambda search: search.begun):
            appeared = search.more(room - len(runs))
            over = over and appeared is None
            runs += appeared or []
            by_label.update((run.label, search) for run in appeared or [])
        return None if over else runs

    parallel = most_at_once([search.config for search in searches for _ in range(search.config.tune.parallel)])
    with RunPool(parallel, operation.watcher, lambda label: by_label[label].prunes(label)) as pool:
        side_by_side(
            pool,
            parallel,
            operation,
            lambda run: None,
            lambda run, error: by_label[run.label].note_end(run, error),
            name=lambda run: run.label,
            more=more,
        )


class Search:
    """One study in this process: asks Optuna for trials, and tells Optuna and the user how they ended."""

    def __init__(
        self, config: Config, request: StudyRequest, out: Path, operation: Operation, prefix: str = ""
    ) -> None:
        """Open or begin the study; prepare its data. Names of its trials begin with ``prefix``."""
        if request.trials < 1:
            raise ConfigError(f"--trials {request.trials}: must be at least 1")
        self._problem = Problem.of(config, request.objective, request.metric, request.max_bytes)
        self._files, self._operation, self._prefix, self.wanted = StudyFiles(out), operation, prefix, request.trials
        claim_folder("study", out)
        refuse_missing(config)
        refuse_other_study(self._problem, self._files)
        with exclusive_lock(out), storage_errors():
            remove_stale_temp(out)
            self._trials = Trials(self._problem, self._files, request.storage)
            self._runs = TrialRuns(self._problem, self._files, self._inputs(), Cache.here())
            write_record(self._problem, self._files)
            self.ended = len(ended_trials(self._trials.study))
            others = len(of_other_code(self._trials.study, self._runs.code))
        self._was_finished = self.ended >= self.wanted
        if others:
            operation.watcher.say(
                f"{others} of the {self.ended} trials ran with another code version; choose another --out for a study "
                "by one version"
            )
        self.begun = 0
        self._running: dict[str, tuple[int, PruningCheck]] = {}
        self._claims: dict[int, disk.LockFile] = {}
        self._broken: ProtoflError | None = None

    @property
    def config(self) -> Config:
        return self._problem.config

    # ---- trials --------------------------------------------------------------------------------------------------

    def more(self, room: int) -> list[PlacedRun] | None:
        """Return up to ``room`` trials that may begin and that no process runs; None if enough trials have ended.

        Raises:
            ProtoflError: a trial ended with an error that is not its own; or the storage is lost.
        """
        if self._broken is not None:
            raise self._broken
        offered: list[PlacedRun] = []
        with exclusive_lock(self._files.directory), storage_errors():
            while True:
                self.ended = len(ended_trials(self._trials.study))
                if self.ended >= self.wanted:
                    return None
                while self.ended + len(self._trials.running()) < self.wanted and self._trials.ask():
                    pass
                ended = False
                for number in self._trials.running():
                    if len(offered) < room and self._take(number):
                        run = self._begin(number)
                        offered += [] if run is None else [run]
                        ended = ended or run is None
                if not ended:
                    return offered

    def prunes(self, label: str) -> bool:
        """Report the rounds of a running trial; return whether to stop it. Thread-safe."""
        number, check = self._running[label]
        try:
            with storage_errors():
                self._report(number, check)
        except ProtoflError as error:
            self._broken = error
        return check.pruned_at is not None or self._broken is not None

    def note_end(self, run: PlacedRun, error: ProtoflError | None) -> None:
        """Record how a trial ended; thread-safe. An error that is not its own is raised by :meth:`more`."""
        number, check = self._running.pop(run.label)
        try:
            if not isinstance(error, StoppedError) and self._broken is None:
                with exclusive_lock(self._files.directory), storage_errors():
                    self._end(number, check, error)
        except ProtoflError as raised:
            self._broken = raised
        self._claims.pop(number).close()

    def _begin(self, number: int) -> PlacedRun | None:
        """Return the run of a claimed trial; None if the trial has ended already."""
        values = self._trials.values(number)
        try:
            run, is_finished = self._runs.place(number, values)
        except ConfigError as error:  # values that contradict each other or the data
            self._tell(number, TrialEnd(TrialState.FAIL, error=str(error)))
            self._claims.pop(number).close()
            return None
        check = self._trials.check(number, run.config.federation.rounds)
        self._report(number, check)
        if is_finished or check.pruned_at is not None:
            self._end(number, check, None)
            self._claims.pop(number).close()
            return None
        run = replace(run, label=f"{self._prefix}trial {number}")
        self._running[run.label] = number, check
        self.begun += 1
        return run

    def _take(self, number: int) -> bool:
        """Claim a trial for this process; return False if another process runs it."""
        if number in self._claims:
            return False
        file = disk.open_lock(self._files.claim(number))
        if not take_lock(file, wait=False) or is_in_use(self._files.trial(number).directory):
            file.close()
            return False
        self._claims[number] = file
        return True

    def _report(self, number: int, check: PruningCheck) -> None:
        if len(self._problem.directions) > 1:  # Optuna takes no intermediate values then
            return
        history = RunFolder(self._files.trial(number).directory).history
        values = {record["round"]: record.get(self._problem.metric) for record in history}
        # A round's bytes are a mapping by kind of message, which is skipped.
        check.report({at: float(value) for at, value in values.items() if isinstance(value, int | float)})

    def _end(self, number: int, check: PruningCheck, error: ProtoflError | None) -> None:
        self._report(number, check)
        self._tell(number, self._runs.end(number, check.pruned_at, error))

    def _tell(self, number: int, end: TrialEnd) -> None:
        """Report to Optuna, the user and MLflow how a trial ended."""
        problem, study, operation = self._problem, self._trials.study, self._operation
        values = [float(value) for value in (end.score, end.bytes) if value is not None][: len(problem.directions)]
        self._trials.tell(number, end.state, values or None, bytes=end.bytes, error=end.error, code=self._runs.code)
        operation.watcher.say(self._prefix + describe(problem, study.get_trials(deepcopy=False)[number]))
        write_results(problem, study, self._files)
        operation.follower.follow(self._files.directory)

    # ---- before and after them -----------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """Write and return the results; also wait for logging if the operation does."""
        files, operation, problem, study = self._files, self._operation, self._problem, self._trials.study
        with exclusive_lock(files.directory), storage_errors():
            write_results(problem, study, files)
            ended = ended_trials(study)
            if not best_trials(problem, study):
                last = reason(ended[-1])
                raise RunError(f"{files.directory}: none of the {len(ended)} trials has finished; the last one: {last}")
            outcome = Outcome(
                files.directory,
                table=printed(problem, study, files, self._trials.dashboard, **operation.console),
                markdown=markdown(problem, study),
                failed={f"trial {trial.number}": reason(trial) for trial in ended if trial.state == TrialState.FAIL},
                was_finished=self._was_finished,
            )
        operation.follower.finish(files.directory)
        if not operation.wait:
            return outcome
        return replace(outcome, store=operation.steps.call("report", operation.follower.wait).get("store"))

    def _inputs(self) -> Inputs:
        """Prepare data and partition, once for all trials.

        Raises:
            ConfigError: the given configuration does not fit the data, or the study began with other data.
            DataError: data are missing, or no client has validation data.
        """
        problem, config, operation = self._problem, self._problem.config, self._operation
        if problem.given.partition.validation == 0:
            operation.watcher.say(
                f"partition.validation is 0: the study sets aside {VALIDATION_SHARE:g} of each client's training data"
            )
        [inputs] = inputs_of_runs([RunSpec(config)], operation)
        partition = Partition.load(inputs.partition)
        if not any(len(client.val) for client in partition.clients):
            raise DataError(
                f"partition.validation = {config.partition.validation:g}: leaves no client any validation data; "
                "choose a larger share"
            )
        # Check the given values; other values that data or model refuse only fail their trial.
        experiment = Experiment.open(config, inputs.prepared, inputs.partition)
        experiment.method.start_server(experiment.setting)
        fingerprints = {
            "data_fingerprint": Dataset.load(inputs.prepared).meta.fingerprint,
            "partition_fingerprint": partition.fingerprint,
        }
        if not self._trials.is_of_data(fingerprints):
            raise ConfigError(f"{self._files.directory}: this study began with other data; choose another --out")
        return inputs
