"""A folder or a zip as a tree of names, read only where a layout looks."""

from __future__ import annotations

import abc
import os
import stat
import struct
import unicodedata
import zipfile
from pathlib import Path

from flcore.core.errors import DataError
from flcore.core.text import is_control, shorten
from flcore.data.sources.base import BadFileError, damaged, leads_out
from flcore.data.sources.imagefiles import ENDINGS, KINDS, LARGEST_FILE

_CLUTTER = {"__MACOSX", "Thumbs.db", "desktop.ini"}
_NO_LINK = "a link that leads nowhere"
A_FOLDER = "a folder"
"""The fault of a folder where a file is expected."""


class Tree(abc.ABC):
    """Folders and files by their names relative to ``root``, with ``/`` between; the top is ``""``.

    Hidden names, and files that file managers add, are left out.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @abc.abstractmethod
    def inside(self, folder: str) -> list[str]:
        """Return the sorted names in a folder.

        Raises:
            DataError: it cannot be read.
        """

    @abc.abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether there is a file, a folder or a link of a name, even a broken link."""

    @abc.abstractmethod
    def is_folder(self, name: str) -> bool:
        """Return whether a name is a folder, or a link to one."""

    @abc.abstractmethod
    def size(self, name: str) -> int | str:
        """Return the bytes of a file, or why a name is no file."""

    @abc.abstractmethod
    def bytes_of(self, name: str) -> bytes:
        """Return the content of a file."""

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders inside a folder, sorted."""
        return [name for name in self.inside(folder) if self.is_folder(name)]

    def read(self, name: str) -> bytes:
        """Return the content of an image's file.

        Raises:
            BadFileError: it is too large.
        """
        size = self.size(name)
        if isinstance(size, int) and size > LARGEST_FILE:
            raise BadFileError(name, _too_large(size))
        return self.bytes_of(name)

    def fault(self, name: str) -> str | None:
        """Return why a name cannot be an image, by its ending and size; None if it may be one."""
        if self.is_folder(name):
            return A_FOLDER
        size = self.size(name)
        if isinstance(size, str):
            return size
        if os.path.splitext(name)[1].lower() not in ENDINGS:  # noqa: PTH122 - names need not be of this system
            return f"not an image: {KINDS}"
        return "empty" if size == 0 else _too_large(size) if size > LARGEST_FILE else None


def open_tree(root: Path, expected: str) -> Tree:
    """Return the tree of an existing folder or zip; ``expected`` is the layout, for the error.

    Raises:
        DataError: it is neither, or a zip that is damaged, has unsafe names or contains links.
    """
    if root.is_dir():
        return _Folder(root)
    if not root.is_file():  # a pipe would be waited for
        raise DataError(f"{root}: neither a folder of images nor a zip; expected {expected}")
    return _Zip(root, expected)


def _too_large(size: int) -> str:
    return f"{size} bytes, {LARGEST_FILE} are the most"


def _is_clutter(name: str) -> bool:
    return name.startswith(".") or name in _CLUTTER


class _Folder(Tree):
    def inside(self, folder: str) -> list[str]:
        try:
            names = [path.name for path in (self.root / folder).iterdir() if not _is_clutter(path.name)]
        except FileNotFoundError as error:
            raise DataError(f"{self.root / folder}: {_NO_LINK}; mend it, or delete it") from error
        except OSError as error:
            raise DataError(f"{self.root / folder}: cannot be read as a folder ({error.strerror})") from error
        return sorted(f"{folder}/{name}" if folder else name for name in names)

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.root / name)

    def is_folder(self, name: str) -> bool:
        return os.path.isdir(self.root / name)  # noqa: PTH112 - a link to itself is an error of Path.is_dir

    def size(self, name: str) -> int | str:
        path = self.root / name
        try:
            about = path.stat()
        except OSError:
            return _NO_LINK if path.is_symlink() else "does not exist"
        except ValueError:  # a null character
            return "does not exist"
        return about.st_size if stat.S_ISREG(about.st_mode) else "not a file"

    def bytes_of(self, name: str) -> bytes:
        return (self.root / name).read_bytes()


class _Zip(Tree):
    def __init__(self, root: Path, expected: str) -> None:
        super().__init__(root)
        with root.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        try:
            self._archive = zipfile.ZipFile(root)  # closed when nothing reads from it any more
        # Errors of zipfile for a bad directory: names that are no text, sizes that are none, an unknown version.
        except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError, OverflowError) as error:
            if is_zip:
                raise damaged(root, "not a readable zip") from error
            raise DataError(
                f"{root}: neither a folder nor a zip; expected {expected}\n"
                "other archives and files of arrays (tar, h5, npz) have to be unpacked into folders first"
            ) from error
        self._sizes: dict[str, int] = {}
        self._inside: dict[str, set[str]] = {"": set()}
        for info in self._archive.infolist():
            if not info.is_dir():
                self._add(info)

    def _add(self, info: zipfile.ZipInfo) -> None:
        name = info.filename
        if leads_out(name) or any(map(is_control, name)):
            raise damaged(self.root, f"the name {shorten(name)} leads out of it, or is none")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{self.root}: {name} is a link; pack the files that links lead to")
        if name in self._sizes:
            raise damaged(self.root, f"it holds two files of one name, {shorten(name)}")
        self._sizes[name] = info.file_size
        parts = name.split("/")
        if any(map(_is_clutter, parts)):
            return
        for depth in range(len(parts)):
            folder, below = "/".join(parts[:depth]), "/".join(parts[: depth + 1])
            self._inside.setdefault(folder, set()).add(below)

    def inside(self, folder: str) -> list[str]:
        return sorted(self._inside[folder])

    def exists(self, name: str) -> bool:
        return name in self._inside or name in self._sizes

    def is_folder(self, name: str) -> bool:
        return name in self._inside

    def size(self, name: str) -> int | str:
        return self._sizes.get(name, "does not exist")

    def bytes_of(self, name: str) -> bytes:
        return self._archive.read(name)


def found_name(tree: Tree, name: str) -> str:
    """Return the name in the Unicode form of the tree, which may differ between systems; else unchanged."""
    forms = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD")))
    return next((form for form in forms if isinstance(tree.size(form), int)), name)
