"""An MLflow store: requests, runs, and warnings about failures.

MLflow takes three seconds to import, so this module imports it inside functions only.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flcore.core.errors import DataError, ProtoflError
from flcore.core.text import shorten
from flcore.io import disk
from flcore.io.locks import take_lock
from pipelines.addresses import folder_address, redact, remember, without_password

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking.client import MlflowClient

DEFAULT_URI = "sqlite:///mlruns/mlflow.db"
KINDS = ("", "databricks", "http", "https", "file", "sqlite", "postgresql", "mysql", "mssql")
"""What an address may begin with; of databases before the name of a driver, as in ``postgresql+psycopg2``."""
_RUNS_PER_REQUEST = 1000
# MLflow itself waits 20 s for a locked SQLite file at every statement; a live run should not stand still that long.
LOCK_PATIENCE_SECONDS = 5.0
FINAL_LOCK_PATIENCE_SECONDS = 20.0
_PAUSE_SECONDS = 60.0

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
    """Return the store to use: ``uri``, else the variable MLFLOW_TRACKING_URI, else SQLite in ``mlruns``.

    The path of a SQLite file is made absolute, so that a process which changes its directory keeps its store.
    """
    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    remember(chosen)
    database = sqlite_file(chosen)
    if database is None or "?" in str(database):  # which no such address can hold; it stays relative to that folder
        return chosen
    return "".join([f"sqlite:///{database}", *chosen.partition("?")[1:]])


def is_possible(uri: str) -> bool:
    """Return whether MLflow, or one of its plug-ins, knows the kind of an address; a plain word is one."""
    kind = urlsplit(uri).scheme.partition("+")[0]
    return kind in KINDS or any(kind == plugin.name for plugin in entry_points(group="mlflow.tracking_store"))


def no_store(uri: str) -> str:
    """Return the message for an impossible address."""
    return f"{without_password(uri)} is the address of no store: it begins with none of {', '.join(KINDS[2:])}"


def ui_command(uri: str | None) -> str:
    """Return how to look at a store: a shell command, or the address of a running server."""
    chosen = resolve_uri(uri)
    if chosen.startswith(("http://", "https://")):
        return without_password(chosen)
    database = sqlite_file(chosen)
    if database is not None and database.is_relative_to(Path.cwd()):
        chosen = f"sqlite:///{database.relative_to(Path.cwd())}"
    return f"mlflow ui --workers 1 --backend-store-uri {shlex.quote(without_password(chosen))}"


def sqlite_file(uri: str) -> Path | None:
    """Return the absolute path of a SQLite store's file; None for other stores."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix).partition("?")[0]).absolute() if uri.startswith(prefix) else None


_PAUSES: dict[tuple[str, bool], float] = {}
"""By address of a store that did not respond, and whether a request is final: when to try again."""


