"""Stores that are away, locked or broken, and what is told of them; passwords are told to nobody."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.utils.file_utils import local_file_uri_to_path
from sqlalchemy.engine import create_engine

from pipelines.orchestration import plans
from pipelines.runs.folder import RunFolder
from pipelines.tracking import store
from pipelines.tracking.backfill import log_folder
from pipelines.tracking.comparisons import log_comparison
from pipelines.tracking.store import KINDS, Store, is_possible, resolve_uri, sqlite_file, ui_command
from pipelines.tracking.sync import RunTracker

Write = Callable[..., Path]
Expected = Callable[..., dict[str, list[tuple[int, float]]]]
SECRET = "s3cr3t%2Fpass"


def closed_port() -> int:
    """A loopback port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_uri_explicit_over_environment_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(None) == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert ui_command(None) == "mlflow ui --workers 1 --backend-store-uri sqlite:///mlruns/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:5000")
    assert resolve_uri(None) == "http://user:secret@127.0.0.1:5000"
    assert ui_command(None) == "http://***@127.0.0.1:5000"
    assert resolve_uri("sqlite:///other.db?timeout=3") == f"sqlite:///{tmp_path}/other.db?timeout=3"


@pytest.mark.parametrize("module", ["store", "sync", "comparisons", "backfill", "model"])
def test_logging_imports_neither_torch_nor_mlflow_before_it_is_asked_to(module: str) -> None:
    """Torch takes two seconds of a processor, MLflow four."""
    script = f"import sys, pipelines.tracking.{module}; print([m for m in ('torch', 'mlflow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_store_that_is_away_costs_one_warning_and_little_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reader: Any, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(store, "monotonic", lambda: now[0])
    run_dir = write_run(tmp_path / "run", 2)
    away = f"http://127.0.0.1:{closed_port()}"
    trackers = [RunTracker(run_dir, uri=away) for _ in range(2)]
    began = time.perf_counter()
    assert not trackers[0].sync()
    assert time.perf_counter() - began < 8
    pause = time.perf_counter()
    for now[0] in (1.0, 59.0):
        assert not any(tracker.sync() for tracker in trackers)
    assert time.perf_counter() - pause < 0.1, "it tried again before the pause was over"
    now[0] = 61.0
    assert not trackers[1].sync()
    [message] = warnings_of(caplog)
    assert "\n" not in message
    assert message.endswith(f"protofl track {run_dir} --uri {away}")
    assert RunTracker(run_dir, uri=reader.uri).sync()
    assert len(reader.runs()) == 1


def test_of_an_address_that_can_be_no_store_it_is_said_that_another_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write_run: Write
) -> None:
    """Waiting does not cure it, and the same address is no cure."""
    run_dir = write_run(tmp_path / "run", 2, finished=True)
    assert not RunTracker(run_dir, uri="foo://me:hidden@bar").sync(final=True)
    [message] = warnings_of(caplog)
    assert message.startswith("tracking: foo://***@bar is the address of no store: it begins with none of http, https")
    assert message.endswith(f"protofl track {run_dir} --uri ADDRESS") and "did not take" not in message


def test_every_kind_of_address_that_mlflow_takes_is_possible() -> None:
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry

    assert set(_tracking_store_registry._registry) - set(KINDS) <= {"databricks-uc", "uc"}  # of its registry of models
    assert (
        is_possible("postgresql+psycopg2://host/runs") and is_possible("mlruns") and not is_possible("postgres://host")
    )


