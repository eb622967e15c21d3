"""Optuna's journal: a study's storage as one file of lines, which several processes share.

Optuna locks it by making a link beside it, which a killed process leaves behind for half a minute; ours is a lock that
ends with its process. What a process that was killed, or whose disk was full, has left half written is taken off before
the next line is written: behind it, that line would be lost, and the study with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from flcore import disk
from flcore.files import append
from flcore.locks import take_lock

_BLOCK_BYTES = 1 << 16


class _FileLock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        file = disk.open_lock(self._path)
        take_lock(file, wait=True)
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _Backend(JournalFileBackend):
    """Optuna's file of lines, each of them written by :mod:`flcore.disk`."""

    def __init__(self, path: Path, lock: _FileLock) -> None:
        self._path, self._alone = path, lock
        self._alone.acquire()
        try:
            if not path.exists():
                disk.create(path).close()
            _drop_half_a_line(path)
        finally:
            self._alone.release()
        super().__init__(str(path), lock_obj=lock)  # type: ignore[arg-type]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._alone.acquire()
        try:
            append(self._path, lines.encode(), at=_drop_half_a_line(self._path), durable=True)
        finally:
            self._alone.release()


def open_journal(path: Path) -> JournalStorage:
    """Open a journal, making it where there is none.

    Args:
        path: of the file; its lock is beside it.

    Returns:
        The storage; as Optuna's, to be used by any thread.
    """
    return JournalStorage(_Backend(path, _FileLock(path.with_name(f".{path.name}.lock"))))


def _drop_half_a_line(path: Path) -> int:
    """Take off a last line without its end, which was never stored: whoever wrote it had no answer yet.

    Returns:
        The length of the file.
    """
    length = path.stat().st_size
    with path.open("rb") as file:
        while length > 0:  # seldom more than once: a line is short
            begin = max(0, length - _BLOCK_BYTES)
            file.seek(begin)
            ends = file.read(length - begin).rfind(b"\n") + 1
            if ends:
                length = begin + ends
                break
            length = begin
    if length < path.stat().st_size:
        disk.cut(path, length)
    return length
