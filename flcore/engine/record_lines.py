"""Append-only ``history.jsonl`` and ``timing.jsonl`` of a run; bytes after the committed length are discarded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from flcore.io import disk
from flcore.io.files import append, json_text, read_lines, sealed, unsealed

NAMES = ("history.jsonl", "timing.jsonl")


@dataclass(frozen=True)
class Ends:
    """Committed length in bytes by file, and the check sum of the history."""

    ends: Mapping[str, int]
    check: int = 0


@dataclass
class RecordLines:
    """The two files in a checkpoint's folder.

    Attributes:
        directory: the folder. cure: advice for errors.
        count: the committed length.
    """

    directory: Path
    cure: str
    count: Ends = Ends({})

    def start(self) -> None:
        self.count = Ends(dict.fromkeys(NAMES, 0))

    def files(self) -> list[Path]:
        return [path for name in NAMES if (path := self.directory / name).exists()]

    def add(self, history: Mapping[str, Any] | None, timing: Mapping[str, Any]) -> Ends:
        """Append a line each, and return the length to commit by setting :attr:`count`."""
        records = {"history.jsonl": history, "timing.jsonl": sealed(timing)}
        lines = {name: _line(record) for name, record in records.items() if record is not None}
        ends = {name: append(self.directory / name, line, at=self.count.ends[name]) for name, line in lines.items()}
        check = zlib.crc32(lines.get("history.jsonl", b""), self.count.check)
        return Ends({**self.count.ends, **ends}, check)

    def keep(self, evaluated: int, exchanges: int, check: int) -> None:
        """Drop lines that were never committed, one cut off by a kill included.

        Args:
            evaluated, exchanges: committed lines of the history and of the times.
            check: expected check sum of the history.

        Raises:
            DataError: they are not what was written.
        """
        history, times = (self._keep(name, count) for name, count in zip(NAMES, (evaluated, exchanges), strict=True))
        self.count = Ends({"history.jsonl": len(history), "timing.jsonl": len(times)}, zlib.crc32(history))
        whole = all(unsealed(record) is not None for record in self._read("timing.jsonl"))
        if self.count.check != check or not whole:
            raise DataError(f"{self.directory}: damaged, history or timing are not what was written; {self.cure}")

    def read(self, name: str) -> list[dict[str, Any]]:
        """The records of a file, oldest first; none where there is none."""
        return [unsealed(record) or record for record in self._read(name)]

    def _read(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        return read_lines(path, self.cure) if path.exists() else []

    def _keep(self, name: str, count: int) -> bytes:
        """Truncate a file to its committed lines and return them."""
        path = self.directory / name
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = b"".join(lines[:count])
        if len(lines) < count or (whole and not whole.endswith(b"\n")):
            raise DataError(f"{path}: damaged, {count} lines were written; {self.cure}")
        if len(lines) > count:
            disk.truncate(path, len(whole))
        return whole


def _line(record: Mapping[str, Any]) -> bytes:
    return json_text(record).encode() + b"\n"
