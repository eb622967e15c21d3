"""Optuna's journal: a study's storage as one file of lines, which several processes share.

Optuna locks it by making a link beside it, which a killed process leaves behind for half a minute; ours is a lock that
ends with its process. What a process that was killed, or whose disk was full, has left half written is taken off before
the next line is written: behind it, that line would be lost, and the study with it.

A file beside it says how long the journal was when a line was written last, and the check sum of so much of it: a value
that has changed since would lead the search elsewhere, and nobody would know.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from flcore.core.errors import DataError
from flcore.core.text import shorten
from flcore.io import disk
from flcore.io.files import append, replace_file
from flcore.io.locks import take_lock

_CURE = "put an intact copy there, or delete the study's folder and begin again"

_BLOCK_BYTES = 1 << 16


class _FileLock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: disk.LockFile | None = None

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
    """Optuna's file of lines, each of them written by :mod:`flcore.io.disk`."""

    def __init__(self, path: Path, lock: _FileLock) -> None:
        self._path, self._alone = path, lock
        self._alone.acquire()
        try:
            if not path.exists():
                disk.create(path).close()
            self._verify()
            _drop_half_a_line(path)
        finally:
            self._alone.release()
        super().__init__(str(path), lock_obj=lock)  # type: ignore[arg-type]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._alone.acquire()
        try:
            append(self._path, lines.encode(), at=_drop_half_a_line(self._path), durable=True)
            length, check = self._known()
            with self._path.open("rb") as file:
                file.seek(length)
                more = file.read()
            said = f"{length + len(more)} {zlib.crc32(more, check)}\n"
            replace_file(self._said, lambda file: file.write(said.encode()))
        finally:
            self._alone.release()

    @property
    def _said(self) -> Path:
        return self._path.with_name(f".{self._path.name}.check")

    def _known(self) -> tuple[int, int]:
        """Length and check sum that were written last; of nothing where nobody has."""
        text = self._said.read_bytes()[:40].decode("ascii", "replace") if self._said.is_file() else ""
        found = re.fullmatch(r"([0-9]{1,15}) ([0-9]{1,15})\n", text)  # cut off, as by a power failure, it says nothing
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def _verify(self) -> None:
        """Compare the journal with what was said of it.

        Raises:
            DataError: it has changed.
        """
        length, check = self._known()
        content = self._path.read_bytes() if self._path.is_file() else b""
        if zlib.crc32(content[:length]) != check:
            raise DataError(f"{self._path}: damaged, its content is not what was written; {_CURE}")


def open_journal(path: Path) -> JournalStorage:
    """Open a journal, making it where there is none.

    Args:
        path: of the file; its lock is beside it.

    Returns:
        The storage; as Optuna's, to be used by any thread.

    Raises:
        DataError: it is damaged.
    """
    backend = _Backend(path, _FileLock(path.with_name(f".{path.name}.lock")))
    try:
        return JournalStorage(backend)
    # Optuna carries a journal's lines out as they stand there; a wrong one is whatever it trips over.
    except Exception as error:
        reason = shorten(f"{type(error).__name__}: {error}")
        raise DataError(f"{path}: damaged ({reason}); {_CURE}") from error


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
        disk.truncate(path, length)
    return length
