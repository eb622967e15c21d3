"""``protofl clean``: what can be made again goes, what cannot stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flcore.config.schema import Config
from pipelines.cli.app import main
from pipelines.execution.bodies import experiment
from pipelines.orchestration import background
from tests.pipelines.execution.test_bodies import SMALL, operation


def test_the_cache_and_old_logs_go_and_runs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another file in the cache's folder is nobody's to delete; a log of a server that runs is written to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROTOFL_CACHE", raising=False)
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    before = {path.name for path in Path("one").iterdir()}
    Path(".protofl/cache/notes.txt").write_text("mine")
    background.LOGS.mkdir(exist_ok=True)
    for name, size in (("follower", 3_000_000), ("mlflow", 1_000_000)):
        (background.LOGS / f"{name}.log").write_text("x" * size)
    log = str(background.LOGS / "mlflow.log")
    background.record([background.Service("mlflow", "http://x", os.getpid(), 0.0, log, 0)])
    monkeypatch.setattr(background, "is_running", lambda service: True)

    assert main(["clean"]) == 0
    assert 3 <= float(capsys.readouterr().out.split()[0]) < 4  # a log, and some small files of the cache
    assert [path.name for path in Path(".protofl/cache").iterdir()] == ["notes.txt"]
    assert [path.name for path in background.LOGS.iterdir()] == ["mlflow.log"]
    assert {path.name for path in Path("one").iterdir()} == before
    assert main(["clean"]) == 0
    assert capsys.readouterr().out.startswith("0.0 MB")
    # The data are prepared again, for a run that has finished too.
    assert experiment(Config.from_mapping(SMALL), Path("one"), operation()[0]).was_finished
    assert any(Path(".protofl/cache/prepared").iterdir())
