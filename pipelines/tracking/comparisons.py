"""A comparison in MLflow: a run of its own with its table, figures and page, and the compared runs below it.

This parent is found again by the comparison's folder and name. Runs of several experiments, such as a sweep over
partitions, have one in each, because MLflow shows no child in another experiment. A run stays below the comparison that
logged it first, and has a tag of each, ``protofl.comparison.<run id of the parent>``, with the comparison's name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.core.errors import DataError
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import read_json
from pipelines.tracking import description
from pipelines.tracking.artifacts import comparison_files
from pipelines.tracking.metrics import times_of
from pipelines.tracking.store import Store, add_missing, all_runs, only_one_process
from pipelines.tracking.sync import PARENT_TAG, RunTracker

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking.client import MlflowClient

COMPARISON_TAG = "protofl.comparison"


@dataclass(frozen=True)
class _Comparison:
    """A comparison to log: the files that MLflow keeps, its times, and its finished runs with method or variant."""

    directory: Path
    files: Sequence[Path]
    name: str
    runs: Sequence[RunFolder]
    labels: Sequence[str]
    began_ms: int
    ended_ms: int
    source: str | None

    @property
    def digest(self) -> str:
        named = [str(self.directory.absolute()), self.name]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]


def log_comparison(
    directory: Path,
    runs: Sequence[RunFolder],
    uri: str | None,
    *,
    name: str | None = None,
    began_ms: int | None = None,
    source: str | None = None,
) -> bool:
    """Log compared runs and their comparison.

    Args:
        directory: of tables, figures and pages.
        runs: finished ones; those that MLflow has already are found again.
        uri: the store; None for the result of :func:`~pipelines.tracking.store.resolve_uri`.
        name: of the parent run; None takes the folder's.
        began_ms: start of the comparison, whose runs may be older; None for the time of its tables.
        source: the command that made it; None for the command of its last run.

    Returns:
        True if the store has all of it now; False after one warning, unless this process has given it already.

    Raises:
        DataError: a folder is no run or damaged, or there are no runs or no tables.
    """
    runs = list({run.directory: run for run in runs}.values())  # two rows may share one
    files = comparison_files(directory)
    if not runs or not files:
        raise DataError(f"{directory}: there is no comparison to log (no finished runs, or no tables)")
    ended_ms = max(path.stat().st_mtime_ns for path in files) // 1_000_000
    compared = _Comparison(
        directory,
        files,
        name or directory.absolute().name,
        runs,
        _labels(directory, runs),
        ended_ms if began_ms is None else began_ms,
        ended_ms,
        source,
    )
    store = Store(uri)
    parents: dict[str, Run] = {}

    def find_parents(client: MlflowClient) -> None:
        for experiment in dict.fromkeys(map(description.experiment_name, runs)):
            parents[experiment] = _parent(client, store.experiment_id(client, experiment), compared)

    with only_one_process(files[0], wait=True):
        if not store.attempt(find_parents, directory, final=True):
            return False
        children: list[str] = []
        for run in runs:
            parent = parents[description.experiment_name(run)].info
            tags = {f"{COMPARISON_TAG}.{parent.run_id}": compared.name}
            tracker = RunTracker(run.directory, uri=store.uri, parent_run_id=parent.run_id, extra_tags=tags)
            if not tracker.sync(final=True) or tracker.run_id is None:
                return False
            children.append(tracker.run_id)

        def fill(client: MlflowClient) -> None:
            for parent in parents.values():
                _fill(client, compared, parent, children)

        return store.attempt(fill, directory, final=True)


def _labels(directory: Path, runs: Sequence[RunFolder]) -> list[str]:
    """Return the method or variant of each run: its first row in ``comparison.json``, else its method."""
    file = directory / "comparison.json"
    rows = {row["config_hash"]: row.get("method") for row in reversed(read_json(file)["runs"])} if file.exists() else {}
    return [rows.get(run.config_hash) or run.config["method"]["name"] for run in runs]


def _parent(client: MlflowClient, experiment_id: str, compared: _Comparison) -> Run:
    """Return the parent in an experiment; create it if missing."""
    last = max(compared.runs, key=lambda run: times_of(run).ended)
    tags = {
        **description.origin(last),
        **({} if compared.source is None else {"mlflow.source.name": compared.source}),
        "methods": ", ".join(dict.fromkeys(compared.labels)),
        "seeds": ", ".join(map(str, sorted({run.config["seed"] for run in compared.runs}))),
        COMPARISON_TAG: compared.digest,
    }
    for parent in all_runs(client, experiment_id, f"tags.`{COMPARISON_TAG}` = '{compared.digest}'"):
        add_missing(client, parent, tags, {})
        return parent
    return client.create_run(experiment_id, start_time=compared.began_ms, tags=tags, run_name=compared.name)


def _fill(client: MlflowClient, compared: _Comparison, parent: Run, children: Sequence[str]) -> None:
    """Log tables and figures, and release runs that are compared no more."""
    run_id = parent.info.run_id
    tag = f"{COMPARISON_TAG}.{run_id}"
    for run in all_runs(client, parent.info.experiment_id, f"tags.`{tag}` LIKE '%'"):
        if run.info.run_id not in children:
            client.delete_tag(run.info.run_id, tag)
            if run.data.tags.get(PARENT_TAG) == run_id:
                client.delete_tag(run.info.run_id, PARENT_TAG)
    client.log_metric(run_id, "comparison/runs", len(children), compared.ended_ms, 0)
    for path in compared.files:
        folder = path.relative_to(compared.directory).parent.as_posix()
        client.log_artifact(run_id, str(path), None if folder == "." else folder)
    table = next((path.read_text(encoding="utf-8") for path in compared.files if path.suffix == ".md"), "")
    client.set_tag(run_id, description.NOTE_TAG, description.note(table))
    client.set_terminated(run_id, status="FINISHED", end_time=compared.ended_ms)
