"""Log a study to MLflow from its folder alone, so another process can do it, even repeatedly.

In MLflow a study is a run with trials as rounds, and the trials' runs are its children.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flcore.io.files import replace_file
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import read_json
from pipelines.tracking.sync import RunTracker
from pipelines.tuning.folder import StudyFiles


def study_of(directory: Path) -> Path | None:
    """Return the study that a folder is, or is the record or a trial of; None for any other folder."""
    folder = directory.absolute()
    study = next((known for known in (folder, folder.parent, folder.parent.parent) if is_study(known)), None)
    parts = () if study is None else (study, StudyFiles(study).record.directory, study / "trials" / folder.name)
    return study if folder in parts else None


def is_study(directory: Path) -> bool:
    """Return whether a study has begun in a folder."""
    return StudyFiles(directory).record.config.exists()


class StudyTracker:
    """Log a study to MLflow, without torch and Optuna. An unreachable store only causes a warning."""

    def __init__(self, study: Path, *, uri: str | None) -> None:
        """Set source and store of a study that has begun; nothing is contacted yet."""
        self._files, self._uri = StudyFiles(study), uri
        self._name = str(RunFolder(self._files.record.directory).study)
        self._logged: set[int] = set()
        self._run = RunTracker(self._files.record.directory, uri=uri, extra_tags={"study": self._name})
        self.run_dir = self._run.run_dir
        """The folder of the study's own run."""

    def sync(self, final: bool = False, *, system: Mapping[str, float] | None = None) -> bool:
        """Log the study and the trials that ended since the last call; return False if the store is unreachable."""
        if not self._run.sync(final, system=system or {}) or self._run.run_id is None:
            return False
        return self._log_trials(self._run.run_id)

    def finish(self) -> bool:
        """Log the results as well; return False if the store is unreachable."""
        files = self._files
        for path in (files.results, files.table, files.trials, files.best):
            content = path.read_bytes()  # MLflow logs files of the record's folder
            target = files.record.directory / path.relative_to(files.directory)
            replace_file(target, lambda file, content=content: file.write(content))  # type: ignore[misc]
        return self.sync(final=True)

    def mark_stopped(self, *, failed: bool, reason: str | None = None) -> bool:
        return self._run.mark_stopped(failed=failed, reason=reason)

    def _log_trials(self, parent: str) -> bool:
        if not self._files.results.exists():
            return True
        trials = read_json(self._files.results)["trials"]
        states = {trial["number"]: trial["state"] for trial in trials if trial["number"] not in self._logged}
        # Rejected values have no run; trials in other folders have it there.
        runs = {number: self._files.trial(number) for number in states if self._files.trial(number).config.exists()}
        for number, run in runs.items():
            name, tags = f"{self._name} trial {number}", {"study": self._name, "trial": str(number)}
            tracker = RunTracker(run.directory, uri=self._uri, name=name, parent_run_id=parent, extra_tags=tags)
            state = states[number]
            if not (tracker.sync(final=True) if state == "complete" else tracker.mark_stopped(failed=state == "fail")):
                return False
            self._logged.add(number)
        return True
