"""Images with labels in a folder or a zip: class folders, class folders by site, or a CSV. No image is opened."""

from __future__ import annotations

import abc
import csv
import io
import os
import re
import stat
import struct
import unicodedata
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flcore.core.errors import DataError, listed
from flcore.core.text import is_control, shorten, unknown_key
from flcore.data.sources.base import MOST_LISTED, BadFileError, damaged, leads_out
from flcore.data.sources.imagefiles import ENDINGS, LARGEST_FILE, READABLE

Layout = Literal["classes", "sites", "csv"]

SPLITS = ("train", "test")
_INDEX = "index.csv"
_COLUMNS = ("file", "label", "site", "split")
_FOLDERS = {"classes": "<class>/*", "sites": "<site>/<class>/*"}

EXPECTED = {
    **{
        layout: f"a folder or a zip with train/{below} and test/{below} ({READABLE}), or these below one folder; with "
        f"data.test_fraction also {below} alone"
        for layout, below in _FOLDERS.items()
    },
    "csv": f"a folder or a zip with {_INDEX}, whose first line is file,label or file,label,site,split, and the images "
    f"({READABLE})",
}
"""Description of each layout, for errors."""

_CLUTTER = {"__MACOSX", "Thumbs.db", "desktop.ini"}
_A_FOLDER, _MISSING, _NO_LINK = "a folder", "does not exist", "a link that leads nowhere"


@dataclass(frozen=True)
class Sample:
    """An image's file with its label; ``site`` and ``split`` are None if the layout does not state them."""

    file: str
    label: str
    site: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Listing:
    """Images in their order, and the reason for each name that cannot be one."""

    samples: list[Sample] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)

    def add(self, tree: Tree, sample: Sample) -> None:
        fault = tree.fault(sample.file)
        if fault is None:
            self.samples.append(sample)
        else:
            self.faults[sample.file] = fault


class Tree(abc.ABC):
    """Folders and files by their names below ``root``, such as ``a/b``, without hidden ones; the top is ``""``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @abc.abstractmethod
    def inside(self, folder: str) -> list[str]:
        """Return the sorted names in a folder, or raise DataError."""

    @abc.abstractmethod
    def state(self, name: str) -> int | str:
        """Return the bytes of a file, or the reason why a name is no file."""

    @abc.abstractmethod
    def read_bytes(self, name: str) -> bytes: ...

    def is_folder(self, name: str) -> bool:
        return self.state(name) == _A_FOLDER

    def folders(self, folder: str) -> list[str]:
        return [name for name in self.inside(folder) if self.is_folder(name)]

    def read(self, name: str) -> bytes:
        """Return the content of an image's file; raise BadFileError if it is too large."""
        size = self.state(name)
        if isinstance(size, int) and size > LARGEST_FILE:
            raise BadFileError(name, _too_large(size))
        return self.read_bytes(name)

    def fault(self, name: str) -> str | None:
        """Return why a name cannot be an image, by its ending and size; None if it may be one."""
        size = self.state(name)
        if isinstance(size, str):
            return size
        if os.path.splitext(name)[1].lower() not in ENDINGS:  # noqa: PTH122 - names need not be of this system
            return f"not an image: {READABLE}"
        return "empty" if size == 0 else _too_large(size) if size > LARGEST_FILE else None


def open_tree(root: Path, expected: str) -> Tree:
    """Return the tree of a folder or of an intact zip without links, or raise DataError with the ``expected`` form."""
    if root.is_dir():
        return _Folder(root)
    if not root.is_file():  # reading a pipe would wait
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
        return sorted(_join(folder, name) for name in names)

    def state(self, name: str) -> int | str:
        path = self.root / name
        try:
            status = path.stat()
        except OSError:
            return _NO_LINK if path.is_symlink() else _MISSING
        except ValueError:  # a null character
            return _MISSING
        if stat.S_ISDIR(status.st_mode):
            return _A_FOLDER
        return status.st_size if stat.S_ISREG(status.st_mode) else "not a file"

    def read_bytes(self, name: str) -> bytes:
        return (self.root / name).read_bytes()


