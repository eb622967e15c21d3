"""Locks between processes, released when their process ends.

On a file system without locks, as some network file systems are, `filelock.SoftFileLock` replaces the lock: a file
``.<name>.holder`` names its process. It is removed if that ran on this machine and has ended; messages name one from
another machine.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from flcore.core.errors import RunError
from flcore.core.text import shorten
from flcore.io import disk

logger = logging.getLogger(__name__)

_SECONDS_BEFORE_WARNING = 30.0

_warned_without_locks: list[Path] = []


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
        if not _warned_without_locks:
            _warned_without_locks.append(path)
            logger.warning(
                "%s: the file system has no locks (%s); a hidden file, *.holder, names the process that works there",
                path.parent, error.strerror,
            )  # fmt: skip
        return _take_soft_lock(file, _holder_file(path), wait)
    return True


def _holder_file(path: Path) -> Path:
    return path.with_name(f".{path.name.lstrip('.')}.holder")


def _take_soft_lock(file: disk.LockFile, path: Path, wait: bool) -> bool:
    import filelock

    lock = filelock.SoftFileLock(path, thread_local=False)
    with suppress(filelock.Timeout):
        lock.acquire(timeout=_SECONDS_BEFORE_WARNING if wait else 0)
    if wait and not lock.is_locked:
        logger.warning("waiting for another process%s", _holder(path))
        lock.acquire()
    file.soft_lock = lock if lock.is_locked else None
    return lock.is_locked


def _holder(path: Path) -> str:
    """Return the holder of a lock for a message, if a file names it."""
    try:
        process, host, *_ = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # removed just now, or half written
        return f"; if none is, delete {path}" if path.exists() else ""
    host, _, _ = host.partition("?")  # filelock adds the container
    return f" (process {shorten(process)} on {shorten(host)}; if that has ended, delete {path})"


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
                    f"{directory}: another process is at work on this run{_holder(_holder_file(path))}; wait for it or "
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
