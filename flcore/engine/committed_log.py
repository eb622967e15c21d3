"""Append-only ``history.jsonl`` and ``timing.jsonl`` of a run; bytes after the committed length are discarded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.core.errors import Cure, DataError
from flcore.io import disk
from flcore.io.files import append, json_text, read_lines, sealed, unsealed

NAMES = ("history.jsonl", "timing.jsonl")


@dataclass(frozen=True)
class CommittedLength:
    """Committed length in bytes by file, and the check sum of the history."""

    lengths: Mapping[str, int]
    check: int = 0


@dataclass
class CommittedLog:
    """The two files in a checkpoint's folder.

    Attributes:
        directory: the folder.
        committed: the committed length.
    """

    directory: Path
    committed: CommittedLength = CommittedLength({})

    def start(self) -> None:
        self.committed = CommittedLength(dict.fromkeys(NAMES, 0))

    def files(self) -> list[Path]:
        return [path for name in NAMES if (path := self.directory / name).exists()]

    def append(self, history: Mapping[str, Any] | None, timing: Mapping[str, Any]) -> CommittedLength:
        """Append a line each, and return the length to commit by setting :attr:`committed`."""
        records = {"history.jsonl": history, "timing.jsonl": sealed(timing)}
        lines = {name: json_text(record).encode() + b"\n" for name, record in records.items() if record is not None}
        before = self.committed
        lengths = {name: append(self.directory / name, line, at=before.lengths[name]) for name, line in lines.items()}
        check = zlib.crc32(lines.get("history.jsonl", b""), before.check)
        return CommittedLength({**before.lengths, **lengths}, check)

    def restore(self, evaluated: int, exchanges: int, check: int) -> None:
        """Drop lines that were never committed, one cut off by a kill included.

        Args:
            evaluated, exchanges: committed lines of history and timing.
            check: expected check sum of the history.

        Raises:
            DataError: the committed lines are damaged.
        """
        history, timing = (self._truncate(name, n) for name, n in zip(NAMES, (evaluated, exchanges), strict=True))
        lengths = {"history.jsonl": len(history), "timing.jsonl": len(timing)}
        self.committed = CommittedLength(lengths, zlib.crc32(history))
        intact = all(unsealed(record) is not None for record in self._read("timing.jsonl"))
        if self.committed.check != check or not intact:
            raise DataError(f"{self.directory}: damaged, history or timing are not what was written; {Cure.START_OVER}")

    def read(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a file, oldest first; none if it is missing."""
        return [unsealed(record) or record for record in self._read(name)]

    def _read(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        return read_lines(path, Cure.START_OVER) if path.exists() else []

    def _truncate(self, name: str, count: int) -> bytes:
        """Truncate a file to its committed lines and return them."""
        path = self.directory / name
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        content = b"".join(lines[:count])
        if len(lines) < count or (content and not content.endswith(b"\n")):
            raise DataError(f"{path}: damaged, {count} lines were written; {Cure.START_OVER}")
        if len(lines) > count:
            disk.truncate(path, len(content))
        return content
