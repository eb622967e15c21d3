"""``protofl track`` of a study: the whole of it from its folder, whichever part of that is named."""

from __future__ import annotations

from pathlib import Path

from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.log import StudyTracker


def study_of(directory: Path) -> Path | None:
    """The study that a folder is, or is part of: its record, or a trial; None for a folder that is neither.

    A store that was away while a study ran is told by such a part, and so is what to type.
    """
    place = directory.absolute()
    found = next((known for known in (place, place.parent, place.parent.parent) if _is_study(known)), None)
    parts = () if found is None else (found, StudyFiles(found).record.directory, found / "trials" / place.name)
    return found if place in parts else None


def log_study(study: Path, uri: str | None) -> bool:
    """Log a study with its trials; of one that is still going, or has found nothing, what there is.

    Returns:
        True if the store holds all of it now; False after one warning.
    """
    tracker, files = StudyTracker(study, uri=uri), StudyFiles(study)
    if files.best.exists():
        return tracker.finish()
    return tracker.log_ended()


def _is_study(directory: Path) -> bool:
    return StudyFiles(directory).record.config.exists()
