"""MLflow: a run folder becomes an MLflow run, from the files on disk and from nothing else.

Results are written to disk first, so an unreachable store costs a warning and no result: ``protofl track DIR`` logs the
same folder later. :meth:`RunTracker.sync` may be called at any time by any process; it logs what the store lacks.

``.mlflow.json`` of a folder has its run id in each store, with the execution that it belongs to: a run that is
trained again, by other code or from its first round, is another MLflow run, and a copy of the folder is the same one.
It is the child of the first comparison or study that logged it; every comparison adds a tag.

A run that is trained has the time of its last sign of life as a tag. One without a sign for ten minutes has lost its
machine: the next process that begins a run in the experiment marks it as stopped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flcore.core.errors import DataError
from pipelines.addresses import without_password
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import TRACKED, read_json, write_json
from pipelines.tracking import description
from pipelines.tracking.artifacts import small_files
from pipelines.tracking.metrics import Point, marker, points_by_round, summary_points, times_of
from pipelines.tracking.run_status import ALIVE_TAG, FLOW_TAG, SILENT_HERE_MS, STOPPED_TAG, mark, mark_silent
from pipelines.tracking.store import Store, add_missing, existing_run, history_of, only_one_process

if TYPE_CHECKING:
    from mlflow.entities import Dataset, Run
    from mlflow.tracking.client import MlflowClient

    from pipelines.tracking.model import Prepared

PARENT_TAG = "mlflow.parentRunId"  # MLflow folds children under the run that it names

_FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""Variable of a flow's process."""

_ALIVE_EVERY_MS = 30_000
_NONE: Mapping[str, Any] = MappingProxyType({})

logger = logging.getLogger(__name__)


@dataclass
class _Target:
    """The MLflow run of a folder, and what it has."""

    run_id: str
    start_ms: int
    last_round: int
    is_finished: bool
    alive_ms: int


