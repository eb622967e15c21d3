"""MLflow: a run directory becomes an MLflow run, from the files on disk and from nothing else.

Results are written to disk first, so an unreachable store costs a warning and no result: the same directory is logged
later with ``protofl track DIR``. :meth:`RunTracker.sync` may be called at any time, by any process, as often as one
likes; it logs what the store does not hold yet. The MLflow run is found by the hash of its configuration and then
recognised by its values: where the last logged round says something else than the disk (code changed under the same
configuration), a new MLflow run begins instead of a mixture of two.

MLflow takes three seconds to import, so this module imports it inside functions only.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import re
import shlex
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flcore
from flcore import plugins
from flcore.errors import DataError, ProtoflError
from flcore.evaluation.continual import ACCURACIES
from flcore.locks import take_lock
from pipelines.runs.layout import RunFiles, read_json
from pipelines.tracking.addresses import without_password

if TYPE_CHECKING:
    import numpy as np
    from mlflow.entities import Metric, Run
    from mlflow.tracking.client import MlflowClient

DEFAULT_URI = "sqlite:///mlruns/mlflow.db"
CONFIG_HASH_TAG = "protofl.config_hash"
MODEL_URI_TAG = "protofl.model_uri"
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own name: its UI folds children under the run it names

# Logged for every round of every method, so its history says which rounds the store holds.
_MARKER = "comm/bytes_up"
_BATCH_METRICS = 1000  # limits of MLflow's log_batch
_BATCH_PARAMS = 100
_MAX_ARTIFACT_BYTES = 32 * 2**20
_FIRST_BACKOFF_SECONDS = 60.0
_LONGEST_BACKOFF_SECONDS = 900.0
# MLflow itself waits 20 s for a locked SQLite file at every statement; a live run should not stand still that long.
_LOCK_PATIENCE_SECONDS = 5.0
_FINAL_LOCK_PATIENCE_SECONDS = 20.0

_ROUND_METRICS = {
    "top1_global": "accuracy/top1_global",
    "mean_local": "accuracy/mean_local",
    "pooled_local": "accuracy/pooled_local",
    "client_std": "accuracy/client_std",
    "loss_global": "loss/global",
}
_SUMMARY_METRICS = {
    "top1_global": "final/top1_global",
    "mean_local": "final/mean_local",
    "pooled_local": "final/pooled_local",
    "last10_top1_global": "final/last10_top1_global",
    "best_top1_global": "best/top1_global",
    "best_round": "best/round",
    "bytes_up": "comm/total_bytes_up",
    "bytes_down": "comm/total_bytes_down",
    "scalars_up_per_round": "comm/scalars_up_per_round",
    "num_parameters": "model/num_parameters",
}
_TASK_SUMMARIES = ("forgetting", "backward_transfer", "roundwise_forgetting")
# What a logged model needs where it is served; the versions are those of this environment.
_MODEL_REQUIREMENTS = ("mlflow", "numpy", "safetensors", "scikit-learn", "scipy", "torch", "torchvision")

logger = logging.getLogger(__name__)


class TrackingUnavailable(ProtoflError):  # noqa: N818 - reads better where it is raised and caught
    """The tracking store could not be reached, is locked, or refused what was sent."""


def set_mlflow_environment() -> None:
    """Keep MLflow quiet, offline and quick to give up; call it before MLflow is imported.

    What the user has set stays.
    """
    defaults = {
        "DO_NOT_TRACK": "true",  # MLflow reads "true" and not "1"
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",  # a closed port then fails within two seconds
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_UV_AUTO_DETECT": "false",  # a uv.lock nearby must not start `uv export` when a model is logged
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def resolve_uri(uri: str | None) -> str:
    """The store to use: ``uri``, else the environment variable MLFLOW_TRACKING_URI, else SQLite below ``mlruns``.

    The path of a SQLite file is made absolute, so that a process which changes its directory keeps its store.
    """
    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    database = _sqlite_file(chosen)
    return chosen if database is None else f"sqlite:///{database}"


def ui_command(uri: str | None) -> str:
    """What to type to look at a store: a shell command, or for a running server the address to open in a browser."""
    chosen = resolve_uri(uri)
    if chosen.startswith(("http://", "https://")):
        return without_password(chosen)
    database = _sqlite_file(chosen)
    if database is not None and database.is_relative_to(Path.cwd()):
        chosen = f"sqlite:///{database.relative_to(Path.cwd())}"
    return f"mlflow ui --workers 1 --backend-store-uri {shlex.quote(without_password(chosen))}"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested configuration as MLflow parameters: keys joined by dots, lists as JSON, strings as they are.

    >>> flatten({"partition": {"alpha": 0.1, "sizes": [1, 2]}, "seed": 3})
    {'partition.alpha': '0.1', 'partition.sizes': '[1, 2]', 'seed': '3'}
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value)
    return flat


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says at this moment.

    Attributes:
        config: the resolved configuration, nested.
        config_hash: its SHA-256.
        environment: versions, CPU class, device, hashes of code and lock.
        history: one record per evaluated round, in order of rounds.
        metrics: the contents of ``metrics.json``; None while the run is not finished.
        timing: the contents of ``timing.json``, empty where there is none.
    """

    config: Mapping[str, Any]
    config_hash: str
    environment: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Any] | None
    timing: Mapping[str, Any]

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord:
        """Read a run directory, finished or not.

        Raises:
            DataError: ``config.json`` is missing, or a file is damaged.
        """
        files = RunFiles(run_dir)
        header = read_json(files.config)
        # Training writes its history last; until then the one it works on is with the checkpoint.
        is_trained = files.history.exists()
        return cls(
            config=header["config"],
            config_hash=header["config_hash"],
            environment=header.get("environment", {}),
            history=read_history(files.history if is_trained else files.checkpoint / files.history.name),
            metrics=read_json(files.metrics) if is_trained and files.metrics.exists() else None,
            timing=read_json(files.timing) if files.timing.exists() else {},
        )

    @property
    def experiment(self) -> str:
        """The experiment's name, ``<dataset>/<partition>``."""
        return f"{self.config['data']['name']}/{self.config['partition']['name']}"

    @property
    def run_name(self) -> str:
        """The run's name, ``<method>-s<seed>-<first 8 digits of the configuration's hash>``."""
        return f"{self.config['method']['name']}-s{self.config['seed']}-{self.config_hash[:8]}"

    def tags(self) -> dict[str, str]:
        """What the run is searched and grouped by; hashes of data and partition are known once it is finished."""
        known = {**self.environment, **(self.metrics or {})}
        code_version = str(known.get("code_version") or "")
        tags = {
            "method": self.config["method"]["name"],
            "seed": self.config["seed"],
            "engine": self.config.get("engine", {}).get("name"),
            "device": known.get("device"),
            "cpu_capability": known.get("cpu_capability"),
            "code_version": code_version,
            "lock_hash": known.get("lock_hash"),
            "partition_hash": known.get("partition_fingerprint"),
            "data_hash": known.get("data_fingerprint"),
            CONFIG_HASH_TAG: self.config_hash,
        }
        if re.fullmatch(r"[0-9a-f]{40}", code_version):
            tags["mlflow.source.git.commit"] = code_version
        return {name: str(value) for name, value in tags.items() if value not in (None, "")}


