"""One trial of a study: an ordinary run on validation data, in a folder of its own, and how it ended.

What a trial left is of one code: one that was begun by other code is begun again. A run of the same values that has
finished elsewhere, such as in another study, is not trained twice; whether it would have been given up is asked of its
history, so that a study's results do not depend on what else was run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError
from flcore.core.loaded_code import EditedError
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import code_fingerprint
from flcore.experiment.run_folder import RunFiles, read_run_config
from flcore.io import disk
from flcore.io.files import read_json, remove_stale_temp, sealed, unsealed
from flcore.io.locks import run_lock
from pipelines.execution.budget import within_steps
from pipelines.execution.one_run import GivenUpError, Hurdles, PlacedRun, fetch, is_of_the_machine, placed
from pipelines.runs.cache import Cache
from pipelines.runs.folder import read_lines
from pipelines.runs.inputs import Inputs
from pipelines.runs.layout import write_json
from pipelines.runs.ownership import remove_own
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.problem import Problem

_CURE = "delete the trial's folder, and it is carried out again"


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial has ended.

    Attributes:
        state: as Optuna has it.
        rounds: the metric by round, as far as the trial came.
        accuracy: the metric of a finished trial.
        bytes: sent in all; of a finished trial.
        last_round: that a finished trial had.
        error: of a failed trial, why.
    """

    state: Literal["complete", "pruned", "fail"]
    rounds: Mapping[int, float] = field(default_factory=dict)
    accuracy: float | None = None
    bytes: int | None = None
    last_round: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class TrialRuns:
    """The runs of a study's trials, before they begin and after they have ended.

    Attributes:
        problem: what is searched. files: of the study.
        inputs: the data. cache: knows where runs have finished.
        copies: as for :class:`~pipelines.execution.operation.Operation`.
    """

    problem: Problem
    files: StudyFiles
    inputs: Inputs
    cache: Cache
    copies: bool = True

    @cached_property
    def code(self) -> str:
        """Fingerprint of the code that trials use."""
        return code_fingerprint(self.problem.config)

    def outcome(self, number: int, values: Mapping[str, Any]) -> TrialOutcome | None:
        """How a trial has ended, as it was written before anybody was told; None if it has not, with these values.

        A file that has changed since says nothing: the trial is carried out again.
        """
        file = self.files.outcome(number)
        if not file.exists():
            return None
        try:
            found = unsealed(read_json(file, ""))
        except DataError:
            return None
        told = json.loads(json.dumps(self._told(number, values)))
        if found is None or any(found.pop(key, None) != value for key, value in told.items()):
            return None
        found["rounds"] = {int(at): value for at, value in found["rounds"].items()}
        return TrialOutcome(**found)

    def place(self, number: int, values: Mapping[str, Any], hurdles: Hurdles) -> PlacedRun | None:
        """The run of a trial, to be carried out; None where its outcome is known at once.

        That is where the configuration or the data refuse the values, and where the run has finished elsewhere: it is
        asked as any other whether it would have been given up.

        Raises:
            RunError: another process is at work in the trial's folder. DataError: data are damaged.
        """
        files = self.files.trial(number)
        remove_stale_temp(files.directory)
        try:
            config = self.problem.config_of(values)
            if self.problem.max_steps is not None:
                config = within_steps(config, self.inputs, self.problem.max_steps)
            self._clear(config, files)
            run = placed(config, self.inputs, self.files.directory, directory=files.directory)
        except ConfigError as error:  # values that do not go together, or with these data
            self._write(number, values, TrialOutcome("fail", error=str(error)))
            return None
        run = replace(run, hurdles=hurdles)
        if not fetch(run, self.cache, restart=True, copies=self.copies):
            return run
        self.end(number, values, run, None)
        return None

    def end(self, number: int, values: Mapping[str, Any], run: PlacedRun, error: ProtoflError | None) -> None:
        """Write how a trial has ended.

        Raises:
            ProtoflError: another process is at work in the trial's folder, the disk is full, data are damaged, or code
                was edited: unrelated to the values. Run the same command to resume.
        """
        files = RunFiles(run.directory)
        if error is None:
            outcome = self._finished(run, read_lines(files.history))
        elif isinstance(error, GivenUpError):
            history = read_lines(files.checkpoint / files.history.name)
            outcome = TrialOutcome("pruned", self._rounds(history, run.hurdles.failed_at(history)))
        elif isinstance(error, DataError | EditedError) or is_of_the_machine(error):
            raise error
        else:  # it has diverged, or was killed again and again
            with run_lock(run.directory):  # raises it again if it is about another process
                pass
            history = read_lines(files.checkpoint / files.history.name)
            outcome = TrialOutcome("fail", self._rounds(history), error=str(error))
        self._write(number, values, outcome)

    def _finished(self, run: PlacedRun, history: Sequence[Mapping[str, Any]]) -> TrialOutcome:
        failed = run.hurdles.failed_at(history)
        if failed is not None:
            return TrialOutcome("pruned", self._rounds(history, failed))
        last = history[-1]
        try:
            accuracy = self.problem.score(read_json(RunFiles(run.directory).metrics, _CURE), history)
        except RunError as error:
            return TrialOutcome("fail", self._rounds(history), error=str(error))
        sent = sum(last["bytes_up"].values()) + sum(last["bytes_down"].values())
        return TrialOutcome("complete", self._rounds(history), accuracy, sent, last["round"])

    def _rounds(self, history: Sequence[Mapping[str, Any]], last: int | None = None) -> dict[int, float]:
        """The metric by round until ``last``, where it is a number: of a round, bytes are told by kind of message."""
        known = {record["round"]: record.get(self.problem.metric) for record in history}
        return {
            at: float(value)
            for at, value in known.items()
            if isinstance(value, (int, float)) and value == value and (last is None or at <= last)
        }

    def _told(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"study": self.problem.name, "number": number, "params": dict(values), "code": self.code}

    def _write(self, number: int, values: Mapping[str, Any], outcome: TrialOutcome) -> None:
        if outcome.state != "complete":
            _drop_weights(self.files.trial(number))
        write_json(self.files.outcome(number), sealed(self._told(number, values) | asdict(outcome)), durable=True)

    def _clear(self, config: Config, files: RunFiles) -> None:
        """Make room where other code has worked, or another trial had this number; what is to be gone on with stays."""
        if not files.config.exists():
            return
        about = read_run_config(files.directory)
        experiment = Experiment.open(config, self.inputs.prepared, self.inputs.partition)
        if (about.get("code"), about.get("config_hash")) != (code_fingerprint(config), experiment.hash):
            # The folder stays: a storage that several folders share knows by it whose trial it is.
            remove_own("run", files.directory)


def _drop_weights(run: RunFiles) -> None:
    """Free what a trial that is not continued would need to continue; its history stays."""
    history = run.checkpoint / run.history.name
    if not history.exists():
        disk.try_to_remove(run.checkpoint)
        return
    for path in sorted(run.checkpoint.iterdir()):
        if path != history:
            disk.try_to_remove(path)
