"""Optuna's journal: a study's storage as one file of lines, which several processes share.

Optuna locks it by making a link beside it, which a killed process leaves behind for half a minute; ours is a lock that
ends with its process, and what that process left half written is taken off by the next one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from flcore.locks import take_lock


class _FileLock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        file = self._path.open("w")
        take_lock(file, wait=True)
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def open_journal(path: Path) -> JournalStorage:
    """Open a journal, making it where there is none.

    Args:
        path: of the file; its lock is beside it.

    Returns:
        The storage; as Optuna's, to be used by any thread.
    """
    lock = _FileLock(path.with_name(f".{path.name}.lock"))
    lock.acquire()
    try:
        _drop_half_a_line(path)
        backend = JournalFileBackend(str(path), lock_obj=lock)  # type: ignore[arg-type]
    finally:
        lock.release()
    return JournalStorage(backend)


def _drop_half_a_line(path: Path) -> None:
    """A last line without its end was never stored: whoever wrote it had no answer yet."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())
