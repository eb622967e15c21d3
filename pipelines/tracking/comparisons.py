"""A comparison in MLflow: a run of its own with its table, figures and page, and the compared runs below it.

The parent is named after the comparison and found again by its folder and name. A seed or a method more goes to the
same parent, such as that of a run which failed at first; a method less begins another one, since numbers once logged
cannot be taken back. How runs that belong to several comparisons are shown, :mod:`pipelines.tracking.sync` says: below
the one logged last. Of every other they keep a tag, ``protofl.comparison.<run id of the parent>``, by which MLflow's
search finds all runs of one::

    tags.`protofl.comparison.0f3a...` = "comparison"
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import DataError
from pipelines.runs.compared import flatten
from pipelines.runs.folder import RunFolder, read_folder
from pipelines.runs.layout import read_json
from pipelines.tracking import description
from pipelines.tracking.artifacts import comparison_files
from pipelines.tracking.metrics import Times, metric_name, times_of
from pipelines.tracking.store import (
    FINAL_LOCK_PATIENCE_SECONDS,
    Store,
    TrackingUnavailable,
    add_missing,
    all_runs,
    history_of,
    only_one_process,
    runs_tagged,
)
from pipelines.tracking.sync import PARENT_TAG, RunTracker

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking.client import MlflowClient

COMPARISON_TAG = "protofl.comparison"

FIGURES = (
    "top1_global",
    "top1_vote",
    "mean_local",
    "mean_local_own_classes",
    "pooled_local",
    "bytes_up",
    "bytes_down",
)
"""Of ``metrics.json``, those whose means a comparison has as metrics."""

_TABLE = "runs.json"
_NO_BRACKETS = str.maketrans("", "", "()")  # which no metric's name may have
_LONGEST_LABEL = 150  # letters; a figure's name stands before it, and MLflow takes 250


@dataclass(frozen=True)
class _Comparison:
    """What is logged.

    Attributes:
        directory: of tables and figures. name: of the parent.
        runs: finished ones, by folder. labels: of each, what it is an instance of: a method, a variant, a point.
    """

    directory: Path
    name: str
    runs: Mapping[Path, RunFolder]
    labels: Mapping[Path, str]

    @property
    def digest(self) -> str:
        """Names the comparison in the store."""
        named = [str(self.directory.absolute()), self.name]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]

    @property
    def times(self) -> Times:
        """From the beginning of the first run to the end of the last one."""
        found = [times_of(run) for run in self.runs.values()]
        return Times(min(times.began for times in found), max(times.ended for times in found), {})


def log_comparison(directory: Path, run_dirs: Sequence[Path], uri: str | None, *, name: str | None = None) -> bool:
    """Log compared runs and their comparison.

    A run is labelled by its row in ``comparison.json``; where there is none by its method, and where runs of one method
    differ in more than their seeds, by what they differ in.

    Args:
        directory: of the comparison: its tables, ``figures/`` and pages.
        run_dirs: folders of the runs that have finished; those that MLflow has already are found again.
        uri: the store; None for what :func:`~pipelines.tracking.store.resolve_uri` finds.
        name: of the parent run; None takes the folder's.

    Returns:
        True if the store holds all of it now; False after one warning, unless this process has given it already.

    Raises:
        DataError: a folder is no run or damaged, or there are no runs or no tables.
    """
    runs = {Path(run_dir): read_folder(run_dir) for run_dir in run_dirs}
    files = comparison_files(directory)
    if not runs or not files:
        raise DataError(f"{directory}: there is no comparison to log (no finished runs, or no tables)")
    named = _rows(directory, runs) or labels_of(list(runs.values()))
    compared = _Comparison(directory, name or directory.absolute().name, runs, dict(zip(runs, named, strict=True)))
    store = Store(uri)

    def attempt(action: Callable[[MlflowClient], str]) -> str | None:
        try:
            with store.opened(FINAL_LOCK_PATIENCE_SECONDS) as client:
                found = action(client)
        except TrackingUnavailable as error:
            store.outage.note(store.uri, error, directory, time.monotonic(), final=True)
            return None
        store.outage.ended()
        return found

    with only_one_process(files[0], wait=True):
        parent = attempt(lambda client: _parent(client, store, compared))
        if parent is None:
            return False
        children: dict[Path, str] = {}
        for run_dir in runs:
            tags = {f"{COMPARISON_TAG}.{parent}": compared.name}
            tracker = RunTracker(run_dir, uri=store.uri, parent_run_id=parent, extra_tags=tags)
            if not tracker.sync(final=True) or tracker.run_id is None:
                return False
            children[run_dir] = tracker.run_id
        return attempt(lambda client: _fill(client, compared, parent, children, files)) is not None


def _rows(directory: Path, runs: Mapping[Path, RunFolder]) -> list[str]:
    """Of each run the row of a comparison that it stands in, the first of several; nothing unless all stand in one."""
    file = directory / "comparison.json"
    told = read_json(file)["runs"] if file.exists() else []
    rows = {
        run["config_hash"]: metric_name(str(run["method"]).translate(_NO_BRACKETS))
        for run in reversed(told)
        if "method" in run
    }
    hashes = [(run.metrics or {}).get("config_hash") for run in runs.values()]
    return [rows[key] for key in hashes] if all(key in rows for key in hashes) else []


def labels_of(runs: Sequence[RunFolder]) -> list[str]:
    """What each run is an instance of: its method, with the values in which runs of one method differ besides seeds."""
    told = [_without_seeds(run) for run in runs]
    labels = []
    for values in told:
        others = [other for other in told if other["method.name"] == values["method.name"]]
        differing = [key for key in values if len({other.get(key) for other in others}) > 1]
        said = " ".join([values["method.name"], *(f"{key.rpartition('.')[2]} {values[key]}" for key in differing)])
        if len(said) > _LONGEST_LABEL:
            digest = hashlib.sha256(said.encode()).hexdigest()[:8]
            said = f"{values['method.name']} {len(differing)} values {digest}"
        labels.append(metric_name(said))
    return labels


def _without_seeds(run: RunFolder) -> dict[str, str]:
    values = flatten(run.identity)
    return {key: value for key, value in values.items() if key not in ("seed", "partition.seed")}


def _parent(client: MlflowClient, store: Store, compared: _Comparison) -> str:
    """The parent's run id; made, or set running again."""
    experiment_id = store.experiment_id(client, description.experiment_name(next(iter(compared.runs.values()))))
    last = max(compared.runs.values(), key=lambda run: times_of(run).ended)
    tags = {
        **description.origin(last),
        "methods": ", ".join(dict.fromkeys(compared.labels.values())),
        "seeds": ", ".join(map(str, sorted({run.config["seed"] for run in compared.runs.values()}))),
        COMPARISON_TAG: compared.digest,
    }
    means = _means(summary(compared))
    known = runs_tagged(client, experiment_id, {COMPARISON_TAG: compared.digest})
    known = [run for run in known if _means(run.data.metrics) <= means]
    if known:
        largest = max(known, key=lambda run: len(_means(run.data.metrics)))
        add_missing(client, largest, tags, {})
        return str(largest.info.run_id)
    made = client.create_run(experiment_id, start_time=compared.times.began, tags=tags, run_name=compared.name)
    return str(made.info.run_id)


