"""Faults of a disk, put in place of :mod:`flcore.io.disk`: they come at one operation of a process, counted from 1.

The content of a file is one operation, as where a buffer holds it back until the file is closed; torn, any share of it
may be there.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flcore.io import disk

KINDS = {
    "kill": "the process is killed after the operation",
    "tear": "the process is killed in the middle of the write",
    "full": "the disk is full from this operation on, in the middle of it if it writes",
    "broken": "the operation fails (EIO), later ones do not",
    "power": "the process is killed after the operation, and what was not synced is lost: contents, or names",
}
OPENED = ("create", "open_end")
OPERATIONS = (
    *OPENED,
    "new_folder",
    "create_new",
    "open_lock",
    "truncate",
    "sync",
    "rename",
    "link",
    "remove",
    "remove_folder",
)
TAKES_SPACE = {*OPENED, "new_folder", "create_new", "open_lock", "sync", "link", "write"}


@dataclass(frozen=True)
class Fault:
    """One fault of a process.

    Attributes:
        kind: of :data:`KINDS`.
        at: the operation, counted from 1.
        share: of the bytes of a torn write, how many are written; of power failures, below a half: contents are lost
            behind this share of each file, else names.
    """

    kind: str
    at: int
    share: float = 0.5

    def concerns(self, operation: str) -> bool:
        """Whether an operation can have this fault."""
        return {"tear": operation == "write", "full": operation in TAKES_SPACE}.get(self.kind, True)


class FaultyDisk:
    """The disk of this process, from :meth:`install` on."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.calls: list[str] = []
        self._unsynced: dict[Path, None] = {}  # files whose content a power failure would lose
        self._unnamed: list[tuple[Path, Callable[[], None]]] = []  # folders, and how they were before a rename

    def install(self) -> None:
        """Take the place of every operation."""
        for name in OPERATIONS:
            setattr(disk, name, self._in_place_of(name, getattr(disk, name)))

    def _in_place_of(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **keywords: Any) -> Any:
            path = arguments[-1]
            with_power = self.fault is not None and self.fault.kind == "power"
            if with_power and name in ("rename", "remove"):
                self._remember(name, arguments)
            result = self.step(name, path, lambda: original(*arguments, **keywords))
            return _File(self, path, result) if name in OPENED else result

        return operation

    def step(self, name: str, path: Any, act: Callable[[], Any], half: Callable[[float], Any] | None = None) -> Any:
        """One operation, with the fault if it is its turn.

        Args:
            name: of the operation. path: what it concerns; of a sync an open file.
            act: carries it out. half: carries out a share of it, where that is possible.
        """
        self.calls.append(name)
        fault, now = self.fault, len(self.calls)
        if fault is not None and fault.kind == "full" and now >= fault.at and name in TAKES_SPACE:
            if half is not None:
                half(fault.share)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *_named(path))
        if fault is None or now != fault.at:
            result = act()
            self._note(name, path)
            return result
        if fault.kind == "broken":
            raise OSError(errno.EIO, os.strerror(errno.EIO), *_named(path))
        if fault.kind == "tear":
            assert half is not None
            half(fault.share)
            _die()
        act()
        self._note(name, path)
        if fault.kind == "power":
            self._lose(fault.share)
        _die()

    def _note(self, name: str, path: Any) -> None:
        if self.fault is None or self.fault.kind != "power":
            return
        if name == "write":
            self._unsynced[Path(path).absolute()] = None
        elif name == "sync":
            synced = Path(f"/proc/self/fd/{path}").readlink()
            self._unsynced.pop(synced, None)
            self._unnamed = [entry for entry in self._unnamed if entry[0] != synced]

    def _remember(self, name: str, arguments: tuple[Any, ...]) -> None:
        """How to take back a name that a file is given, or has lost, while nobody has synced the folder."""
        if name == "remove":
            return  # a file that comes back is like one that a kill has left
        source, target = (Path(path).absolute() for path in arguments)
        if source.is_dir():
            self._unsynced = {
                target / path.relative_to(source) if source in path.parents else path: None for path in self._unsynced
            }
            return
        before = target.read_bytes() if target.exists() else None

        def take_back() -> None:
            if not target.parent.is_dir():  # removed since; as with a file, its removal is not taken back
                return
            if before is not None:
                target.write_bytes(before)
            else:
                target.unlink(missing_ok=True)

        if source in self._unsynced:
            del self._unsynced[source]
            self._unsynced[target] = None
        else:
            self._unsynced.pop(target, None)
        self._unnamed.append((target.parent, take_back))

    def _lose(self, share: float) -> None:
        if share >= 0.5:
            for _, take_back in reversed(self._unnamed):
                take_back()
            return
        for path in self._unsynced:
            if path.is_file():
                os.truncate(path, int(path.stat().st_size * share))


class _File:
    """A file that is open to be written: what a buffer would hold back is written at once, as one operation."""

    def __init__(self, faulty: FaultyDisk, path: Path, file: Any) -> None:
        self._faulty, self._path, self._file = faulty, path, file.detach()
        self._held, self._place = bytearray(), 0

    def write(self, content: Any) -> int:
        data = bytes(content)
        self._held[self._place : self._place + len(data)] = data
        self._place += len(data)
        return len(data)

    def seek(self, offset: int) -> int:
        """Go to a place in what is held; a zip's entry is written before its sizes are known."""
        self._place = offset - int(self._file.tell())
        assert 0 <= self._place <= len(self._held)
        return offset

    def flush(self) -> None:
        data, self._held, self._place = bytes(self._held), bytearray(), 0
        if data:
            write = self._file.write
            self._faulty.step(
                "write", self._path, lambda: write(data), lambda share: write(data[: int(len(data) * share)])
            )

    def tell(self) -> int:
        return int(self._file.tell()) + self._place

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _named(path: Any) -> tuple[str, ...]:
    """As the system names a file in an error: not where it is open."""
    return () if isinstance(path, int) else (str(path),)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
