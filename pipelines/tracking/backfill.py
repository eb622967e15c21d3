"""``protofl track``: what was made while the store was away, a run or a whole comparison, from its folder alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flcore.core.errors import DataError
from pipelines.runs.folder import RunFolder, is_in_use
from pipelines.runs.layout import read_json
from pipelines.tracking.comparisons import log_comparison
from pipelines.tracking.sync import RunTracker

_TABLES = ("comparison.json", "sweep.json")
"""Each says under ``runs`` which runs it was made from, by their ``config_hash``."""


def log_folder(directory: Path, uri: str | None, *, register: bool = False) -> bool:
    """Log a run, finished or not, or a comparison with its runs.

    Args:
        directory: of a run, or of a comparison or sweep: with tables, and runs in ``runs/`` in it or beside it.
        uri, register: as for :class:`~pipelines.tracking.sync.RunTracker`.

    Returns:
        True if the store holds all of it now; False after one warning.

    Raises:
        DataError: there is neither, a file is damaged, or runs of the comparison are not there any more.
    """
    run = RunFolder(directory)
    if run.is_described:
        return _log_run(run, uri, register)
    tables = next((directory / name for name in _TABLES if (directory / name).exists()), None)
    if tables is None:
        raise DataError(f"{directory}: no run, comparison or study there (no config.json, no {' or '.join(_TABLES)})")
    compared = [row["config_hash"] for row in read_json(tables)["runs"]]
    folders = {run.config_hash: run for run in _runs_of(directory)}
    missing = sum(config_hash not in folders for config_hash in compared)
    if missing:
        raise DataError(f"{tables}: {missing} of its {len(compared)} runs are not in {directory / 'runs'} any more")
    runs = [folders[config_hash] for config_hash in compared]
    return all(_log_run(run, uri, register) for run in runs) and log_comparison(directory, runs, uri)


def _log_run(run: RunFolder, uri: str | None, register: bool) -> bool:
    tracker = RunTracker(run.directory, uri=uri)
    if run.is_finished:
        return tracker.finish(with_model=True, register=register)
    return tracker.sync() if is_in_use(run.directory) else tracker.mark_stopped(failed=False)


def _runs_of(directory: Path) -> Iterator[RunFolder]:
    for home in (directory, directory.absolute().parent):
        for config in sorted((home / "runs").glob("*/config.json")):
            yield RunFolder(config.parent)