class RunTracker:
    """Logs a run folder to MLflow, live or afterwards; one process at a time logs a folder."""

    def __init__(
        self,
        run_dir: Path,
        *,
        uri: str | None,
        name: str | None = None,
        parent_run_id: str | None = None,
        extra_tags: Mapping[str, str] | None = None,
    ) -> None:
        """Remember what to log and where; nothing is read or contacted yet.

        Args:
            uri: the store; None for the result of :func:`~pipelines.tracking.store.resolve_uri`.
            name: of a new MLflow run; None for the usual one.
            parent_run_id: the MLflow run that shows this one below it, if none does yet.
        """
        self.run_dir = Path(run_dir)
        self._store = Store(uri)
        self._name, self._extra_tags = name, dict(extra_tags or {})
        self._parent_tag = {} if parent_run_id is None else {PARENT_TAG: parent_run_id}
        self._target: _Target | None = None
        self.model_uri: str | None = None
        """The logged model, for ``mlflow.pyfunc.load_model``; None before :meth:`finish` has found or logged one."""

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run; None before the first successful sync."""
        return self._target.run_id if self._target else None

    def sync(self, final: bool = False, *, system: Mapping[str, float] = _NONE) -> bool:
        """Log what the store lacks; a finished run that is logged stays as it is.

        Args:
            final: also log summary and files, and mark the run as finished, if there is a ``metrics.json``. Tries the
                store even during the pause after a failed live sync.
            system: the load of the machine that trains the run, by MLflow's names.

        Returns:
            True if the store has what the disk has, or another process is logging it. False if it did not respond:
            one warning is given, and all runs of this process leave that store alone for a while.

        Raises:
            DataError: the folder is no run, or its files are damaged. OSError: a file cannot be read.
        """
        return self._attempt(lambda client, run: self._sync(client, run, final, system=system), final=final)

    def finish(self, *, with_model: bool = False, register: bool = False) -> bool:
        """Log a finished run to its end, as :meth:`sync` does.

        Args:
            with_model: also its model (`pipelines/tracking/model.py`); one that cannot be made costs a warning.
            register: make the model a version of the registered model of the experiment (``digits-dirichlet``).

        Raises:
            DataError: the run has not finished, or as :meth:`sync`.
        """
        run = RunFolder(self.run_dir)
        if not run.is_finished:
            raise DataError(f"{self.run_dir}: the run has not finished; run the same command again to resume it")
        made = _prepared(run) if with_model else None
        return self._attempt(lambda client, run: self._sync(client, run, True, made, register), final=True)

    def mark_stopped(self, *, failed: bool, reason: str | None = None) -> bool:
        """Log what is there and mark the run as FAILED, or as KILLED; a later sync sets it running again.

        The reason is a tag until the run resumes. With one, this waits for another process that logs the run.
        """

        def stop(client: MlflowClient, run: RunFolder) -> None:
            self._sync(client, run, final=False)
            assert self._target is not None
            if not self._target.is_finished:
                status = "FAILED" if failed else "KILLED"
                mark(client, self._target.run_id, status, times_of(run).ended, reason)
                self._target = None

        return self._attempt(stop, final=True, wait=reason is not None)

    # ---- the MLflow run ------------------------------------------------------------------------------------------

    def _attempt(
        self, action: Callable[[MlflowClient, RunFolder], None], *, final: bool, wait: bool | None = None
    ) -> bool:
        """Apply ``action`` to the folder's content, unless another process logs it."""
        if self._store.is_pausing(final=final):
            return False
        run = RunFolder(self.run_dir)
        with only_one_process(run.files.config, wait=final if wait is None else wait) as is_ours:
            if not is_ours:
                return True
            done = self._store.attempt(lambda client: action(client, run), self.run_dir, final=final)
        if not done:
            self._target = None  # how much of the request arrived is asked next time
        return done

    def _sync(
        self,
        client: MlflowClient,
        run: RunFolder,
        final: bool,
        made: Prepared | None = None,
        register: bool = False,
        system: Mapping[str, float] = _NONE,
    ) -> None:
        now = time.time_ns() // 1_000_000
        target = self._target
        # After a pause another process may have marked it as stopped.
        if target is None or (not target.is_finished and now - target.alive_ms > SILENT_HERE_MS / 2):
            mlflow_run = self._find(client, run) or self._create(client, run, now)
            target = self._target = self._take_up(client, run, mlflow_run, now)
        if not target.is_finished:
            self._remember(run, target.run_id)  # its execution is known after the first round
            points = [point for _, those in points_by_round(run, target.last_round) for point in those]
            step = max(0, now - target.start_ms) // 1000
            points += [Point(f"system/{name}", value, now, step) for name, value in system.items()]
            if points or now - target.alive_ms > _ALIVE_EVERY_MS:
                _log_points(client, target.run_id, points, {ALIVE_TAG: str(now)})
                target.alive_ms = now
            target.last_round = max([target.last_round, *(record["round"] for record in run.history)])
        if final and run.is_finished and (made is not None or not target.is_finished):
            self._finish(client, run, target, made, register)

    def _find(self, client: MlflowClient, run: RunFolder) -> Run | None:
        """Return the MLflow run that the folder names, if it is of this execution and still exists."""
        known = self._known().get(self._address) or {}
        now = _execution(run)
        execution = dict(known.get("execution") or {})
        if {**execution, "began_ms": execution.get("began_ms") or now["began_ms"]} != now:
            return None
        return existing_run(client, str(known.get("run_id")))

    def _create(self, client: MlflowClient, run: RunFolder, now: int) -> Run:
        experiment_id = self._store.experiment_id(client, description.experiment_name(run))
        mark_silent(client, experiment_id, now)
        made = client.create_run(
            experiment_id,
            start_time=times_of(run).began,
            tags=description.tags(run) | self._extra_tags | self._parent_tag | {ALIVE_TAG: str(now)},
            run_name=self._name or description.run_name(run),
        )
        self._remember(run, made.info.run_id)
        return made

    def _take_up(self, client: MlflowClient, run: RunFolder, mlflow_run: Run, now: int) -> _Target:
        """Resume an MLflow run: add the tags and parameters that it lacks, and set it running."""
        parent = mlflow_run.data.tags.get(PARENT_TAG)
        has_parent = parent is not None and (not self._parent_tag or existing_run(client, parent) is not None)
        tags = self._extra_tags | ({} if has_parent else self._parent_tag)
        last_round = max((point.step for point in history_of(client, mlflow_run, marker(run))), default=-1)
        is_finished = mlflow_run.info.status == "FINISHED"
        target = _Target(mlflow_run.info.run_id, mlflow_run.info.start_time, last_round, is_finished, now)
        if is_finished:
            add_missing(client, mlflow_run, tags, {})
            return target
        origin = {name: value for name, value in description.origin(run).items() if name in mlflow_run.data.tags}
        flow_run = os.environ.get(_FLOW_RUN)
        tags |= {} if flow_run is None else {FLOW_TAG: flow_run}
        tags |= {name: value for name, value in description.tags(run).items() if name not in origin}
        add_missing(client, mlflow_run, tags | {ALIVE_TAG: str(now)}, description.parameters(run))
        if mlflow_run.info.status != "RUNNING":
            client.update_run(target.run_id, status="RUNNING")
        if STOPPED_TAG in mlflow_run.data.tags:
            client.delete_tag(target.run_id, STOPPED_TAG)
        return target

    def _finish(
        self, client: MlflowClient, run: RunFolder, target: _Target, made: Prepared | None, register: bool
    ) -> None:
        # Times come from the disk: what is sent again after a crash is the same point, which MLflow stores once.
        from pipelines.tracking import model

        logged = client.get_run(target.run_id)
        inputs = description.dataset_inputs(run)
        if not target.is_finished:
            client.log_inputs(target.run_id, inputs)
        self.model_uri = logged.data.tags.get(model.MODEL_URI_TAG)
        is_new = False
        if self.model_uri is None and made is not None:
            is_new = True
            self.model_uri = model.log(client, run, made, logged.info.experiment_id, target.run_id)
        if is_new or not target.is_finished:
            model_id = None if self.model_uri is None else self.model_uri.removeprefix("models:/")
            tags = description.made_from(run) | description.study_note(run)
            scored = next((entry.dataset for entry in inputs if entry.tags[0].value != description.TRAINING), None)
            _log_points(client, target.run_id, summary_points(run), tags, model_id, scored)
        if not target.is_finished:
            for path in small_files(self.run_dir):
                folder = path.relative_to(self.run_dir).parent.as_posix()
                client.log_artifact(target.run_id, str(path), None if folder == "." else folder)
            client.set_terminated(target.run_id, status="FINISHED", end_time=times_of(run).ended)
            target.is_finished = True
        if register and self.model_uri is not None:
            name = description.registered_name(description.experiment_name(run))
            model.register(client, client.get_run(target.run_id), self.model_uri, name)

    # ---- the folder ----------------------------------------------------------------------------------------------

    @property
    def _address(self) -> str:
        return without_password(self._store.uri)

    def _known(self) -> dict[str, Any]:
        file = self.run_dir / TRACKED
        return read_json(file) if file.exists() else {}

    def _remember(self, run: RunFolder, run_id: str) -> None:
        known, entry = self._known(), {"run_id": run_id, "execution": _execution(run)}
        if known.get(self._address) != entry:
            with suppress(OSError):  # a folder that cannot be written can be logged all the same
                write_json(self.run_dir / TRACKED, known | {self._address: entry})