class _Zip(Tree):
    def __init__(self, root: Path, expected: str) -> None:
        super().__init__(root)
        with root.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        try:
            self._archive = zipfile.ZipFile(root)  # closed with its last reader
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
            if not info.filename.endswith("/"):  # no folder; `is_dir` fails for an empty name
                self._add(info)

    def _add(self, info: zipfile.ZipInfo) -> None:
        name = info.filename
        if not name or leads_out(name) or any(map(is_control, name)):
            raise damaged(self.root, f"the name {shorten(name)} leads out of it, or is none")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{self.root}: {name} is a link; pack the files that links lead to")
        if name in self._sizes:
            raise damaged(self.root, f"it holds two files of one name, {shorten(name)}")
        self._sizes[name] = info.file_size
        parts = name.split("/")
        if not any(map(_is_clutter, parts)):
            for depth in range(len(parts)):
                self._inside.setdefault("/".join(parts[:depth]), set()).add("/".join(parts[: depth + 1]))

    def inside(self, folder: str) -> list[str]:
        return sorted(self._inside[folder])

    def state(self, name: str) -> int | str:
        return _A_FOLDER if name in self._inside else self._sizes.get(name, _MISSING)

    def read_bytes(self, name: str) -> bytes:
        return self._archive.read(name)


def list_images(tree: Tree, layout: Layout, *, undivided: bool) -> Listing:
    """Return all images of a tree, or raise DataError for another layout or an invalid line of the CSV.

    Folders of classes and sites come in natural order, files in the order of their names, and rows in the CSV's order.
    ``undivided`` allows a tree without a split into training and test.
    """
    if layout == "csv":
        return _from_csv(tree)
    levels = ["site", "class"] if layout == "sites" else ["class"]
    top, splits = _top(tree, layout, undivided)
    listing = Listing()
    for split in splits or [""]:
        _collect(tree, _join(top, split), levels, split or None, [], listing)
    if not listing.samples and any(fault in (_A_FOLDER, _outside(levels)) for fault in listing.faults.values()):
        other = "sites" if layout == "classes" else "classes"
        raise DataError(
            f"{tree.root}: no images in {_FOLDERS[layout]}; expected {EXPECTED[layout]}\n"
            f"if they are in {_FOLDERS[other]}, set data.layout={other}"
        )
    return listing


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names sorted with numbers by value, so that 2 comes before 10."""
    return tuple(sorted(names, key=_natural))


def _top(tree: Tree, layout: Layout, undivided: bool) -> tuple[str, list[str]]:
    """Return the folder that contains the images' folders, and its split folders; none if it has no split."""
    folders, levels = tree.folders(""), _FOLDERS[layout].count("/")
    # Without a split, folders are classes or sites, and one may be called train or test.
    least = levels if undivided else 0
    if splits := _splits(tree, "", least):
        return "", splits
    if not undivided or len(folders) == 1:
        below = [folder for folder in folders if _splits(tree, folder, least)]
        if len(below) == 1:
            return below[0], _splits(tree, below[0], least)
    if not undivided:
        raise DataError(
            f"{tree.root}: no single pair of folders train and test; expected {EXPECTED[layout]}\n"
            "without a test folder, set data.test_fraction=0.2 to draw a test set"
        )
    return folders[0] if len(folders) == 1 and _depth(tree, folders[0]) >= levels else "", []


def _splits(tree: Tree, folder: str, least: int) -> list[str]:
    """Return the splits among a folder's children, if train has ``least`` levels of folders below it."""
    splits = [split for split in SPLITS if tree.state(_join(folder, split)) != _MISSING]
    return splits if least == 0 or ("train" in splits and _depth(tree, _join(folder, "train")) >= least) else []


def _depth(tree: Tree, folder: str) -> int:
    below = tree.folders(folder)
    return 1 + _depth(tree, below[0]) if below else 0


