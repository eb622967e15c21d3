"""What a run says of the process that made it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flcore.config.schema import Config
from pipelines.runs.provenance import ROOT, environment, git_commit, source


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/env/bin/protofl", "compare", "--set", "tracking.uri=http://u:secret@h"], "protofl compare"),
        (["/env/bin/protofl", "stage", "train", "--out", "x"], "protofl stage train"),
        (["/project/pipelines/cli/__main__.py", "run"], "protofl run"),
        (["somewhere/my_script.py", "run"], "my_script.py"),
        (["-c"], "-c"),
        ([""], "python"),
    ],
)
def test_a_command_is_named_without_its_options(command: list[str], name: str) -> None:
    assert source(command, {}) == {"name": name, "type": "LOCAL"}


def test_a_run_that_a_worker_began_is_a_job() -> None:
    command = ["/env/lib/prefect/engine.py", "0d1e"]
    assert source(command, {"PREFECT__FLOW_RUN_ID": "0d1e"}) == {"name": "prefect deployment", "type": "JOB"}


def test_the_lock_is_found() -> None:
    found = environment(Config())
    assert len(found["lock_hash"]) == 64
    assert found["source"]["type"] == "LOCAL"


@pytest.mark.slow
def test_without_git_and_a_checkout_the_commit_is_that_of_the_image(tmp_path: Path) -> None:
    """As ``infra/Dockerfile`` lays it out: the packages, the lock, and a variable; no git anywhere on the path."""
    for package in ("flcore", "pipelines"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "papers"))
    (tmp_path / "infra").mkdir()
    shutil.copy(ROOT / "infra" / "requirements.lock", tmp_path / "infra")
    script = "from pipelines.runs.provenance import git_commit, lock_hash; print(git_commit(), lock_hash())"
    variables = {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path), "PROTOFL_COMMIT": "c0ffee"}
    done = subprocess.run([sys.executable, "-P", "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["c0ffee", environment(Config())["lock_hash"]]


def test_the_commit_is_known_in_a_checkout_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is not the owner of the mounted project: git calls that dubious and says nothing."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):  # which may allow this folder
        monkeypatch.setenv(name, os.devnull)
    expected = git_commit()
    if expected is None:
        pytest.skip("the code is no checkout")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    refused = subprocess.run(["git", "-C", str(ROOT), "describe", "--always"], capture_output=True, text=True, check=False)
    assert "dubious ownership" in refused.stderr
    assert git_commit() == expected
