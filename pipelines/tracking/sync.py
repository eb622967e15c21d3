"""MLflow: a run's folder becomes an MLflow run, from the files on disk and from nothing else.

Results are written to disk first, so an unreachable store costs a warning and no result: the same folder is logged
later with ``protofl track DIR``. :meth:`RunTracker.sync` may be called at any time, by any process, as often as one
likes; it logs what the store does not hold yet.

**Which MLflow run is it?** The one with the same configuration, data, partition and code (two hashes), whose values
agree: where the last logged round says something else than the disk (another class of processor), a new MLflow run
begins instead of a mixture of two. So a run is in MLflow once, however many comparisons it belongs to, and counts once
where accuracies are averaged or the best run is sought.

**Whose child is it?** MLflow keeps one parent per run: the comparison that was logged last, so that whoever looks at
what was just compared finds it whole. Earlier ones keep their tables, and each run a tag per comparison
(`pipelines/tracking/comparisons.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from flcore.core.errors import DataError
from flcore.experiment.run_folder import RunFiles
from pipelines.addresses import redact
from pipelines.runs.folder import RunFolder, read_folder
from pipelines.tracking import description
from pipelines.tracking.artifacts import small_files, without_tracking
from pipelines.tracking.metrics import Point, batches, marker, metrics_of, points_by_round, summary_points, times_of
from pipelines.tracking.store import (
    FINAL_LOCK_PATIENCE_SECONDS,
    LOCK_PATIENCE_SECONDS,
    METRICS_PER_REQUEST,
    Store,
    TrackingUnavailable,
    add_missing,
    history_of,
    only_one_process,
    runs_tagged,
    same_value,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking.client import MlflowClient

PARENT_TAG = "mlflow.parentRunId"  # MLflow's own name: its pages fold children under the run it names

_REASON = 1000  # characters: what a page shows of a tag

logger = logging.getLogger(__name__)


@dataclass
class _Target:
    """The MLflow run that a folder is logged to, and how far it is."""

    run_id: str
    last_round: int
    is_finished: bool


class RunTracker:
    """Logs one run's folder into MLflow: live while it grows, or afterwards.

    One process at a time logs a folder: another that tries meanwhile leaves it to the first.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        uri: str | None,
        parent_run_id: str | None = None,
        extra_tags: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember what to log and where; nothing is read or contacted yet.

        Args:
            run_dir: the run's folder; it needs to hold ``config.json`` when ``sync`` is called.
            uri: the store; None for what :func:`~pipelines.tracking.store.resolve_uri` finds.
            parent_run_id: the MLflow run under which this one is shown from now on, as in a study or a comparison.
            extra_tags: tags beside the run's own, such as ``{"study": "alpha-sweep"}``.
            clock: seconds that only grow; measures the pause after a failure.
        """
        self.run_dir = Path(run_dir)
        self._files = RunFiles(self.run_dir)
        self._store = Store(uri)
        self._given_tags = dict(extra_tags or {}) | ({} if parent_run_id is None else {PARENT_TAG: parent_run_id})
        self._clock = clock
        self._target: _Target | None = None

    @property
    def uri(self) -> str:
        """Address of the store, which may hold a password."""
        return self._store.uri

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run; None before the first successful sync."""
        return self._target.run_id if self._target else None

    @property
    def is_store_away(self) -> bool:
        """Whether the store did not take what it was sent last, by this process."""
        return self._store.outage.failures > 0

    def sync(self, final: bool = False) -> bool:
        """Log what is on disk and not in the store; a finished run that is logged already is left as it is.

        Args:
            final: also log summary and files, and mark the run as finished, provided that there is a ``metrics.json``.
                Tries the store even during the pause after a failed live sync.

        Returns:
            True if the store holds what the disk holds (or another process is busy logging it), False if it could not
            take it: then one warning is given, however many runs this process logs, and all of them leave that store
            alone for a while, longer after each failure.

        Raises:
            DataError: the folder is not a run, or its files are damaged.
        """
        if self._store.outage.is_pausing(self._clock(), final=final):
            return False
        return self._attempt(lambda client, run: self._sync(client, run, final), patient=final)

    def mark_stopped(self, *, failed: bool, reason: str | None = None) -> bool:
        """Log what is there and show the run as failed, or as interrupted; a later sync sets it running again.

        Args:
            failed: FAILED, else KILLED.
            reason: kept in a tag until the run goes on. Who gives one waits for another process that logs the run.
        """

        def stop(client: MlflowClient, run: RunFolder) -> None:
            self._sync(client, run, final=False)
            if self._target is not None and not self._target.is_finished:
                if reason is not None:
                    client.set_tag(self._target.run_id, description.STOPPED_TAG, redact(reason)[:_REASON])
                status = "FAILED" if failed else "KILLED"
                client.set_terminated(self._target.run_id, status=status, end_time=times_of(run).ended)
                self._target = None

        if self._store.outage.is_pausing(self._clock(), final=True):
            return False
        return self._attempt(stop, patient=reason is not None)

    def log_model(self, *, register: bool = False) -> str | None:
        """Log what the finished run answers with as a model, with signature and example; nothing is pickled.

        The global model, or where there is none the clients' own (`pipelines/tracking/model.py`). A run that is not
        logged to its end is so first; a model that is logged already is found again.

        Args:
            register: also make it a version of the registered model named after the experiment (``digits-dirichlet``).

        Returns:
            The model's URI for ``mlflow.pyfunc.load_model``; None if the store could not take it, if another process
            is busy logging this run, or after a warning if it cannot be put together: its data are not there any more,
            or the models of its clients are too large for a store.

        Raises:
            DataError: the run has not finished.
        """
        from pipelines.tracking import model

        if not self._files.metrics.exists():
            raise DataError(f"{self.run_dir}: the run has not finished, so there is no model to log yet")
        try:
            made = model.prepare(self.run_dir)
        except DataError as error:
            logger.warning("tracking: a run is logged without its model (%s)", error)
            return None
        logged: list[str] = []

        def log(client: MlflowClient, run: RunFolder) -> None:
            self._sync(client, run, final=True)
            if self._target is None:
                raise TrackingUnavailable("the store holds more rounds of this run than the disk")
            experiment_id = self._store.experiment_id(client, description.experiment_name(run))
            logged.append(model.log(client, run, made, experiment_id, self._target.run_id))
            if register:
                name = description.registered_name(description.experiment_name(run))
                model.register(client, client.get_run(self._target.run_id), logged[0], name)

        return logged[0] if self._attempt(log, patient=True) and logged else None

    def _attempt(self, action: Callable[[MlflowClient, RunFolder], None], *, patient: bool) -> bool:
        """Run ``action`` on what the disk says, with the store's errors turned into one warning."""
        patience = FINAL_LOCK_PATIENCE_SECONDS if patient else LOCK_PATIENCE_SECONDS
        try:
            with only_one_process(self._files.config, wait=patient) as is_ours:
                if not is_ours:
                    return True
                run = read_folder(self.run_dir)
                with self._store.opened(patience) as client:
                    action(client, run)
        except TrackingUnavailable as error:
            self._store.outage.note(self.uri, error, self.run_dir, self._clock(), final=patient)
            self._target = None  # how much of the failed request arrived is asked of the store next time
            return False
        self._store.outage.ended()
        return True

    def _sync(self, client: MlflowClient, run: RunFolder, final: bool) -> None:
        if self._target is None:
            self._target = self._find(client, run) or self._create(client, run)
        target = self._target
        last_on_disk = max((record["round"] for record in run.history), default=-1)
        if target.last_round > last_on_disk:
            # A run that was deleted and began again: nothing to add yet, and whether it repeats the results that were
            # logged shows when it has caught up.
            self._target = None
            return
        if target.is_finished and target.last_round == last_on_disk:
            return
        for last_round, points in batches(points_by_round(run, target.last_round), METRICS_PER_REQUEST):
            _log_points(client, target.run_id, points)
            target.last_round = last_round
        if final and run.metrics is not None:
            self._finish(client, run, target)

    def _find(self, client: MlflowClient, run: RunFolder) -> _Target | None:
        """The oldest MLflow run of this configuration and code whose logged values agree with the disk."""
        experiment_id = self._store.experiment_id(client, description.experiment_name(run))
        on_disk = {record["round"]: metrics_of(run, record) for record in run.history}
        known = {description.CONFIG_HASH_TAG: run.config_hash, description.CODE_TAG: run.code}
        for found in runs_tagged(client, experiment_id, known):
            last_round = max((point.step for point in history_of(client, found, marker(run))), default=-1)
            if last_round in on_disk:
                agrees = all(same_value(found.data.metrics.get(k), value) for k, value in on_disk[last_round].items())
            else:
                has_begun_again = run.metrics is None and last_round > max(on_disk, default=-1)
                agrees = last_round == -1 or has_begun_again
            if agrees:
                return self._take_up(client, run, found, last_round)
        return None

    def _create(self, client: MlflowClient, run: RunFolder) -> _Target:
        experiment_id = self._store.experiment_id(client, description.experiment_name(run))
        made = client.create_run(
            experiment_id,
            start_time=times_of(run).began,
            tags=description.tags(run) | self._given_tags,
            run_name=self._given_tags.get("mlflow.runName", description.run_name(run)),
        )
        return self._take_up(client, run, made, last_round=-1)

    def _take_up(self, client: MlflowClient, run: RunFolder, found: Run, last_round: int) -> _Target:
        """Go on with a found run: what its creation left out is added, and it is shown as running again."""
        target = _Target(found.info.run_id, last_round, found.info.status == "FINISHED")
        if target.is_finished:
            add_missing(client, found, self._given_tags, {})
            return target
        if last_round > max((record["round"] for record in run.history), default=-1):
            return target  # its folder was deleted: until it has caught up, nothing is added that would show it running
        kept = {name: value for name, value in description.origin(run).items() if name in found.data.tags}
        tags = {name: value for name, value in description.tags(run).items() if name not in kept}
        add_missing(client, found, tags | self._given_tags, description.parameters(run))
        if found.info.status != "RUNNING":
            client.update_run(target.run_id, status="RUNNING")
        if description.STOPPED_TAG in found.data.tags:
            client.delete_tag(target.run_id, description.STOPPED_TAG)
        return target

    def _finish(self, client: MlflowClient, run: RunFolder, target: _Target) -> None:
        # Times come from the disk: what is sent again after a crash is then the same point, which MLflow stores once.
        told = description.made_from(run) | description.study_note(run)
        _log_points(client, target.run_id, summary_points(run), told)
        client.log_inputs(target.run_id, description.dataset_inputs(run))
        for path in small_files(self.run_dir):
            folder = path.relative_to(self.run_dir).parent.as_posix()
            with without_tracking(path) as published:
                client.log_artifact(target.run_id, str(published), None if folder == "." else folder)
        client.set_terminated(target.run_id, status="FINISHED", end_time=times_of(run).ended)
        target.is_finished = True


def _log_points(
    client: MlflowClient, run_id: str, points: Sequence[Point], tags: Mapping[str, str] = MappingProxyType({})
) -> None:
    """In requests that a store takes whole or not at all: what marks a round as logged stands at the end of it."""
    from mlflow.entities import Metric, RunTag

    told = [RunTag(name, value) for name, value in tags.items()]
    for start in range(0, max(len(points), 1), METRICS_PER_REQUEST):
        some = points[start : start + METRICS_PER_REQUEST]
        metrics = [Metric(name, value, time_ms, step) for name, value, time_ms, step in some]
        client.log_batch(run_id, metrics=metrics, tags=told)
