"""One process at a time: locks that end with whoever holds them, however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from flcore import disk
from flcore.errors import RunError

logger = logging.getLogger(__name__)


def take_lock(file: IO[Any], *, wait: bool) -> bool:
    """Lock an open file until it is closed or its process ends, however it ends.

    Args:
        file: what processes agree upon to lock.
        wait: until another process lets go of it.

    Returns:
        False if another holds it and ``wait`` is False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks; that must not stop the work
        logger.debug("no lock on %s: %s", file.name, error)
    return True


@contextmanager
def sole_use(directory: Path) -> Iterator[None]:
    """Keep other processes out of a folder for as long as this lasts; a process that ends, however, lets go of it.

    Raises:
        RunError: another process is at work there.
    """
    disk.make_folder(directory)
    path = directory / ".running"
    while True:
        with disk.open_lock(path) as file:
            if not take_lock(file, wait=False):
                raise RunError(
                    f"{directory}: another process is at work on this run; wait for it or end it, "
                    "or choose another folder"
                )
            if not _is_at(file, path):  # its last holder has just removed it: whoever comes next makes a new one
                continue
            try:
                yield
            finally:
                if _is_at(file, path):  # else the folder has another name by now, and this one may be another's lock
                    disk.remove(path, missing_ok=True)
            return


def _is_at(file: IO[Any], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
