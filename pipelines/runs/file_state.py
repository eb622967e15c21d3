"""Detection of changed files without reading them, for the images that the cache has prepared."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.core.errors import DataError
from flcore.io.files import given_path

if TYPE_CHECKING:
    from flcore.config.schema import Config


def state_of(places: Iterable[Path]) -> str:
    """Return a digest of name, size, times and inode of files and of all files below folders, at any depth.

    Renaming a file changes the inode of its name; setting its time back changes the time of its last status change.

    Links are followed. Hidden names are left out: file managers and protofl itself write such files next to images.
    So are unreadable ones: a reader reports the error if it needs them.
    """
    digest = hashlib.sha256()
    for place in places:
        digest.update(b"\n")
        for name, about in _files(os.fspath(place), frozenset()):
            facts = f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns} {about.st_ino}"
            digest.update(os.fsencode(f"{name}\0{facts}\0"))
    return digest.hexdigest()


def refuse_linked_folders(root: Path) -> None:
    """Refuse, with a DataError, links to folders below ``root``, which DVC does not follow; ignore hidden ones."""
    for folder, names, _ in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in names:
            if (path := Path(folder, name)).is_symlink():
                raise DataError(
                    f"{path}: a linked folder, in which DVC would not see a change; link its files instead "
                    "(cp -rsL), or run protofl compare, which sees it"
                )


def source_state(config: Config) -> str | None:
    """Return the state of the files that the configured source reads; None if it reads no folder."""
    return None if config.data.root is None else state_of(config.source.places(given_path(config.data.root)))


def _files(path: str, above: frozenset[tuple[int, int]], name: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files at a path, in order of their relative names; ``above``: device and inode of its parents."""
    about = _looked_at(path)
    if about is None:
        return
    if not stat.S_ISDIR(about.st_mode):
        yield name, about
        return
    here = (about.st_dev, about.st_ino)
    if here in above:  # a link to a parent
        return
    names, inside = list[str](), above | {here}
    with suppress(OSError), os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    for below in names:
        yield from _files(f"{path}/{below}", inside, f"{name}/{below}")


def _looked_at(path: str) -> os.stat_result | None:
    for look in (os.stat, os.lstat):  # for a broken link: the link itself
        with suppress(OSError):
            return look(path)
    return None
