"""Every operation that changes the disk. `flcore` and `pipelines` use no others.

Each is one request to the operating system, or a combination of these, so that `tests/crash` can stop a process at
every one. Call them as ``disk.rename(...)``, so that tests can replace them. See also :mod:`flcore.io.files`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from filelock import SoftFileLock


class LockFile(FileIO):
    """File that processes lock; closing it releases the lock.

    Attributes:
        soft_lock: replaces the lock on a file system without locks.
    """

    soft_lock: SoftFileLock | None = None

    def close(self) -> None:
        """Release the lock."""
        if self.soft_lock is not None:
            with suppress(OSError):  # its folder may have been renamed
                self.soft_lock.release()
        super().close()


# ---- one operation each ------------------------------------------------------------------------------------------


def new_folder(path: Path) -> None:
    """Make one folder; it may exist."""
    path.mkdir(exist_ok=True)


def create(path: Path) -> BinaryIO:
    """Open a file for writing and empty it."""
    return cast(BinaryIO, path.open("wb"))


def open_end(path: Path) -> BinaryIO:
    """Open a file for appending; make it if missing."""
    return cast(BinaryIO, path.open("ab"))


def create_new(path: Path, *, mode: int = 0o666) -> BinaryIO:
    """Create a file with these permissions (before the umask), and open it for writing.

    Raises:
        FileExistsError: a file of this name exists.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")


def open_lock(path: Path) -> LockFile:
    """Open a file for locking (:mod:`flcore.io.locks`); it stays empty."""
    return LockFile(path, "w")


def truncate(path: Path, length: int) -> None:
    """Cut a file to ``length`` bytes and sync it."""
    with named(path), path.open("rb+") as file:
        file.truncate(length)
        os.fsync(file.fileno())


def sync(handle: int) -> None:
    """Sync the content of an open file, or the names in an open folder, to survive a power failure."""
    os.fsync(handle)


def rename(source: Path, target: Path) -> None:
    """Rename a file and replace its target in one step; the target of a folder must be empty."""
    source.replace(target)


def link(source: Path, target: Path) -> None:
    """Make a hard link."""
    os.link(source, target)


def remove(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file, or a link."""
    path.unlink(missing_ok=missing_ok)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


# ---- made of these -----------------------------------------------------------------------------------------------

_TRIES = 20


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents; try again if another command removes one (:func:`try_to_remove_empty`)."""
    for tries_left in reversed(range(_TRIES)):
        try:
            for folder in (*reversed(path.parents), path):
                if not folder.is_dir():
                    new_folder(folder)
            return
        except (FileNotFoundError, FileExistsError):
            if tries_left == 0:
                raise


def empty_folder(path: Path) -> None:
    """Remove the content of a folder, in order of names."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            remove(entry, missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder and its content; it may be missing."""
    if path.is_dir():
        empty_folder(path)
        remove_folder(path)


def try_to_remove(path: Path) -> None:
    """Remove a file or a folder with its content; ignore errors, such as a network file system's for mapped files."""
    with suppress(OSError):
        if path.is_dir():
            remove_tree(path)
        else:
            remove(path, missing_ok=True)


def try_to_remove_empty(path: Path) -> bool:
    """Remove a folder if it is empty; return whether it was."""
    try:
        remove_folder(path)
    except OSError:
        return False
    return True


def sync_folder(path: Path) -> None:
    """Sync the names in a folder, to survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            sync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not needed on this file system
            raise
    finally:
        os.close(handle)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file to system errors, which do not name it when a write to an open file fails."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
