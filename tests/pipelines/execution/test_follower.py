"""The follower: its subprocess is killed or fails, and the command ends as it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flcore import run
from flcore.core.errors import DataError, RunError
from pipelines.execution.follower import Follower

TINY = {
    "data": {"limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 1},
}


def kill(follower: Follower) -> int:
    """Its subprocess; returns the exit code."""
    process = follower._process
    assert process is not None and process.stdin is not None
    os.kill(process.pid, signal.SIGKILL)
    process.stdin.close()
    return process.wait()


def test_lines_that_cannot_be_printed_or_are_cut_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning that the terminal does not take, a report, and half a line of a killed process."""

    def refuse(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.chdir(tmp_path)
    with Follower(False, refuse) as follower:
        printed = """print('["say", "a store is away"]\\n["table", "done"]\\n["sto', end='')"""
        with subprocess.Popen([sys.executable, "-c", printed], stdout=subprocess.PIPE, text=True) as speaking:
            follower._listen(speaking)
        assert follower._reports == {"table": "done"}


def test_a_subprocess_that_is_killed_is_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while data are prepared, it still draws the run; a second death is an error, in each further wait too."""
    monkeypatch.chdir(tmp_path)
    run(TINY, "run")
    with Follower(False, print) as follower:
        follower.configure({"enabled": False})
        kill(follower)
        follower.finish(Path("run"))
        assert follower.wait() == {}
        assert Path("run/report.html").exists()
        monkeypatch.setattr(follower, "_exit_code", lambda: kill(follower))
        follower.finish(Path("run"))
        for _ in range(2):
            with pytest.raises(RunError, match="signal 9"):
                follower.wait()


def test_errors_are_printed_and_that_of_the_last_folder_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders that are no runs; files of the working folder are not taken for libraries meanwhile."""
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    text = f"open({str(marker)!r}, 'a').write(__name__); raise RuntimeError(__name__)"
    for name in ("json.py", "queue.py", "random.py", "pipelines.py", "flcore.py"):
        (tmp_path / name).write_text(text)
    said: list[str] = []
    with Follower(False, said.append) as follower:
        follower.configure({"enabled": False})
        for name in ("first", "last"):
            follower.finish(tmp_path / name)
        with pytest.raises(DataError, match="last"):
            follower.wait()
    [other] = said
    assert "first" in other and not marker.exists()