def _means(figures: Mapping[str, float]) -> set[str]:
    """Those that a comparison has of what it compares, however few seeds there are."""
    return {metric_name(name) for name in figures if name.startswith("mean/")}


def _fill(
    client: MlflowClient, compared: _Comparison, parent: str, children: Mapping[Path, str], files: Sequence[Path]
) -> str:
    """Give the parent what it says, and let go of runs that do not belong to it any more."""
    from mlflow.entities import Metric

    run = client.get_run(parent)
    _release_others(client, run, set(children.values()))
    values = {metric_name(name): value for name, value in summary(compared).items()}
    if any(run.data.metrics.get(name) != value for name, value in values.items()):
        # A later step counts as the newer value; what counts as time is when the runs ended.
        step = 1 + max((point.step for point in history_of(client, run, "comparison/runs")), default=-1)
        ended = compared.times.ended
        client.log_batch(parent, metrics=[Metric(name, value, ended, step) for name, value in values.items()])
    for path in files:
        folder = path.relative_to(compared.directory).parent.as_posix()
        client.log_artifact(parent, str(path), None if folder == "." else folder)
    client.log_text(parent, json.dumps(_table(compared, children)), _TABLE)
    client.set_tag(parent, "mlflow.loggedArtifacts", json.dumps([{"path": _TABLE, "type": "table"}]))
    client.set_tag(parent, description.NOTE_TAG, _note(compared, run.info.experiment_id, children, files))
    client.set_terminated(parent, status="FINISHED", end_time=compared.times.ended)
    return parent


def _release_others(client: MlflowClient, parent: Run, children: set[str]) -> None:
    """Let go of runs that the comparison had once and has no more."""
    run_id, experiment_id = parent.info.run_id, parent.info.experiment_id
    own = f"{COMPARISON_TAG}.{run_id}"
    for run in all_runs(client, experiment_id, f"tags.`{own}` LIKE '%'"):
        if run.info.run_id not in children:
            client.delete_tag(run.info.run_id, own)
            if run.data.tags.get(PARENT_TAG) == run_id:
                client.delete_tag(run.info.run_id, PARENT_TAG)


def summary(compared: _Comparison) -> dict[str, float]:
    """Means and standard deviations over the seeds, by figure and label."""
    values: dict[str, float] = {"comparison/runs": float(len(compared.runs))}
    for label in dict.fromkeys(compared.labels.values()):
        metrics = [run.metrics or {} for place, run in compared.runs.items() if compared.labels[place] == label]
        for figure in FIGURES:
            found = [float(record[figure]) for record in metrics if record.get(figure) is not None]
            if len(found) == len(metrics):
                values[f"mean/{figure}/{label}"] = statistics.fmean(found)
            if len(found) == len(metrics) > 1:
                values[f"std/{figure}/{label}"] = statistics.stdev(found)
    return values


def _table(compared: _Comparison, children: Mapping[Path, str]) -> dict[str, Any]:
    """A row per run, in the form of MLflow's own tables."""
    rows = []
    for place, run in compared.runs.items():
        metrics = run.metrics or {}
        seconds = sum((run.timing.get("seconds") or {}).values()) or None
        figures = [metrics.get(figure) for figure in FIGURES]
        rows.append([compared.labels[place], run.config["seed"], *figures, seconds, children[place]])
    return {"columns": ["name", "seed", *FIGURES, "seconds", "run_id"], "data": rows}


def _note(compared: _Comparison, experiment_id: str, children: Mapping[Path, str], files: Sequence[Path]) -> str:
    """What the parent's page says: the table that the comparison's folder has, and links to its runs."""
    links = [
        f"- [{compared.labels[place]}, seed {run.config['seed']}](#/experiments/{experiment_id}/runs/{children[place]})"
        for place, run in compared.runs.items()
    ]
    table = next((path.read_text(encoding="utf-8") for path in files if path.suffix == ".md"), "")
    end = "\n".join(["", "## Runs", "", *links])
    return description.shortened(table, end)
