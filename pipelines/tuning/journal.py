"""Optuna's journal: a study's storage as one file of lines, which several processes share.

Optuna locks it by making a link beside it, which a killed process leaves behind for half a minute; ours is a lock that
ends with its process, and what that process left half written is taken off by the next one.

The file of the lock says how long the journal was when it was let go of last, and the check sum of so much of it: a
value that has changed since would lead the search elsewhere, and nobody would know.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import IO

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from flcore.errors import DataError
from flcore.locks import take_lock
from flcore.wording import brief

_CURE = "put an intact copy there, or delete the study's folder and begin again"


class _FileLock:
    """What Optuna holds while it appends to a journal."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._path = journal.with_name(f".{journal.name}.lock")
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        file = self._path.open("a+", encoding="utf-8")
        take_lock(file, wait=True)
        self._file = file
        return True

    def release(self) -> None:
        if self._file is None:
            return
        with self._file as file:
            length, check = self._known()
            content = self._journal.read_bytes() if self._journal.is_file() else b""
            if len(content) > length:
                file.truncate(0)
                file.write(f"{len(content)} {zlib.crc32(content[length:], check)}")
        self._file = None

    def verify(self) -> None:
        """Compare the journal with what was said of it; while the lock is held.

        Raises:
            DataError: it has changed.
        """
        length, check = self._known()
        content = self._journal.read_bytes() if self._journal.is_file() else b""
        if zlib.crc32(content[:length]) != check:
            raise DataError(f"{self._journal}: damaged, its content is not what was written; {_CURE}")

    def _known(self) -> tuple[int, int]:
        """Length and check sum that were written last; of nothing where nobody has."""
        assert self._file is not None
        self._file.seek(0)
        found = re.fullmatch(r"(\d{1,15}) (\d{1,15})", self._file.read(40))
        return (int(found[1]), int(found[2])) if found else (0, 0)


def open_journal(path: Path) -> JournalStorage:
    """Open a journal, making it where there is none.

    Args:
        path: of the file; its lock is beside it.

    Returns:
        The storage; as Optuna's, to be used by any thread.

    Raises:
        DataError: it is damaged.
    """
    lock = _FileLock(path)
    lock.acquire()
    try:
        lock.verify()
        _drop_half_a_line(path)
        backend = JournalFileBackend(str(path), lock_obj=lock)  # type: ignore[arg-type]
    finally:
        lock.release()
    try:
        return JournalStorage(backend)
    # Optuna carries a journal's lines out as they stand there; a wrong one is whatever it trips over.
    except Exception as error:
        reason = brief(f"{type(error).__name__}: {error}")
        raise DataError(f"{path}: damaged ({reason}); {_CURE}") from error


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
