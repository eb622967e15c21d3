"""Log a study to MLflow from its folder alone, so another process can do it, also again later.

In MLflow a study is a run whose rounds are trials, with the trials' runs below it.
"""

from __future__ import annotations

from pathlib import Path

from flcore.io.files import replace_file
from pipelines.runs.layout import read_json
from pipelines.tracking.sync import RunTracker
from pipelines.tuning.folder import StudyFiles


class StudyTracker:
    """A study in MLflow; imports neither torch nor Optuna. An unreachable store costs a warning."""

    def __init__(self, study: Path, *, uri: str | None) -> None:
        """Set what to log and where; the study has begun, and nothing is contacted yet.

        Args:
            study: the study's folder. uri: as for :class:`~pipelines.tracking.sync.RunTracker`.
        """
        self._files, self._uri = StudyFiles(study), uri
        self._name = str(read_json(self._files.record.config)["study"])
        self._logged: set[int] = set()
        self.run = RunTracker(self._files.record.directory, uri=uri, extra_tags={"study": self._name})
        """The study's own run."""

    def log_ended(self) -> bool:
        """Log the trials that have ended since the last call; return False if the store could not take them."""
        if not self.run.sync() or self.run.run_id is None:
            return False
        return self._log_trials(self.run.run_id)

    def finish(self) -> bool:
        """Log the results, and the trials not logged yet; return False if the store could not take them."""
        files = self._files
        for path in (files.results, files.table, files.trials, files.best):
            content = path.read_bytes()  # where MLflow finds them
            target = files.record.directory / path.relative_to(files.directory)
            replace_file(target, lambda file, content=content: file.write(content))  # type: ignore[misc]
        if not self.run.sync(final=True) or self.run.run_id is None:
            return False
        return self._log_trials(self.run.run_id)

    def _log_trials(self, parent: str) -> bool:
        if not self._files.results.exists():
            return True
        trials = read_json(self._files.results)["trials"]
        states = {trial["number"]: trial["state"] for trial in trials if trial["number"] not in self._logged}
        # Values that were refused have no run, nor have trials in the folders of others.
        runs = {number: self._files.trial(number) for number in states if self._files.trial(number).config.exists()}
        for number, run in runs.items():
            tags = {"study": self._name, "trial": str(number), "mlflow.runName": f"{self._name} trial {number}"}
            tracker = RunTracker(run.directory, uri=self._uri, parent_run_id=parent, extra_tags=tags)
            is_failed = states[number] == "fail"
            is_logged = (
                tracker.sync(final=True) if states[number] == "complete" else tracker.mark_stopped(failed=is_failed)
            )
            if not is_logged:
                return False
            self._logged.add(number)
        return True
