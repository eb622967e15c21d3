"""One trial of a study: an ordinary run on validation data, in a folder of its own, and how it ended.

What a trial left is of one code: one that was begun by other code is begun again. A run of the same values that has
finished elsewhere, such as in another study, is not trained twice; whether it would have been given up is asked of its
history, so that a study's results do not depend on what else was run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flcore import training
from flcore.config import Config
from flcore.engine.rounds import Observers, RoundRecord
from flcore.errors import ConfigError, RunError
from flcore.experiment import Experiment
from flcore.locks import sole_use
from flcore.provenance import code_fingerprint
from flcore.run_folder import RunFiles, described
from flcore.running import evaluate
from pipelines.runs.cache import Cache, place
from pipelines.runs.folder import read_lines
from pipelines.runs.inputs import Inputs, write_inputs
from pipelines.runs.layout import read_json, write_json, write_text
from pipelines.runs.provenance import environment
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.problem import Problem

if TYPE_CHECKING:
    from pipelines.execution.progress import Watcher

Hopeless = Callable[[int, Mapping[int, float]], bool]
"""Whether a trial with this number is to be given up after rounds with these scores."""


class _GivenUp(Exception):  # noqa: N818 - no error
    """The trial is hopeless."""


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial has ended.

    Attributes:
        state: as Optuna has it.
        rounds: the metric by round, as far as the trial came.
        bytes: sent in all; of a finished trial.
        error: of a failed trial, why.
    """

    state: Literal["complete", "pruned", "fail"]
    rounds: Mapping[int, float] = field(default_factory=dict)
    bytes: int | None = None
    error: str | None = None

    @property
    def accuracy(self) -> float | None:
        """The metric after the last round of a finished trial."""
        return self.rounds[max(self.rounds)] if self.state == "complete" else None


@dataclass(frozen=True)
class TrialRun:
    """What all trials of a study have in common.

    Attributes:
        problem: what is searched. files: of the study.
        inputs: the data. cache: knows where runs have finished.
        is_hopeless: asked after every evaluated round but the last.
        watch: is told of rounds.
    """

    problem: Problem
    files: StudyFiles
    inputs: Inputs
    cache: Cache
    is_hopeless: Hopeless
    watch: Watcher

    @cached_property
    def code(self) -> str:
        """Fingerprint of the code that trials use."""
        return code_fingerprint(self.problem.config)

    def carry_out(self, number: int, values: Mapping[str, Any]) -> TrialOutcome:
        """Train a trial, or go on with it; one that has ended is not begun again.

        The outcome is in ``trial.json`` of the trial's folder before anybody is told.

        Args:
            number: of the trial.
            values: by dotted key.

        Raises:
            RunError: another process is at work in the trial's folder, or the disk is full: nothing that the values
                have done. The same command goes on.
            DataError: data are damaged.
        """
        run, file = self.files.trial(number), self.files.outcome(number)
        told = {"study": self.problem.name, "number": number, "params": dict(values), "code": self.code}
        outcome = _stored(file, told)
        if outcome is None:
            with sole_use(run.directory):
                pass
            write_inputs(run.directory, self.inputs)
            outcome = self._ended(number, values, run)
            write_json(file, told | asdict(outcome))
        if outcome.state != "complete":
            _drop_weights(run)
        return outcome

    def _ended(self, number: int, values: Mapping[str, Any], run: RunFiles) -> TrialOutcome:
        rounds: dict[int, float] = {}
        try:
            sent = self._train(self.problem.config_of(values), number, run, rounds)
        except _GivenUp:
            return TrialOutcome("pruned", rounds)
        except (ConfigError, RunError) as error:  # values that do not go together, or with these data; or diverged
            if _is_of_the_machine(error):
                raise
            with sole_use(run.directory):  # raises it again if it is about another process
                pass
            return TrialOutcome("fail", rounds, error=str(error))
        return TrialOutcome("complete", rounds, sent)

    def _train(self, config: Config, number: int, run: RunFiles, rounds: dict[int, float]) -> int:
        """All rounds and the evaluation; scores go to ``rounds``.

        Returns:
            The bytes sent in all.
        """
        label, last = f"trial {number}", config.federation.rounds

        def note(record: RoundRecord) -> None:
            if record["round"] in rounds:
                return
            rounds[record["round"]] = self._score(record)
            # A trial that has come to its last round costs nothing more.
            if record["round"] < last and self.is_hopeless(number, rounds):
                raise _GivenUp

        def on_start(complete: int) -> None:
            self.watch.run(label, last, complete)
            for record in read_lines(run.checkpoint / run.history.name):  # by a process that was killed
                note(record)

        def on_round(complete: int, record: RoundRecord | None) -> None:
            self.watch.round(label, complete, record)
            if record is not None:
                note(record)

        self._clear_or_fetch(config, number)
        training.train(
            config,
            self.inputs.prepared,
            self.inputs.partition,
            run.directory,
            observers=Observers(on_round, on_start=on_start),
            replace=True,
            restart=True,  # a checkpoint that can be used is used
            about=environment(config),
        )
        history = read_lines(run.history)
        for record in history:  # where nothing was left to train
            note(record)
        if not run.metrics.exists():
            evaluate(config, self.inputs.prepared, self.inputs.partition, run.directory)
        self.cache.note_run(run.directory, config)
        return sum(history[-1]["bytes_up"].values()) + sum(history[-1]["bytes_down"].values())

    def _score(self, record: RoundRecord) -> float:
        value = record[self.problem.metric]
        if value is None:
            raise RunError(f"round {record['round']}: {self.problem.metric} is null: nobody could be scored")
        return float(value)

    def _clear_or_fetch(self, config: Config, number: int) -> None:
        """Make room where other code has worked; take what has finished elsewhere where nothing has."""
        run, code = self.files.trial(number), code_fingerprint(config)
        if run.config.exists():
            if described(run.directory).get("code") == code:
                return
            shutil.rmtree(run.directory)
        experiment = Experiment.open(config, self.inputs.prepared, self.inputs.partition)
        elsewhere = self.cache.finished_run(experiment.hash, code)
        if elsewhere is not None:
            place(elsewhere, run.directory)
            self.files.outcome(number).unlink(missing_ok=True)  # how it ended there, as another trial
        write_inputs(run.directory, self.inputs)


def _stored(file: Path, told: Mapping[str, Any]) -> TrialOutcome | None:
    """The outcome that a process wrote before it was killed; None where there is none, or one of other values."""
    if not file.exists():
        return None
    found = read_json(file)
    if any(found.pop(key, None) != json.loads(json.dumps(value)) for key, value in told.items()):
        return None
    found["rounds"] = {int(number): value for number, value in found["rounds"].items()}
    return TrialOutcome(**found)


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Whether what the system refused (space on a disk, a file) is behind an error."""
    return error is not None and (isinstance(error, OSError) or _is_of_the_machine(error.__cause__))


def _drop_weights(run: RunFiles) -> None:
    """Free what a trial that is not continued would need to continue; its history stays."""
    kept = run.checkpoint / run.history.name
    history = kept.read_text() if kept.exists() else ""
    shutil.rmtree(run.checkpoint, ignore_errors=True)
    if history:
        write_text(kept, history)
