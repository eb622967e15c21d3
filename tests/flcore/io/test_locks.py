"""One process at a time works in a run's folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flcore.core.errors import RunError
from flcore.io import disk, locks
from flcore.io.locks import run_lock, take_lock

ROOT = Path(__file__).resolve().parents[3]
HOLD = "import sys; from pathlib import Path; from flcore.io.locks import run_lock\n"
HOLD += "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_another_process_is_kept_out_until_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(RunError, match=r"run: another process is at work .* choose another folder"),
            run_lock(tmp_path / "run"),
        ):
            pass
        other.kill()
        other.wait()
        with run_lock(tmp_path / "run"):  # what a killed process held is free
            pass
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_that_was_renamed_meanwhile_takes_nobodys_lock_away(tmp_path: Path) -> None:
    """Under its old name there is another folder by now, and somebody in it."""
    run = tmp_path / "run"
    with run_lock(run):
        run.rename(tmp_path / "renamed")
        run.mkdir()
        (run / ".running").touch()
    assert (run / ".running").exists()


def test_a_failure_inside_lets_go(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), run_lock(tmp_path):
        raise ValueError("inside")
    with run_lock(tmp_path):
        assert (tmp_path / ".running").exists()


def test_two_are_never_inside_however_quickly_they_follow_each_other(tmp_path: Path) -> None:
    """A file that its last holder removes must not be held by one while the next holds a new one of that name."""
    inside, most, entries = 0, 0, 0
    guard = threading.Lock()

    def enter_often() -> None:
        nonlocal inside, most, entries
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            with contextlib.suppress(RunError), run_lock(tmp_path):
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
    assert entries > 20
    assert most == 1


WITHOUT = "import fcntl, errno\ndef none(*_): raise OSError(errno.ENOLCK, 'No locks available')\nfcntl.flock = none\n"


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system as some networks have it."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "_warned_without_locks", [], raising=False)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_another_process_is_kept_out_until_it_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", WITHOUT + HOLD, str(run)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=rf"run: another process .*\(process {other.pid} on "), run_lock(run):
            pass
        other.kill()
        other.wait()
        with run_lock(run), pytest.raises(RunError, match=f"process {os.getpid()}"), run_lock(run):
            pass
    assert list(run.iterdir()) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has no locks" in caplog.text


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_process_of_another_machine_is_named_with_the_file_to_delete(tmp_path: Path) -> None:
    """Nobody here can know whether it has ended."""
    with run_lock(tmp_path):
        (holder,) = [path for path in tmp_path.iterdir() if path.stat().st_size]
        process, host, *began = holder.read_text().splitlines()
    holder.write_text(f"123\nfarm7\n{''.join(began)}\n")
    with pytest.raises(RunError) as caught, run_lock(tmp_path):
        pass
    assert all(part in str(caught.value) for part in ("farm7", "123", str(holder)))
    holder.unlink()
    with run_lock(tmp_path):
        pass
    holder.write_text(f"{process}\n{host}\n1\n")  # another process had this number
    with run_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_locks")
def test_without_locks_one_waits_for_the_other(tmp_path: Path) -> None:
    ended: list[str] = []

    def second() -> None:
        with disk.open_lock(tmp_path / "lock") as file:
            assert take_lock(file, wait=True)
            ended.append("second")

    with disk.open_lock(tmp_path / "lock") as first:
        assert take_lock(first, wait=True)
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        ended.append("first")
    thread.join()
    assert ended == ["first", "second"]
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
