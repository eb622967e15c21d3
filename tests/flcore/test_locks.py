"""One process at a time works in a run's folder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flcore.errors import RunError
from flcore.locks import sole_use

ROOT = Path(__file__).resolve().parents[2]
HOLD = "import sys; from pathlib import Path; from flcore.locks import sole_use\n"
HOLD += "with sole_use(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_another_process_is_kept_out_until_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(RunError, match=r"run: another process is at work .* choose another folder"),
            sole_use(tmp_path / "run"),
        ):
            pass
        other.kill()
        other.wait()
        with sole_use(tmp_path / "run"):  # what a killed process held is free
            pass
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_that_was_renamed_meanwhile_takes_nobodys_lock_away(tmp_path: Path) -> None:
    """Under its old name there is another folder by now, and somebody in it."""
    run = tmp_path / "run"
    with sole_use(run):
        run.rename(tmp_path / "renamed")
        run.mkdir()
        (run / ".running").touch()
    assert (run / ".running").exists()


def test_a_failure_inside_lets_go(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), sole_use(tmp_path):
        raise ValueError("inside")
    with sole_use(tmp_path):
        assert (tmp_path / ".running").exists()


def test_two_are_never_inside_however_quickly_they_follow_each_other(tmp_path: Path) -> None:
    """A file that its last holder removes must not be held by one while the next holds a new one of that name."""
    inside, most, entries = 0, 0, 0
    guard = threading.Lock()

    def enter_often() -> None:
        nonlocal inside, most, entries
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            with contextlib.suppress(RunError), sole_use(tmp_path):
                with guard:
                    inside, entries = inside + 1, entries + 1
                    most = max(most, inside)
                time.sleep(0.0002)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=enter_often) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entries > 100
    assert most == 1
