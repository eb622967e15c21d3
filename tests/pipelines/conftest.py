"""What the tests of several parts of the pipelines share: a fresh MLflow store."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs: making its tables takes seconds, copying the file none."""
    from pipelines.tracking.store import set_mlflow_environment

    set_mlflow_environment()
    from mlflow.tracking.client import MlflowClient

    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture
def fresh_store(tmp_path: Path, empty_store: Path) -> str:
    """Address of an empty store of the test's own."""
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    return f"sqlite:///{tmp_path / 'mlflow.db'}"