def read_history(path: Path) -> list[dict[str, Any]]:
    """The records of a ``history.jsonl`` in order of rounds; a last line that is still being written is left out.

    Raises:
        DataError: a line before the last is damaged.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    by_round: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # also an incomplete UTF-8 character
            if number == len(lines):
                break
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        by_round[record["round"]] = record
    return [by_round[round_number] for round_number in sorted(by_round)]


def round_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """One history record as MLflow metrics; what a method does not have (null) is left out."""
    metrics = _renamed(record, _ROUND_METRICS)
    metrics |= {f"loss/train_{term}": float(v) for term, v in (record.get("train_loss") or {}).items() if v is not None}
    tasks = record.get("tasks") or {}
    metrics |= {f"tasks/{name}": float(tasks[name]) for name in ACCURACIES if tasks.get(name) is not None}
    metrics |= {f"tasks/by_task_{task}": float(v) for task, v in enumerate(tasks.get("by_task") or ()) if v is not None}
    for direction in ("bytes_up", "bytes_down"):
        by_kind = record.get(direction) or {}
        metrics[f"comm/{direction}"] = float(sum(by_kind.values()))
        metrics |= {f"comm/{direction}_{kind}": float(count) for kind, count in by_kind.items()}
    return metrics


def summary_metrics(metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> dict[str, float]:
    """What a finished run says once: ``final/...``, ``best/...``, ``comm/total_...``, ``time/total_...`` (seconds)."""
    summary = _renamed(metrics, _SUMMARY_METRICS)
    tasks = metrics.get("tasks") or {}
    finals = {**{name: tasks.get(name) for name in _TASK_SUMMARIES}, **(tasks.get("last_epochs") or {})}
    summary |= {f"tasks/final_{name}": float(value) for name, value in finals.items() if value is not None}
    seconds = timing.get("seconds") or {}
    summary |= {f"time/total_{phase}": float(value) for phase, value in seconds.items() if value is not None}
    if timing.get("steps_per_second") is not None:
        summary["time/steps_per_second"] = float(timing["steps_per_second"])
    return summary


@dataclass
class _Target:
    """The MLflow run that a directory is logged to, and how far it is."""

    run_id: str
    started_ms: int
    last_round: int
    is_finished: bool


class RunTracker:
    """Logs one run directory into MLflow: live while it grows, or afterwards.

    One process at a time logs a directory: another that tries meanwhile leaves it to the first.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        uri: str | None,
        parent_run_id: str | None = None,
        extra_tags: Mapping[str, str] | None = None,
        minimum_interval_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember what to log and where; nothing is read or contacted yet.

        Args:
            run_dir: the run's directory; it needs to hold ``config.json`` when ``sync`` is called.
            uri: the store; None for MLFLOW_TRACKING_URI or the default (see :func:`resolve_uri`).
            parent_run_id: the MLflow run under which this one is shown, as in a study or a comparison.
            extra_tags: tags beside the run's own, such as ``{"study": "alpha-sweep"}``.
            minimum_interval_seconds: the least time between two syncs of :meth:`maybe_sync`.
            clock: seconds that only grow; measures the pause after a failure.
        """
        self.run_dir = Path(run_dir)
        self._files = RunFiles(self.run_dir)
        self.uri = resolve_uri(uri)
        self._parent_run_id = parent_run_id
        self._extra_tags = dict(extra_tags or {})
        self._minimum_interval = minimum_interval_seconds
        self._clock = clock
        self._target: _Target | None = None
        self._last_live_sync: float | None = None
        self._failures = 0
        self._retry_at = -math.inf

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run; None before the first successful sync."""
        return self._target.run_id if self._target else None

    def maybe_sync(self, now: float) -> bool:
        """Call after every round: syncs when the last sync is long enough ago, which for a short run is never.

        Args:
            now: the time in seconds, from any clock that only grows.

        Returns:
            False if the store was tried and could not take the results.
        """
        if self._last_live_sync is None:
            self._last_live_sync = now
        if now - self._last_live_sync < self._minimum_interval:
            return True
        self._last_live_sync = now
        return self.sync()

    def sync(self, final: bool = False) -> bool:
        """Log what is on disk and not in the store; a finished run that is logged already is left as it is.

        Args:
            final: also log summary, times and files, and mark the run as finished, provided that there is a
                ``metrics.json``. Tries the store even during the pause after a failure.

        Returns:
            True if the store holds what the disk holds (or another process is busy logging it), False if it could not
            take it: then one warning is given, and live syncs pause for a while, longer after each failure.

        Raises:
            DataError: the directory is not a run, or its files are damaged.
        """
        if not final and self._clock() < self._retry_at:
            return False
        return self._attempt(lambda record: self._sync(record, final), patient=final)

    def mark_stopped(self, *, failed: bool) -> bool:
        """Log what is there and show the run as failed, or as interrupted; a later sync sets it running again."""

        def stop(record: RunRecord) -> None:
            self._sync(record, final=False)
            if self._target is not None and not self._target.is_finished:
                self._client().set_terminated(self._target.run_id, status="FAILED" if failed else "KILLED")
                self._target = None

        return self._attempt(stop, patient=False)

    def log_model(self, *, dataset: Path | None = None, register: bool = False) -> str | None:
        """Log the final global model with signature and example, as code and safetensors: nothing is pickled.

        Call it after ``sync(final=True)``; a model that is logged already is found again.

        Args:
            dataset: the prepared data's ``meta.json``, which says how images look and are normalised; None looks for
                it (see :func:`find_dataset`).
            register: also make it a version of the registered model named after the experiment (``digits-dirichlet``).

        Returns:
            The model's URI for ``mlflow.pyfunc.load_model``; None if the store could not take it, or if another
            process is busy logging this run.

        Raises:
            DataError: the run has no global model, or a file that it is made from is missing or damaged.
        """
        model_files = {
            "config": self._files.config,
            "dataset": dataset or find_dataset(self.run_dir),
            "weights": self._files.model,
            "server": self._files.server,
        }
        if (self.run_dir / plugins.FOLDER).is_dir():
            model_files["plugins"] = self.run_dir / plugins.FOLDER
        example = _example(model_files)
        logged: list[str] = []

        def log(record: RunRecord) -> None:
            self._sync(record, final=True)
            if self._target is None:
                raise TrackingUnavailable("the store holds more rounds of this run than the disk")
            run_id = self._target.run_id
            logged.append(self._log_model(record, run_id, model_files, example))
            if register:
                self._register(record, run_id, model_uri=logged[0])

        return logged[0] if self._attempt(log, patient=True) and logged else None

    def _attempt(self, action: Callable[[RunRecord], None], *, patient: bool) -> bool:
        """Run ``action`` on what the disk says, with the store's errors turned into one warning."""
        try:
            with _only_one_process(self._files.config, wait=patient) as is_ours:
                if not is_ours:
                    return True
                record = RunRecord.read(self.run_dir)
                with _store_errors():
                    self._check_store(_FINAL_LOCK_PATIENCE_SECONDS if patient else _LOCK_PATIENCE_SECONDS)
                    action(record)
        except TrackingUnavailable as error:
            self._note_failure(error)
            return False
        self._failures, self._retry_at = 0, -math.inf
        return True

    def _note_failure(self, error: TrackingUnavailable) -> None:
        if self._failures == 0:
            logger.warning(
                "tracking: %s did not take the results (%s); they are on disk, log them later with: protofl track %s",
                without_password(self.uri),
                error,
                shlex.quote(str(self.run_dir)),
            )
        pause = min(_FIRST_BACKOFF_SECONDS * 2**self._failures, _LONGEST_BACKOFF_SECONDS)
        self._failures += 1
        self._retry_at = self._clock() + pause
        self._target = None  # how much of the failed request arrived is asked of the store next time

    def _check_store(self, patience_seconds: float) -> None:
        """Fail early on a SQLite file that cannot be written: MLflow would retry for minutes before it says so."""
        database = _sqlite_file(self.uri)
        if database is None:
            return
        database.parent.mkdir(parents=True, exist_ok=True)
        if database.exists():
            with closing(sqlite3.connect(database, timeout=patience_seconds)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.rollback()

    def _client(self) -> MlflowClient:
        from mlflow.tracking.client import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def _sync(self, record: RunRecord, final: bool) -> None:
        client = self._client()
        if self._target is None:
            self._target = self._find(client, record) or self._create(client, record)
        target = self._target
        known_rounds = [entry["round"] for entry in record.history]
        if target.last_round > max(known_rounds, default=-1):
            # A run that was deleted and began again: nothing to add yet, and whether it repeats the results that were
            # logged shows when it has caught up.
            self._target = None
            return
        new = [entry for entry in record.history if entry["round"] > target.last_round]
        if target.is_finished and not new:
            return
        for batch in _batches_of_whole_rounds(new):
            client.log_batch(target.run_id, metrics=batch)
            target.last_round = batch[-1].step
        if final and record.metrics is not None:
            self._finish(client, record, record.metrics, target)

    def _experiment_id(self, client: MlflowClient, name: str) -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            database = _sqlite_file(self.uri)
            # Beside the database; a server has its own place for artifacts and must choose it itself.
            location = None if database is None else str(database.parent / "artifacts" / name)
            try:
                return client.create_experiment(name, artifact_location=location)
            except MlflowException as error:
                experiment = client.get_experiment_by_name(name)
                if error.error_code != "RESOURCE_ALREADY_EXISTS" or experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            restore = f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
            raise TrackingUnavailable(f"experiment {name} was deleted; bring it back with: {restore}")
        return str(experiment.experiment_id)

    def _find(self, client: MlflowClient, record: RunRecord) -> _Target | None:
        """The oldest MLflow run with this configuration whose logged values agree with the disk."""
        query = f"tags.`{CONFIG_HASH_TAG}` = '{record.config_hash}'"
        if self._parent_run_id is not None:
            query += f" and tags.`{PARENT_TAG}` = '{self._parent_run_id}'"
        experiment_id = self._experiment_id(client, record.experiment)
        on_disk = {entry["round"]: round_metrics(entry) for entry in record.history}
        for run in client.search_runs([experiment_id], query, order_by=["attributes.start_time ASC"]):
            if self._parent_run_id is None and PARENT_TAG in run.data.tags:
                continue
            last_round = max((point.step for point in _history(client, run, _MARKER)), default=-1)
            if last_round in on_disk:
                agrees = all(_same(run.data.metrics.get(key), value) for key, value in on_disk[last_round].items())
            else:
                has_begun_again = record.metrics is None and last_round > max(on_disk, default=-1)
                agrees = last_round == -1 or has_begun_again
            if agrees:
                return self._take_up(client, record, run, last_round)
        return None

    def _take_up(self, client: MlflowClient, record: RunRecord, run: Run, last_round: int) -> _Target:
        """Go on with a found run: what its creation left out is added, and it is shown as running again."""
        from mlflow.entities import Param, RunTag

        target = _Target(run.info.run_id, run.info.start_time, last_round, run.info.status == "FINISHED")
        if target.is_finished:
            return target
        tags = record.tags() | self._extra_tags
        new_tags = [RunTag(name, value) for name, value in tags.items() if run.data.tags.get(name) != value]
        client.log_batch(target.run_id, tags=new_tags)
        missing = [Param(k, v) for k, v in flatten(record.config).items() if k not in run.data.params]
        for start in range(0, len(missing), _BATCH_PARAMS):
            client.log_batch(target.run_id, params=missing[start : start + _BATCH_PARAMS])
        if run.info.status != "RUNNING":
            client.update_run(target.run_id, status="RUNNING")
        return target

    def _create(self, client: MlflowClient, record: RunRecord) -> _Target:
        tags = record.tags() | self._extra_tags
        if self._parent_run_id is not None:
            tags[PARENT_TAG] = self._parent_run_id
        experiment_id = self._experiment_id(client, record.experiment)
        run = client.create_run(experiment_id, tags=tags, run_name=record.run_name)
        return self._take_up(client, record, run, last_round=-1)

    def _finish(self, client: MlflowClient, record: RunRecord, metrics: Mapping[str, Any], target: _Target) -> None:
        from mlflow.entities import Metric

        # The time stamp is the run's start for all of these: a metric sent again after a crash is then the same metric,
        # which MLflow stores once.
        final_step = max(target.last_round, 0)
        points = [
            Metric(name, value, target.started_ms, final_step)
            for name, value in summary_metrics(metrics, record.timing).items()
        ]
        for entry in record.timing.get("rounds") or []:
            points += [
                Metric(f"{group}/{phase}", float(value), target.started_ms, entry["round"])
                for group, kind in (("time", "seconds"), ("energy", "joules"))
                for phase, value in (entry.get(kind) or {}).items()
            ]
        for start in range(0, len(points), _BATCH_METRICS):
            client.log_batch(target.run_id, metrics=points[start : start + _BATCH_METRICS])
        self._log_dataset(client, record, metrics, target.run_id)
        for path in small_files(self.run_dir):
            folder = path.relative_to(self.run_dir).parent.as_posix()
            client.log_artifact(target.run_id, str(path), None if folder == "." else folder)
        client.set_terminated(target.run_id, status="FINISHED")
        target.is_finished = True

    def _log_dataset(self, client: MlflowClient, record: RunRecord, metrics: Mapping[str, Any], run_id: str) -> None:
        from mlflow.entities import Dataset, DatasetInput

        digest = metrics.get("data_fingerprint")
        if digest is None:
            return
        source = json.dumps({"partition": metrics.get("partition_fingerprint")})
        # MLflow's digests have at most 36 characters; the whole one is the tag data_hash.
        dataset = Dataset(record.config["data"]["name"], str(digest)[:36], source_type="protofl", source=source)
        client.log_inputs(run_id, [DatasetInput(dataset, tags=[])])

    def _log_model(self, record: RunRecord, run_id: str, files: Mapping[str, Path], example: _Example) -> str:
        # The client's calls and not `mlflow.pyfunc.log_model`, which works on process-wide state (active run, store).
        import mlflow.pyfunc
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import Model, infer_signature

        client = self._client()
        known = client.get_run(run_id).data.tags.get(MODEL_URI_TAG)
        if known is not None:
            return known
        model = client.create_logged_model(
            self._experiment_id(client, record.experiment),
            name=record.run_name,
            source_run_id=run_id,
            model_type=record.config["model"]["name"],
        )
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            mlflow.pyfunc.save_model(
                path=str(folder),
                python_model=str(Path(__file__).with_name("serving.py")),
                artifacts={name: str(path) for name, path in files.items()},
                code_paths=[str(Path(flcore.__file__).parent)],
                signature=infer_signature(example.images, example.probabilities),
                input_example=example.images,
                # Given, because MLflow would otherwise load the model in a second process to find out.
                pip_requirements=[f"{name}=={_version(name)}" for name in _MODEL_REQUIREMENTS],
                mlflow_model=Model(
                    artifact_path=model.artifact_location,
                    run_id=run_id,
                    model_uuid=model.model_id,
                    model_id=model.model_id,
                ),
            )
            client.log_model_artifacts(model.model_id, str(folder))
        client.finalize_logged_model(model.model_id, "READY")
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        client.set_tag(run_id, MODEL_URI_TAG, model.model_uri)
        return str(model.model_uri)

    def _register(self, record: RunRecord, run_id: str, model_uri: str) -> None:
        from mlflow.exceptions import MlflowException

        client = self._client()
        name = record.experiment.replace("/", "-")  # the registry allows no slash
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        if not client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'"):
            # The place of the files and not `models:/<id>`, which a SQLite registry would look up in the store that is
            # the default of the process.
            model = client.get_logged_model(model_uri.removeprefix("models:/"))
            client.create_model_version(name, model.artifact_location, run_id, model_id=model.model_id)


def small_files(run_dir: Path) -> list[Path]:
    """The files of a run that MLflow keeps: all but weights, clients' states, checkpoints and very large ones."""
    layout = RunFiles(run_dir)
    skipped_folders = {layout.checkpoint.name, layout.clients.name}
    files = (path for path in sorted(run_dir.rglob("*")) if path.is_file())
    return [
        path
        for path in files
        if path.suffix != ".safetensors"
        and not any(part in skipped_folders or part.startswith(".") for part in path.relative_to(run_dir).parts)
        and path.stat().st_size <= _MAX_ARTIFACT_BYTES
    ]


def find_dataset(run_dir: Path) -> Path:
    """The ``meta.json`` of the data that a finished run was trained on, in a ``prepared`` folder in or above the run.

    Raises:
        DataError: there is none with the fingerprint that the run's metrics name.
    """
    fingerprint = read_json(RunFiles(run_dir).metrics).get("data_fingerprint")
    home = run_dir.absolute()
    # A comparison keeps its runs two levels below the data that they share.
    for folder in (home, *home.parents[:3]):
        described = folder / "prepared" / "meta.json"
        if described.exists() and read_json(described).get("fingerprint") == fingerprint:
            return described
    raise DataError(
        f"{run_dir}: its prepared data are not there, and a model cannot be logged without; run prepare again"
    )


@dataclass(frozen=True)
class _Example:
    """Images ``[N, C, H, W]`` and what the model answers to them, from which MLflow takes the signature."""

    images: np.ndarray
    probabilities: np.ndarray


def _example(model_files: Mapping[str, Path]) -> _Example:
    """Two blank images, scored here: a model that cannot be loaded is an error of the run, and not of the store.

    Raises:
        DataError: there is no global model, or a file is missing or damaged.
    """
    import numpy as np
    from safetensors import safe_open

    config, dataset = (read_json(model_files[name]) for name in ("config", "dataset"))
    weights = model_files["weights"]
    if weights.exists():
        with safe_open(weights, framework="numpy") as arrays:
            is_empty = not arrays.keys()
    if not weights.exists() or is_empty:
        raise DataError(f"{weights}: there is no global model; the method has none, or the run has not finished")
    set_mlflow_environment()
    from pipelines.tracking.serving import Predictor

    images = np.zeros((2, *dataset["shape"]), dtype=np.uint8)
    resolved = plugins.located(config["config"], model_files["config"].parent)
    return _Example(images, Predictor(resolved, dataset, weights, model_files["server"])(images))


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn what MLflow, its database or its artifact store raise into :class:`TrackingUnavailable`, without their logs.

    MLflow wraps what it foresees in MlflowException: refused or timed-out requests (INTERNAL_ERROR), a database that
    stays locked (TEMPORARILY_UNAVAILABLE), answers such as 403 (RestException). Opening a database raises SQLAlchemy's
    own errors, a missing database driver ImportError, uploading files those of `requests`, which are OSErrors.
    """
    set_mlflow_environment()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    noisy = [logging.getLogger(name) for name in ("mlflow", "alembic", "urllib3.connectionpool")]
    levels = [source.level for source in noisy]
    for source in noisy:
        source.setLevel(logging.CRITICAL)
    try:
        yield
    except (MlflowException, SQLAlchemyError, sqlite3.Error, ImportError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise TrackingUnavailable(first_line[:200] or type(error).__name__) from error
    finally:
        for source, level in zip(noisy, levels, strict=True):
            source.setLevel(level)


@contextmanager
def _only_one_process(file: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock that ends with the process, however it ends; yields False if another holds it and ``wait`` is False.

    Raises:
        DataError: there is no such file, so its directory is not a run.
    """
    try:
        handle = file.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{file.parent} is not a run: it has no {file.name}") from error
    with handle:
        yield take_lock(handle, wait=wait)


def _batches_of_whole_rounds(records: Iterable[Mapping[str, Any]]) -> Iterator[list[Metric]]:
    """Metrics in batches that MLflow stores whole or not at all, none of which ends inside a round."""
    from mlflow.entities import Metric

    now_ms = time.time_ns() // 1_000_000
    batch: list[Metric] = []
    for record in records:
        points = [Metric(name, value, now_ms, record["round"]) for name, value in round_metrics(record).items()]
        if batch and len(batch) + len(points) > _BATCH_METRICS:
            yield batch
            batch = []
        batch += points
    if batch:
        yield batch


def _history(client: MlflowClient, run: Run, metric: str) -> list[Metric]:
    """The history of a metric; asking for one that a run never logged is an error in some versions of the server."""
    return list(client.get_metric_history(run.info.run_id, metric)) if metric in run.data.metrics else []


def _same(stored: float | None, value: float) -> bool:
    return stored is not None and (stored == value or (math.isnan(stored) and math.isnan(value)))


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    return {name: float(values[key]) for key, name in names.items() if values.get(key) is not None}


def _sqlite_file(uri: str) -> Path | None:
    """The absolute path of a SQLite store's file; None for every other store."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).absolute() if uri.startswith(prefix) else None


def _version(package: str) -> str:
    """The installed version without its local part (``+cu130``), which only the index it came from knows."""
    return importlib.metadata.version(package).partition("+")[0]
