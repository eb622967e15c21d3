"""One trial of a study: a run on validation data in a folder of its own.

A trial runs with one code version: if another version began it, it starts over. If a run with the same values has
finished elsewhere, such as in another study, it is reused; the pruner still checks its rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optuna.trial import TrialState

from flcore.config.schema import Config
from flcore.core.errors import DataError, ProtoflError, RunError
from flcore.core.loaded_code import EditedError
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import code_fingerprint
from flcore.experiment.run_folder import RunFiles
from flcore.io import disk
from flcore.io.files import remove_stale_temp, replace_file
from flcore.io.locks import run_lock
from pipelines.execution.one_run import PlacedRun, PrunedError, fetch, is_of_the_machine, placed
from pipelines.runs.cache import Cache
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs
from pipelines.runs.ownership import remove_own
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.metrics import value_of
from pipelines.tuning.problem import Problem


@dataclass(frozen=True)
class TrialEnd:
    """The result of a trial: score and bytes sent of a complete one, the error of a failed one."""

    state: TrialState
    score: float | None = None
    bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class TrialRuns:
    """The runs of a study's trials."""

    problem: Problem
    files: StudyFiles
    inputs: Inputs
    cache: Cache

    @cached_property
    def code(self) -> str:
        return code_fingerprint(self.problem.config)

    def place(self, number: int, values: Mapping[str, Any]) -> tuple[PlacedRun, bool]:
        """Return the run of a trial, and whether it has finished, here or elsewhere.

        Raises:
            ConfigError: the configuration or the data refuse the values. DataError: data are damaged.
            RunError: another process is using the trial's folder.
        """
        files = self.files.trial(number)
        remove_stale_temp(files.directory)
        config = self.problem.config_of(values)
        self._clear(config, files)
        run = placed(config, self.inputs, self.files.directory, directory=files.directory, restart=True)
        return run, fetch(run, self.cache)

    def end(self, number: int, pruned_at: int | None, error: ProtoflError | None) -> TrialEnd:
        """Return a trial's result, and delete files that only its resumption would need.

        Raises:
            ProtoflError: the error is unrelated to the values: another process is using the trial's folder, the disk is
                full, data are damaged, or code was edited. Run the same command to resume.
        """
        files = self.files.trial(number)
        if error is not None and not isinstance(error, PrunedError):
            if isinstance(error, DataError | EditedError) or is_of_the_machine(error):
                raise error
            with run_lock(files.directory):  # raises if another process uses the folder
                pass
        if pruned_at is not None:
            end = TrialEnd(TrialState.PRUNED)
        elif error is not None:
            end = TrialEnd(TrialState.FAIL, error=str(error))
        else:
            end = self._finished(RunFolder(files.directory))
        if end.state != TrialState.COMPLETE:
            _drop_weights(files, pruned_at)
        return end

    def _finished(self, run: RunFolder) -> TrialEnd:
        last = run.history[-1]
        try:
            score = value_of(self.problem.metric, run.metrics, run.history)
        except RunError as error:
            return TrialEnd(TrialState.FAIL, error=str(error))
        sent = sum(last["bytes_up"].values()) + sum(last["bytes_down"].values())
        return TrialEnd(TrialState.COMPLETE, score, sent)

    def _clear(self, config: Config, files: RunFiles) -> None:
        """Clear the folder if another code version or another trial has used it."""
        if not files.config.exists():
            return
        run = RunFolder(files.directory)
        experiment = Experiment.open(config, self.inputs.prepared, self.inputs.partition)
        if (run.code, run.config_hash) != (code_fingerprint(config), experiment.hash):
            # The folder itself stays: in a shared storage it marks the trial as this folder's.
            remove_own("run", files.directory)


def _drop_weights(run: RunFiles, last: int | None) -> None:
    """Delete the weights of a trial that will not resume; keep its history up to round ``last``."""
    path = run.checkpoint / run.history.name
    if not path.exists():
        disk.try_to_remove(run.checkpoint)
        return
    for other in sorted(run.checkpoint.iterdir()):
        if other != path:
            disk.try_to_remove(other)
    lines = path.read_bytes().splitlines(keepends=True)
    counted = [line for line in lines if last is None or json.loads(line)["round"] <= last]
    if counted != lines:
        replace_file(path, lambda file: file.writelines(counted))
