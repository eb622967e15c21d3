"""Who draws and logs a study: told of its folder alone, so that it may be another process, and can do it again later.

In MLflow a study is a run whose rounds are trials, with the trials' runs below it. Everything that has to be known is
on disk: the study's own run in ``study/``, how a trial ended in ``trial.json`` beside its run.
"""

from __future__ import annotations

from pathlib import Path

from flcore.io.files import replace_file
from pipelines.runs.layout import RunFiles, read_json
from pipelines.tracking.sync import RunTracker
from pipelines.tuning.folder import StudyFiles


class StudyTracker:
    """A study in MLflow; imports neither torch nor Optuna. A store that is away costs a warning."""

    def __init__(self, study: Path, *, uri: str | None) -> None:
        """Remember what to log and where; the study has begun, and nothing is contacted yet.

        Args:
            study: the study's folder.
            uri: as for :class:`~pipelines.tracking.sync.RunTracker`.
        """
        self._files, self._uri = StudyFiles(study), uri
        self._name = str(read_json(self._files.record.config)["study"])
        self._logged: set[int] = set()
        self.run = RunTracker(self._files.record.directory, uri=uri, extra_tags={"study": self._name})
        """The study's own run, to be logged live and, if need be, marked as stopped."""

    def log_trial(self, number: int) -> bool:
        """Log an ended trial and how far the study is; False if the store could not take it."""
        if not self.run.sync() or self.run.run_id is None:
            return False
        return self._log_trial(number, self.run.run_id)

    def finish(self) -> bool:
        """Log the results, and the trials that no process could log yet; False if the store could not take them."""
        files = self._files
        for path in (files.results, files.table, files.trials, files.best, *sorted(files.figures.glob("*.svg"))):
            content = path.read_bytes()  # where MLflow finds them
            target = files.record.directory / path.relative_to(files.directory)
            replace_file(target, lambda file, content=content: file.write(content))  # type: ignore[misc]
        if not self.run.sync(final=True) or self.run.run_id is None:
            return False
        numbers = [int(path.parent.name) for path in sorted(files.directory.glob("trials/*/trial.json"))]
        return all(self._log_trial(number, self.run.run_id) for number in numbers if number not in self._logged)

    def _log_trial(self, number: int, parent: str) -> bool:
        run = self._files.trial(number)
        is_logged = not run.config.exists() or self._log_run(run, number, parent)  # else values that were refused
        if is_logged:
            self._logged.add(number)
        return is_logged

    def _log_run(self, run: RunFiles, number: int, parent: str) -> bool:
        tags = {"study": self._name, "trial": str(number)}
        tracker = RunTracker(run.directory, uri=self._uri, parent_run_id=parent, extra_tags=tags)
        state = read_json(self._files.outcome(number))["state"]
        return tracker.sync(final=True) if state == "complete" else tracker.mark_stopped(failed=state == "fail")