def _collect(
    tree: Tree, folder: str, levels: Sequence[str], split: str | None, above: list[str], listing: Listing
) -> None:
    names = tree.inside(folder)
    if not levels:
        site, label = above if len(above) > 1 else (None, above[0])
        for name in names:
            listing.add(tree, Sample(name, label, site, split))
        return
    for name in sorted(names, key=_natural):
        state = tree.state(name)
        if state == _A_FOLDER:
            _collect(tree, name, levels[1:], split, [*above, name.rpartition("/")[2]], listing)
        else:
            listing.faults[name] = state if isinstance(state, str) else _outside(levels)


def _outside(levels: Sequence[str]) -> str:
    return f"not in a {levels[-1]} folder"


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


def _natural(name: str) -> tuple[tuple[str | tuple[int, str], ...], str]:
    parts = [part.lstrip("0") if n % 2 else part for n, part in enumerate(re.split("([0-9]+)", name))]
    # Numbers by length, then digits: int() refuses very long ones.
    return tuple((len(part), part) if n % 2 else part for n, part in enumerate(parts)), name


def _from_csv(tree: Tree) -> Listing:
    top = next((folder for folder in ("", *tree.folders("")) if tree.state(_join(folder, _INDEX)) != _MISSING), None)
    if top is None:
        raise DataError(f"{tree.root}: no {_INDEX}; expected {EXPECTED['csv']}")
    index = _join(top, _INDEX)
    place = f"{tree.root}: {index}"
    try:
        text = tree.read(index).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise damaged(place, "no text in UTF-8; save it as CSV UTF-8") from error
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    listing, wrong, seen = Listing(), list[str](), dict[str, int]()
    try:
        columns = [name.strip().lower() for name in next(lines, [])]
        _check_columns(columns, place)
        for row in lines:
            if not any(map(str.strip, row)):
                continue
            number = lines.line_num
            values = dict(zip(columns, map(str.strip, row), strict=False))
            name = values.get("file", "").replace("\\", "/").removeprefix("./")
            fault = "has other columns than the first line" if len(row) != len(columns) else _row_fault(values, name)
            if fault is None and (first := seen.setdefault(unicodedata.normalize("NFC", name), number)) != number:
                fault = f"repeats the file of line {first}"
            if fault is None:
                file = _existing_form(tree, _join(top, name))
                listing.add(tree, Sample(file, values["label"], values.get("site"), values.get("split")))
            else:
                wrong.append(f"line {number} {fault}")
    except csv.Error as error:
        raise damaged(place, f"line {lines.line_num}: {error}") from error
    if wrong:
        raise DataError(f"{place}: {listed(wrong, MOST_LISTED)}; correct them")
    return listing


def _existing_form(tree: Tree, name: str) -> str:
    """Return the name in the Unicode form of the tree, which may differ between systems; else unchanged."""
    forms = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD")))
    return next((form for form in forms if isinstance(tree.state(form), int)), name)


def _check_columns(columns: Sequence[str], place: str) -> None:
    for name in columns:
        if name not in _COLUMNS:
            if ";" in name or "\t" in name:
                raise DataError(f"{place}: no commas in its first line; separate columns by commas")
            message = unknown_key(name or "''", name, _COLUMNS).replace("unknown key", "unknown column", 1)
            raise DataError(f"{place}: {message}; remove other columns")
    for name in ("file", "label"):
        if name not in columns:
            raise DataError(f"{place}: no column {name}; its first line has to be file,label or file,label,site,split")
    if len(set(columns)) < len(columns):
        raise DataError(f"{place}: a column is named twice in its first line")


def _row_fault(values: dict[str, str], name: str) -> str | None:
    empty = [column for column, value in values.items() if not value]
    if empty:
        return f"has no {empty[0]}"
    if leads_out(name) or re.match("[A-Za-z]:/", name):
        return f"names {shorten(name)}, which is not below the folder of {_INDEX}"
    if values.get("split", SPLITS[0]) not in SPLITS:
        return f"has split {shorten(values['split'])}, allowed are train and test"
    return None
