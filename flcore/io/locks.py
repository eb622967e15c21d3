"""Locks between processes, released when their process ends.

On a file system without locks, as some network file systems are, a file ``.<name>.holder`` replaces the lock and names
its process. If that ran on this machine and has ended, the file is removed; messages name one from another machine.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from flcore.core.errors import RunError
from flcore.core.host import began_at, host_id, is_alive
from flcore.io import disk

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_TRIES = 0.05
_SECONDS_BEFORE_WORDS = 30.0

_said_without_locks: list[Path] = []


def take_lock(file: disk.LockFile, *, wait: bool) -> bool:
    """Lock an open file until it is closed or the process ends.

    Args:
        file: the file that processes agree to lock.
        wait: until another process releases it.

    Returns:
        False if another process holds it and ``wait`` is False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        path = Path(file.name)
        if not _said_without_locks:
            _said_without_locks.append(path)
            logger.warning(
                "%s: the file system has no locks (%s); a hidden file, *.holder, says who is at work there",
                path.parent, error.strerror,
            )  # fmt: skip
        return _make_stand_in(file, _stand_in(path), wait)
    return True


def _stand_in(path: Path) -> Path:
    return path.with_name(f".{path.name.lstrip('.')}.holder")


def _make_stand_in(file: disk.LockFile, path: Path, wait: bool) -> bool:
    process = os.getpid()
    about = {"host": platform.node(), "host_id": host_id(), "process": process, "began": began_at(process)}
    content = json.dumps({**about, "token": uuid.uuid4().hex}).encode()
    began, said = time.monotonic(), False
    while True:
        try:
            with disk.create_new(path) as stand_in:
                stand_in.write(content)
        except FileExistsError:
            if _removed_as_dead(path):
                continue
            if not wait:
                return False
            if not said and time.monotonic() - began > _SECONDS_BEFORE_WORDS:
                said = True
                logger.warning("waiting for another process%s", _holder(path))
            time.sleep(_SECONDS_BETWEEN_TRIES)
        else:
            file.stand_in = path, content
            return True


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the content of a holder file and its fields; empty while it is being written."""
    content = b""
    with suppress(OSError, ValueError):  # removed just now, or half written
        content = path.read_bytes()
        said = json.loads(content)
        if isinstance(said, dict):
            return content, said
    return content, {}


def _removed_as_dead(path: Path) -> bool:
    """Remove a holder file if its process ran on this machine and has ended; return whether the file is missing."""
    content, said = _read(path)
    if said.get("host_id") != host_id() or is_alive(int(said["process"]), said["began"]):
        return not path.exists()
    # Only one process can rename it; another may have made a new one meanwhile.
    found = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    with suppress(FileNotFoundError):
        disk.rename(path, found)
        if found.read_bytes() != content:
            with suppress(FileExistsError):
                disk.link(found, path)
        disk.remove(found)
    return True


def _holder(path: Path) -> str:
    """Return the holder of a lock for a message, if a file names it."""
    said = _read(path)[1]
    if not said:
        return f"; if none is, delete {path}" if path.exists() else ""
    return f" (process {said['process']} on {said['host']}; if that has ended, delete {path})"


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Keep other processes out of a run folder.

    Raises:
        RunError: another process uses it.
    """
    disk.make_folder(directory)
    path = directory / ".running"
    while True:
        with disk.open_lock(path) as file:
            if not take_lock(file, wait=False):
                raise RunError(
                    f"{directory}: another process is at work on this run{_holder(_stand_in(path))}; wait for it or "
                    "end it, or choose another folder"
                )
            if not _is_at(file, path):  # its last holder has just removed it: make a new one
                continue
            try:
                yield
            finally:
                if _is_at(file, path):  # else the folder was renamed, and this file may be another's lock
                    disk.remove(path, missing_ok=True)
            return


def _is_at(file: IO[Any] | disk.LockFile, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