def test_a_comparison_whose_store_is_away_costs_one_warning_and_is_logged_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reader: Any, write_run: Write
) -> None:
    folder = tmp_path / "compared"
    runs = [write_run(folder / "runs" / f"fedavg-s{seed}", 2, finished=True, seed=seed) for seed in (3, 4)]
    described = [json.loads((run / "config.json").read_text())["config_hash"] for run in runs]
    (folder / "comparison.json").write_text(json.dumps({"runs": [{"config_hash": name} for name in described]}))
    away = f"http://127.0.0.1:{closed_port()}"
    assert not any(RunTracker(run, uri=away).sync(final=True) for run in runs)
    assert not log_comparison(folder, [RunFolder(run) for run in runs], away)
    assert len(warnings_of(caplog)) == 1

    assert not log_folder(folder, away)
    assert log_folder(folder, reader.uri)
    [parent] = [run for run in reader.runs() if run.info.run_name == "compared"]
    children = [run for run in reader.runs() if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert [child.info.run_name for child in children] == ["fedavg-s3-03fedavg", "fedavg-s4-04fedavg"]


def test_a_locked_database_is_given_up_soon_and_taken_up_later(
    tmp_path: Path,
    reader: Any,
    write_run: Write,
    expected_points: Expected,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "LOCK_PATIENCE_SECONDS", 0.2)
    tracker = RunTracker(write_run(tmp_path / "run", 2), uri=reader.uri)
    with contextlib.closing(sqlite3.connect(reader.uri.removeprefix("sqlite:///"))) as other:
        other.execute("BEGIN EXCLUSIVE")
        began = time.perf_counter()
        assert not tracker.sync()
        assert time.perf_counter() - began < 2
    assert "locked" in caplog.text
    write_run(tmp_path / "run", 3, finished=True)
    assert tracker.sync(final=True), "a final sync does not wait for the pause to end"
    assert reader.of_rounds(reader.runs()[0]) == expected_points(3)


@pytest.mark.parametrize("broken", ["nonsense://nowhere", "sqlite:///{dir}/file/mlflow.db", "sqlite:///{dir}"])
def test_a_store_that_cannot_be_opened_does_not_stop_training(tmp_path: Path, broken: str, write_run: Write) -> None:
    (tmp_path / "file").write_text("a file where a directory is needed")
    began = time.perf_counter()
    assert not RunTracker(write_run(tmp_path / "run", 1), uri=broken.format(dir=tmp_path)).sync()
    assert time.perf_counter() - began < 5


def test_a_deleted_experiment_is_said(
    tmp_path: Path, reader: Any, write_run: Write, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    assert RunTracker(run_dir, uri=reader.uri).sync()
    reader.client.delete_experiment(reader.client.get_experiment_by_name("digits/dirichlet").experiment_id)
    assert not RunTracker(run_dir, uri=reader.uri).sync()
    assert "mlflow experiments restore" in caplog.text


@pytest.mark.parametrize(
    "address",
    [
        "http://protofl:{secret}@127.0.0.1:{port}",
        "postgresql://protofl:{secret}@127.0.0.1:{port}/runs",
        "postgresql://127.0.0.1:{port}/runs?user=protofl&password={secret}",
        "mysql+pymysql://protofl:{secret}@127.0.0.1:{port}/runs",
        "sqlite://protofl:{secret}@/runs.db",
    ],
)
def test_the_password_of_a_store_that_is_away_is_told_to_nobody(
    address: str, tmp_path: Path, write_run: Write, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither as it stands in the address nor as a library decodes it; one warning, that says who did not answer."""
    run_dir = write_run(tmp_path / "run", 2, finished=True)
    uri = address.format(secret=SECRET, port=closed_port())
    with caplog.at_level(logging.DEBUG):
        assert not RunTracker(run_dir, uri=uri).sync(final=True)
    assert len(warnings_of(caplog)) == 1
    told = [caplog.text, *capfd.readouterr()]
    told += [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    for form in (SECRET, "s3cr3t/pass"):
        assert not any(form in text for text in told), f"{form} was told"


@pytest.mark.parametrize("folder", ["qa?1", "per%20cent", "%41", "a#b", "größe, two words"])
def test_the_store_is_in_the_folder_in_which_a_command_is_typed(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the folder is called: SQLAlchemy takes what follows `?` for options, MLflow `%41` for `A`."""
    home = tmp_path / "base" / folder
    (home / "mlruns").mkdir(parents=True)
    monkeypatch.chdir(home)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = resolve_uri(None)
    assert sqlite_file(uri) == home / "mlruns" / "mlflow.db"
    with create_engine(uri).connect() as connection:
        connection.exec_driver_sql("CREATE TABLE here (x)")
    assert (home / "mlruns" / "mlflow.db").stat().st_size > 0
    assert list((tmp_path / "base").iterdir()) == [home]
    places: list[str] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str, artifact_location: str) -> str:
            places.append(artifact_location)
            return "1"

    Store(None).experiment_id(Client(), "digits/iid")  # type: ignore[arg-type]
    places.append(plans.mlflow(5000, uri).environment["MLFLOW_ARTIFACTS_DESTINATION"] + "/digits/iid")
    assert [local_file_uri_to_path(place) for place in places] == [str(home / "mlruns/artifacts/digits/iid")] * 2
    database = plans.prefect(4200).environment.get("PREFECT_SERVER_DATABASE_CONNECTION_URL")
    if database is not None:
        (home / ".protofl" / "prefect").mkdir()
        with create_engine(database.replace("+aiosqlite", "")).connect() as connection:
            connection.exec_driver_sql("CREATE TABLE here (x)")
        assert (home / ".protofl" / "prefect" / "prefect.db").exists()
    assert (database is not None) == ("?" in folder) and list((tmp_path / "base").iterdir()) == [home]