class Store:
    """An MLflow store at an address; nothing is contacted before a request."""

    def __init__(self, uri: str | None) -> None:
        """Use ``uri``, or the result of :func:`resolve_uri` if it is None."""
        self.uri = resolve_uri(uri)

    def is_pausing(self, *, final: bool) -> bool:
        """Return whether it is too early to try again; a final attempt waits only for an earlier final one."""
        return monotonic() < _PAUSES.get((self.uri, final), -math.inf)

    def attempt(self, action: Callable[[MlflowClient], object], directory: Path, *, final: bool) -> bool:
        """Call ``action`` with a client; return False if the store did not respond, after one warning per outage.

        The warning names the folder to log later. A final attempt waits longer for a locked SQLite file.
        """
        try:
            with self.opened(FINAL_LOCK_PATIENCE_SECONDS if final else LOCK_PATIENCE_SECONDS) as client:
                action(client)
        except TrackingUnavailable as error:
            if (self.uri, False) not in _PAUSES:
                happened, address = f"{without_password(self.uri)} did not take the results ({error})", self.uri
                if not is_possible(self.uri):
                    happened, address = f"{no_store(self.uri)}; nothing was logged", "ADDRESS"
                logger.warning(
                    "tracking: %s; results are on disk, log them later with: protofl track %s --uri %s",
                    happened,
                    shlex.quote(str(directory)),
                    shlex.quote(without_password(address)),  # its origin may be a --set of this command
                )
            _PAUSES.update({(self.uri, each): monotonic() + _PAUSE_SECONDS for each in {False, final}})
            return False
        for each in (False, True):
            _PAUSES.pop((self.uri, each), None)
        return True

    @contextmanager
    def opened(self, patience_seconds: float) -> Iterator[MlflowClient]:
        """Open a client.

        MLflow wraps what it foresees in MlflowException. Opening a database raises SQLAlchemy's own errors, a missing
        database driver ImportError, an address that is none ValueError, uploading files OSErrors of `requests`.

        Args:
            patience_seconds: how long a SQLite file may stay locked.

        Raises:
            TrackingUnavailable: any of these, without MLflow's logs and without the store's password.
            OSError: a file of a run, or another one outside the store, cannot be read or written.
        """
        set_mlflow_environment()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        noisy = [logging.getLogger(name) for name in ("mlflow", "alembic", "urllib3.connectionpool")]
        levels = [source.level for source in noisy]
        for source in noisy:
            source.setLevel(logging.CRITICAL)
        try:
            self._refuse_locked_file(patience_seconds)
            from mlflow.tracking.client import MlflowClient

            yield MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        except (MlflowException, SQLAlchemyError, sqlite3.Error, ImportError, OSError, ValueError) as error:
            if isinstance(error, OSError) and not self._is_own(error):
                raise
            first_line = redact(str(error).strip()).partition("\n")[0]
            # Not chained: a traceback would repeat what the message leaves out.
            raise TrackingUnavailable(first_line[:200] or type(error).__name__) from None
        finally:
            for source, level in zip(noisy, levels, strict=True):
                source.setLevel(level)

    def _is_own(self, error: OSError) -> bool:
        """Return whether an error is the store's: of a connection, or of its own files."""
        names = [name for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        database = sqlite_file(self.uri)
        if not names or database is None:
            return not names
        paths, artifacts = [Path(os.fsdecode(name)).absolute() for name in names], database.parent / "artifacts"
        return any(path.is_relative_to(artifacts) or database.is_relative_to(path) for path in paths)

    def _refuse_locked_file(self, patience_seconds: float) -> None:
        """Fail early on a SQLite file that cannot be written: MLflow would retry for minutes before it says so."""
        database = sqlite_file(self.uri)
        if database is None:
            return
        disk.make_folder(database.parent)
        if database.exists():
            with closing(sqlite3.connect(database, timeout=patience_seconds)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.rollback()

    def experiment_id(self, client: MlflowClient, name: str) -> str:
        """Return the experiment of a name; create it if missing.

        Raises:
            TrackingUnavailable: it was deleted. DataError: its name leads out of the folder of artifacts.
        """
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            if name.startswith("/") or ".." in name.split("/"):  # as a run's config.json may say that somebody sent
                raise DataError(f"experiment {shorten(name)}: a name of data or partition that leads out of the store")
            database = sqlite_file(self.uri)
            # Beside the database; a server has its own place for artifacts and must choose it itself.
            location = None if database is None else folder_address(database.parent / "artifacts" / name)
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


def all_runs(client: MlflowClient, experiment_id: str, filter_string: str, **order: Any) -> list[Run]:
    """Return all runs of an experiment that a filter finds, however many; MLflow answers a page at a time."""
    runs: list[Run] = []
    token = None
    while token != "":
        page = client.search_runs(
            [experiment_id], filter_string, max_results=_RUNS_PER_REQUEST, page_token=token, **order
        )
        runs += page
        token = page.token or ""
    return runs


def existing_run(client: MlflowClient, run_id: str) -> Run | None:
    """Return a run; None if it was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return None if run.info.lifecycle_stage == "deleted" else run


def add_missing(client: MlflowClient, run: Run, tags: Mapping[str, str], params: Mapping[str, str]) -> None:
    """Give a run the tags and parameters that it has not, or has otherwise; a parameter once logged stays."""
    from mlflow.entities import Param, RunTag

    new_tags = [RunTag(name, value) for name, value in tags.items() if run.data.tags.get(name) != value]
    new_params = [Param(name, value) for name, value in params.items() if name not in run.data.params]
    client.log_batch(run.info.run_id, params=new_params, tags=new_tags)


def history_of(client: MlflowClient, run: Run, metric: str) -> list[Metric]:
    """Return the history of a metric; some servers refuse a metric that a run never logged."""
    return list(client.get_metric_history(run.info.run_id, metric)) if metric in run.data.metrics else []


@contextmanager
def only_one_process(file: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock on a file that ends with the process, however it ends.

    Yields:
        False if another process holds it and ``wait`` is False.

    Raises:
        DataError: there is no such file, so its folder is not a run.
    """
    try:
        handle = disk.LockFile(file, "r+" if os.access(file, os.W_OK) else "r")
    except FileNotFoundError as error:
        raise DataError(f"{file.parent} is not a run: it has no {file.name}") from error
    with handle:
        yield take_lock(handle, wait=wait)
