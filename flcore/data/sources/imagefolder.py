"""Any folder or zip of images laid out as ``train/<class>/*`` and ``test/<class>/*``; of a GIF the first frame."""

from __future__ import annotations

import os
import stat
import struct
import unicodedata
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import ClassVar

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.core.text import brief, is_control
from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, leads_out, missing
from flcore.data.sources.imagefiles import ENDINGS, KINDS, LARGEST_FILE, ImageFiles, Reader, depth_of, is_gray, size_of

_SPLITS = ("train", "test")
_CLUTTER = {"__MACOSX", "Thumbs.db", "desktop.ini"}
_LAYOUT = f"a folder or a zip with train/<class>/* and test/<class>/* ({KINDS}), or these below one folder"


@dataclass(frozen=True)
class ImageFolder(Source):
    """Images in class folders; classes in sorted order, samples class by class in sorted file order."""

    name: ClassVar[str] = "imagefolder"
    summary: ClassVar[str] = "your own images: a folder or zip of train/<class>/* and test/<class>/*"

    image_size: int | None = param(
        None,
        "height and width in pixels where data.size is null; null: those of the images, which must be alike",
        low=1,
    )

    def places(self, root: Path) -> tuple[Path, ...]:
        """What :meth:`load` reads: where the split lies in the folder itself, whatever else does plays no part."""
        split = tuple(root / name for name in _SPLITS)
        return split if all(folder.is_dir() for folder in split) else (root,)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """List the images below the folder or inside the zip ``root``; they are decoded later."""
        if root is None or not root.exists():
            raise missing(self.name, root, _LAYOUT, can_download=False)
        names, read = _opened(root)
        train, test = _by_split(names, root)
        class_names = _class_names(train, test, root)
        square = self.image_size
        size = size_of(train[0], read) if square is None else (square, square)
        sized_by = train[0] if square is None else None
        # One colour image makes all RGB. In a collection in colour that is the first, so that no other is opened.
        channels = 1 if all(is_gray(name, read) for name in (*train, *test)) else 3
        depth = depth_of((*train, *test), read)

        def split(names: list[str]) -> RawSplit:
            images = ImageFiles(tuple(names), read, size, channels, sized_by=sized_by, depth=depth)
            return RawSplit(images, _labels(names, class_names))

        return RawDataset(
            split(train),
            split(test),
            class_names,
            mean=None,
            std=None,
            licence="not stated: your own data",
            source="image folder",
        )


def _opened(root: Path) -> tuple[list[str], Reader]:
    """The relative file names below ``root`` (folder or zip) and a function that reads one."""
    if root.is_dir():
        files = [path.relative_to(root).as_posix() for path in _listed(root)]

        def read(name: str) -> bytes:
            _refuse_large(name, (root / name).stat().st_size)
            return (root / name).read_bytes()

        return files, read
    if root.exists() and not root.is_file():  # a pipe would be waited for
        raise DataError(f"{root}: neither a folder of images nor a zip")
    try:
        archive = zipfile.ZipFile(root)  # closed when nothing reads from it any more
    # What its directory makes zipfile trip over: names that are no text, sizes that are none, an unknown version.
    except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError, OverflowError) as error:
        raise damaged(root, "neither a folder nor a readable zip") from error
    entries = [info for info in archive.infolist() if not info.is_dir()]
    names = [info.filename for info in entries]
    for info in entries:
        _refuse_large(f"{root}: {brief(info.filename)}", info.file_size)
        if leads_out(info.filename) or any(map(is_control, info.filename)):
            raise damaged(root, f"the name {brief(info.filename)} leads out of it, or is none")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{root}: {info.filename} is a link; pack the files that links lead to")
    if len(set(names)) < len(names):
        raise damaged(root, "it holds two files of one name")
    return names, archive.read


def _listed(root: Path) -> list[Path]:
    """Return the files in class folders of the split, in ``root`` or one folder below; links are followed.

    Raises:
        DataError: a link leads nowhere, a folder cannot be read, or a class folder holds something else than files.
    """
    places = _splits_in(root) or [split for folder in _inside(root) if folder.is_dir() for split in _splits_in(folder)]
    found = []
    for split in places:
        for entry in _inside(split):
            found += _inside(entry) if entry.is_dir() else [entry]
    for path in found:
        if not path.is_file():
            raise _misfit(root, path.relative_to(root)) if path.exists() else _nowhere(path)
    return found


def _splits_in(folder: Path) -> list[Path]:
    return [folder / name for name in _SPLITS if os.path.lexists(folder / name)]


def _inside(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not _is_clutter(path.name)]
    except FileNotFoundError as error:
        raise _nowhere(folder) from error
    except OSError as error:
        raise DataError(f"{folder}: cannot be read as a folder ({error.strerror})") from error


def _nowhere(path: Path) -> DataError:
    return DataError(f"{path}: a link that leads nowhere; mend it, or delete it")


def _misfit(root: Path, path: PurePath) -> DataError:
    return DataError(f"{root}: {path} does not fit; expected {_LAYOUT}")


def _refuse_large(name: str, size: int) -> None:
    if size > LARGEST_FILE:
        raise damaged(name, f"{size} bytes, {LARGEST_FILE} are the most")


def _by_split(names: list[str], root: Path) -> tuple[list[str], list[str]]:
    """Sorted file names of the training and of the test split."""
    paths = [path for path in map(PurePosixPath, names) if not any(map(_is_clutter, path.parts))]
    inside = [path for path in paths if path.parts[0] in _SPLITS]
    depth = 0
    if not inside:
        depth = 1
        inside = [path for path in paths if len(path.parts) > 2 and path.parts[1] in _SPLITS]
    if len({path.parts[:depth] for path in inside}) != 1:
        raise DataError(f"{root}: no single pair of folders train and test; expected {_LAYOUT}")
    for path in inside:
        if len(path.parts) != depth + 3 or path.suffix.lower() not in ENDINGS:
            raise _misfit(root, path)
    # Sorted by class name first: comparing whole paths would put "a b/x" before "a/x".
    ordered = sorted(inside, key=lambda path: path.parts)
    splits = {split: [str(path) for path in ordered if path.parts[depth] == split] for split in _SPLITS}
    return splits["train"], splits["test"]


def _is_clutter(name: str) -> bool:
    return name.startswith(".") or name in _CLUTTER


def _class_of(name: str) -> str:
    return PurePosixPath(name).parts[-2]


def _class_names(train: list[str], test: list[str], root: Path) -> tuple[str, ...]:
    in_train, in_test = {_class_of(name) for name in train}, {_class_of(name) for name in test}
    _check_names(in_train | in_test, root)
    for name in sorted(in_train ^ in_test):
        where, other = ("train", "test") if name in in_train else ("test", "train")
        raise DataError(f"{root}: class {name!r} has images in {where} and none in {other}; both need the same classes")
    return tuple(sorted(in_train))


def _check_names(names: Iterable[str], root: Path) -> None:
    """Refuse class names that are not UTF-8, and two that differ in Unicode form only."""
    known: dict[str, str] = {}
    for name in sorted(names):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{root}: the name of the class folder {brief(name)} is no text in UTF-8; rename it"
            ) from error
        other = known.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise DataError(
                f"{root}: the class folders {other!a} and {name!a} have one name in two Unicode forms (NFC, NFD); "
                "rename one of them"
            )


def _labels(files: list[str], class_names: tuple[str, ...]) -> np.ndarray:
    index = {name: label for label, name in enumerate(class_names)}
    return np.array([index[_class_of(name)] for name in files], dtype=np.int64)
