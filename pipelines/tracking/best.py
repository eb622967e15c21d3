"""``protofl track best``: the best finished run of an experiment, and the alias ``champion`` of its model.

Runs are ranked by a figure of the whole run. Trials of a study are left out: they answer for validation data after
training on less. Whoever ranks runs by test data selects on it, so the description of a champion's version says what it
was chosen on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.core.errors import ConfigError, DataError, RunError
from pipelines.runs.folder import RunFolder
from pipelines.runs.metrics import check_direction, lower_is_better
from pipelines.tracking import description, model
from pipelines.tracking.metrics import SUMMARY_FIGURES, is_summary
from pipelines.tracking.store import FINAL_LOCK_PATIENCE_SECONDS, Store, all_runs, sqlite_file
from pipelines.tracking.sync import RunTracker

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run
    from mlflow.tracking.client import MlflowClient

CHAMPION = "champion"

_NOT_SCORED = ("comm/", "time/", "energy/", "privacy/", "model/")
"""With what the figures begin that are the same whatever data answer."""
_NOTHING_TO_BE_BEST_IN = {
    "best/round": "more or fewer rounds are not better",
    **dict.fromkeys(("privacy/noise_multiplier", "privacy/delta", "privacy/clip"), "it was set, not reached"),
}
_CHOSEN = "champion: "
"""With what the line of a description begins that says why; another one takes its place."""


@dataclass(frozen=True)
class Best:
    """The best run of an experiment.

    Attributes:
        metric, value: by which it is the best. split: of the data that this was measured on.
        among: how many finished runs have that figure. mixed: in what they differ that makes them hard to compare.
        model: the version that is champion now, as ``models:/NAME/VERSION``; None where nobody asked for it.
    """

    run_id: str
    name: str
    experiment: str
    metric: str
    value: float
    split: str
    among: int
    mixed: Sequence[str] = ()
    model: str | None = None

    @property
    def words(self) -> str:
        """``final/top1_global 0.9345 on test data, the highest of 12 finished runs in digits/dirichlet``."""
        on = "" if self.metric.startswith(_NOT_SCORED) else f" on {self.split} data"
        extreme = "lowest" if lower_is_better(self.metric) else "highest"
        runs = "the only finished run" if self.among == 1 else f"the {extreme} of {self.among} finished runs"
        mixed = f" (of different {' and '.join(self.mixed)}: --where chooses among them)" if self.mixed else ""
        return f"{self.metric} {self.value:.6g}{on}, {runs} in {self.experiment}{mixed}"


def best(
    uri: str | None, metric: str, *, experiment: str | None = None, where: str | None = None, promote: bool = False
) -> Best:
    """Return the best finished run of an experiment.

    Args:
        uri: the store; None for what :func:`~pipelines.tracking.store.resolve_uri` finds.
        metric: a figure of ``metrics.json`` or its name in MLflow: ``top1_global``, ``final/top1_global``.
        experiment: by name; None where only one holds runs with that figure.
        where: a filter in MLflow's words, for runs that can be compared: ``params.`partition.alpha` = '0.1'``.
        promote: register its model, if it is not yet, and give that version the alias ``champion``.

    Raises:
        ConfigError: no such metric or experiment, several experiments, or a filter that cannot be read.
        DataError: no finished run has that figure, or the best one's model is to be promoted and is not in the store.
        TrackingUnavailable: the store does not answer.
    """
    name = metric_of(metric)
    store = Store(uri)
    database = sqlite_file(store.uri)
    if database is not None and not database.exists():  # asking MLflow would make it
        raise DataError(f"track best: there is no store at {database}; log runs with: protofl track DIR")
    with store.opened(FINAL_LOCK_PATIENCE_SECONDS) as client:
        by_experiment = {entry.name: _ranked(client, entry, name, where) for entry in _experiments(client, experiment)}
        ranked = {entry: runs for entry, runs in by_experiment.items() if runs}
        if not ranked:
            which = f" in {experiment}" if experiment else ""
            such = f" with {where}" if where else ""
            raise DataError(f"track best: no finished run{which}{such} has {name}; log runs with: protofl track DIR")
        if len(ranked) > 1:
            raise ConfigError(f"--experiment: several have {name}; choose from {', '.join(sorted(ranked))}")
        [(chosen, runs)] = ranked.items()
        winner = runs[0]
        answer = Best(
            run_id=winner.info.run_id,
            name=winner.info.run_name,
            experiment=chosen,
            metric=name,
            value=winner.data.metrics[name],
            split=_split(winner),
            among=len(runs),
            mixed=_mixed(runs),
        )
        return replace(answer, model=_promoted(client, winner, answer)) if promote else answer


def metric_of(name: str) -> str:
    """Return the metric in MLflow that a key of ``metrics.json``, or the metric itself, names.

    Raises:
        ConfigError: there is none of which a run could be the best.
    """
    metric = SUMMARY_FIGURES.get(name, name)
    if metric in _NOTHING_TO_BE_BEST_IN:
        raise ConfigError(f"--metric {name}: no run can be the best in it; {_NOTHING_TO_BE_BEST_IN[metric]}")
    if is_summary(metric):
        check_direction(metric)
        return metric
    near = get_close_matches(name, [*SUMMARY_FIGURES, *SUMMARY_FIGURES.values()], n=1)
    hint = f"did you mean {near[0]}?" if near else "expected such as top1_global, mean_local or final/top1_vote"
    raise ConfigError(f"--metric {name}: no figure of a finished run; {hint}")


def _experiments(client: MlflowClient, name: str | None) -> list[Experiment]:
    if name is None:
        return [*client.search_experiments()]
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        names = ", ".join(sorted(entry.name for entry in client.search_experiments())) or "none"
        raise ConfigError(f"--experiment {name}: not in this store; there are {names}")
    return [experiment]


def _ranked(client: MlflowClient, experiment: Experiment, metric: str, where: str | None) -> list[Run]:
    """Return finished runs with this metric, the best first; among equals by start, then by name."""
    sign = 1 if lower_is_better(metric) else -1
    runs = [
        run
        for run in _finished(client, experiment, where)
        if "trial" not in run.data.tags and not math.isnan(run.data.metrics.get(metric, math.nan))
    ]
    return sorted(runs, key=lambda run: (sign * run.data.metrics[metric], run.info.start_time, run.info.run_name))


def _finished(client: MlflowClient, experiment: Experiment, where: str | None) -> list[Run]:
    from mlflow.exceptions import MlflowException

    filter_string = " and ".join(["attributes.status = 'FINISHED'", *([where] if where else [])])
    try:
        return all_runs(client, experiment.experiment_id, filter_string)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        reason = str(error.message).partition("\n")[0]
        raise ConfigError(f"--where {where}: not a filter of MLflow ({reason})") from error


def _mixed(runs: Sequence[Run]) -> list[str]:
    found = {"data": {run.data.tags.get("data_hash") for run in runs}}
    found["rounds"] = {run.data.params.get("federation.rounds") for run in runs}
    return [name for name, values in found.items() if len(values) > 1]


def _split(run: Run) -> str:
    """Return the split that a run was scored on."""
    entries = run.inputs.dataset_inputs if run.inputs else ()
    contexts = [tag.value for entry in entries for tag in entry.tags]
    return next((context for context in contexts if context != "training"), "test")


def _promoted(client: MlflowClient, run: Run, answer: Best) -> str:
    """Make the run's model the champion and return its version; MLflow takes the alias from the one before."""
    uri = run.data.tags.get(model.MODEL_URI_TAG)
    if uri is None:
        raise DataError(
            f"--promote: {answer.name} is the best, but its model is not in the store; log it with: protofl track DIR, "
            "where DIR is its folder"
        )
    return _champion(client, run, uri, answer.experiment, answer.words)


def promote_run(run_dir: Path, uri: str | None, reason: str) -> str:
    """Log a finished run, and make its model the champion of its experiment; return it as ``models:/NAME/VERSION``.

    Raises:
        RunError: the store did not take the run or its model.
    """
    tracker = RunTracker(run_dir, uri=uri)
    tracker.finish(with_model=True)
    if tracker.model_uri is None or tracker.run_id is None:
        raise RunError(f"{run_dir}: cannot be promoted, since its model is not in the store")
    with Store(uri).opened(FINAL_LOCK_PATIENCE_SECONDS) as client:
        run = client.get_run(tracker.run_id)
        return _champion(client, run, tracker.model_uri, description.experiment_name(RunFolder(run_dir)), reason)


def _champion(client: MlflowClient, run: Run, uri: str, experiment: str, reason: str) -> str:
    name = description.registered_name(experiment)
    version = model.register(client, run, uri, name)
    others = [line for line in (version.description or "").splitlines() if not line.startswith(_CHOSEN)]
    client.update_model_version(name, version.version, "\n".join([_CHOSEN + reason, *others]))
    client.set_registered_model_alias(name, CHAMPION, version.version)
    return f"models:/{name}/{version.version}"
