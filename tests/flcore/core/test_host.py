"""Processes that are started import what is installed, and not what lies in the working folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flcore.core.host import python, safe_environment
from flcore.engine.pool.child import WorkerProcess, end_with_parent

OF_THE_STANDARD_LIBRARY = ("json", "queue", "random", "selectors")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is noted that a module of the working folder was imported."""
    monkeypatch.chdir(tmp_path)
    text = f"open({str(tmp_path / 'marker')!r}, 'a').write(__name__); raise RuntimeError(__name__)"
    for name in OF_THE_STANDARD_LIBRARY:
        (tmp_path / f"{name}.py").write_text(text)
    for name in ("flcore", "pipelines"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    return tmp_path / "marker"


def test_a_worker_imports_nothing_of_the_working_folder(marker: Path) -> None:
    child = WorkerProcess(end_with_parent)
    child.pipe.close()
    assert child.exit_status(30) in ("with exit code 0", "with exit code 1")  # the second: its parent was gone first
    assert not marker.exists()


def test_neither_does_a_process_that_a_started_one_starts(marker: Path) -> None:
    """As a server starts helpers, and Prefect's worker its flows."""
    names = ", ".join((*OF_THE_STANDARD_LIBRARY, "flcore"))
    inner = f"import {names}; print(flcore.__file__)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    done = subprocess.run(
        python("-c", outer),
        env=safe_environment({"MINE": "1"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
