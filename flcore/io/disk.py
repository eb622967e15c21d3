"""The disk, one operation at a time: what `flcore` and `pipelines` change there, they change by these functions alone.

Each is one request to the operating system, or made of others that stand here. So the places at which a process can be
killed, or the disk can be full, are countable, and `tests/crash` tries them all; a test of the architecture finds who
goes past them. Whoever uses them writes ``disk.rename(...)``, so that a test can put its own in their place.

:mod:`flcore.io.files` makes of them what is wanted mostly: a file that appears whole or not at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast


class LockFile(FileIO):
    """File that processes lock; closing it releases the lock.

    Attributes:
        stand_in: the file that says who holds the lock, and its content, where the file system has no locks.
    """

    stand_in: tuple[Path, bytes] | None = None

    def close(self) -> None:
        """Let go of the lock."""
        held, self.stand_in = self.stand_in, None
        if held is not None:
            path, content = held
            with suppress(OSError):  # its folder may be another one by now
                if path.read_bytes() == content:
                    path.unlink()
        super().close()


# ---- one operation each ------------------------------------------------------------------------------------------


def new_folder(path: Path) -> None:
    """Make one folder; that it is there already is no error."""
    path.mkdir(exist_ok=True)


def create(path: Path) -> BinaryIO:
    """Open a file to be written, empty, whatever was in it."""
    return cast(BinaryIO, path.open("wb"))


def open_end(path: Path) -> BinaryIO:
    """Open a file to be written behind its end; made where there is none."""
    return cast(BinaryIO, path.open("ab"))


def create_new(path: Path, *, mode: int = 0o666) -> BinaryIO:
    """Create a new file and open it for writing.

    Args:
        path: the file.
        mode: its permissions, less those that the umask removes; 0o600: only this user can read it.

    Raises:
        FileExistsError: a file of this name exists.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")


def open_lock(path: Path) -> LockFile:
    """Open a file that is there to be locked (:mod:`flcore.io.locks`); nothing is ever written to it."""
    return LockFile(path, "w")


def truncate(path: Path, length: int) -> None:
    """Drop what lies behind the first ``length`` bytes of a file, and let that survive a power failure."""
    with named(path), path.open("rb+") as file:
        file.truncate(length)
        os.fsync(file.fileno())


def sync(handle: int) -> None:
    """Let the content of an open file, or of an open folder its names, survive a power failure."""
    os.fsync(handle)


def rename(source: Path, target: Path) -> None:
    """Give a file another name, replacing what has it, in one step; likewise a folder, where there is an empty one."""
    source.replace(target)


def link(source: Path, target: Path) -> None:
    """Give a file a second name."""
    os.link(source, target)


def remove(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file, or a link."""
    path.unlink(missing_ok=missing_ok)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


# ---- made of these -----------------------------------------------------------------------------------------------

_TIMES_REMOVED = 20  # by others in a row; more is something else


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing.

    Another command may remove one of these meanwhile, which it has made to see whether that can be done
    (:func:`try_to_remove_empty`); then it is made again.
    """
    for _ in range(_TIMES_REMOVED):
        with suppress(FileNotFoundError, FileExistsError):
            _make_folder(path)
            return
    _make_folder(path)


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    if path.parent != path:
        _make_folder(path.parent)
    new_folder(path)


def empty_folder(path: Path) -> None:
    """Remove all that lies in a folder, in order of names; the folder stays."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            remove(entry, missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder and all that lies in it; that there is none is no error."""
    if path.is_dir():
        empty_folder(path)
        remove_folder(path)


def try_to_remove(path: Path) -> None:
    """Remove a file, or a folder with all that lies in it, that nobody will read again; what stays takes space alone.

    Network file systems keep files that are mapped into memory somewhere.
    """
    with suppress(OSError):
        if path.is_dir():
            remove_tree(path)
        else:
            remove(path, missing_ok=True)


def try_to_remove_empty(path: Path) -> bool:
    """Remove a folder in which nothing lies; whether it is gone."""
    try:
        remove_folder(path)
    except OSError:
        return False
    return True


def sync_folder(path: Path) -> None:
    """Let the names in a folder survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            sync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems on which folders need no such thing
            raise
    finally:
        os.close(handle)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Let errors of the system name the file: it does not say which one, where a write to an open file fails."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