def _prepared(run: RunFolder) -> Prepared | None:
    from pipelines.tracking import model

    try:
        return model.prepare(run)
    except DataError as error:
        logger.warning("tracking: a run is logged without its model (%s)", error)
        return None


def _execution(run: RunFolder) -> dict[str, Any]:
    """Return the identity of an execution of a run: its code, and the start of its first round."""
    began = run.legs[0].get("began_ms") if run.legs else None
    return {"config_hash": run.config_hash, "code": run.code, "began_ms": began}


def _log_points(
    client: MlflowClient,
    run_id: str,
    points: Sequence[Point],
    tags: Mapping[str, str] = _NONE,
    model_id: str | None = None,
    dataset: Dataset | None = None,
) -> None:
    """Log points in order; scores of the final model are linked to it, and to the data set that it was scored on."""
    from mlflow.entities import Metric, RunTag

    scored = {} if dataset is None else {"dataset_name": dataset.name, "dataset_digest": dataset.digest}
    link = scored | ({} if model_id is None else {"model_id": model_id})
    metrics = [
        Metric(point.name, point.value, point.time_ms, point.step, **(link if point.name.startswith("final/") else {}))
        for point in points
    ]
    client.log_batch(run_id, metrics=metrics, tags=[RunTag(name, value) for name, value in tags.items()])
