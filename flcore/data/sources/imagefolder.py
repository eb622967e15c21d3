"""Any folder or zip of images laid out as ``train/<class>/*`` and ``test/<class>/*``; of a GIF the first frame."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, leads_out, missing
from flcore.data.sources.imagefiles import ENDINGS, KINDS, LARGEST_FILE, ImageFiles, Reader, image_form
from flcore.errors import DataError
from flcore.params import param
from flcore.wording import brief, is_control

_CLUTTER = {"__MACOSX", "Thumbs.db", "desktop.ini"}
_LAYOUT = f"a folder or a zip with train/<class>/* and test/<class>/* ({KINDS}), or these below one folder"


@dataclass(frozen=True)
class ImageFolder(Source):
    """Images in class folders; classes in sorted order, samples class by class in sorted file order."""

    name: ClassVar[str] = "imagefolder"
    summary: ClassVar[str] = "your own images: a folder or zip of train/<class>/* and test/<class>/*"

    image_size: int | None = param(
        None, "height and width to read at, in pixels; null: those of the first image", low=1
    )

    def places(self, root: Path) -> tuple[Path, ...]:
        """What :meth:`load` reads: where the split lies in the folder itself, whatever else does plays no part."""
        split = (root / "train", root / "test")
        return split if all(folder.is_dir() for folder in split) else (root,)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """List the images below the folder or inside the zip ``root``; they are decoded later."""
        if root is None or not root.exists():
            raise missing(self.name, root, _LAYOUT, can_download=False)
        names, read = _opened(root)
        train, test = _by_split(names, root)
        class_names = _class_names(train, test, root)
        height, width, _ = image_form(train[0], read)
        size = (self.image_size, self.image_size) if self.image_size else (height, width)
        # One colour image makes all RGB. In a collection in colour that is the first, so that no other is opened.
        channels = 3 if any(image_form(name, read)[2] == 3 for name in (*train, *test)) else 1
        return RawDataset(
            RawSplit(ImageFiles(tuple(train), read, size, channels), _labels(train, class_names)),
            RawSplit(ImageFiles(tuple(test), read, size, channels), _labels(test, class_names)),
            class_names,
            mean=None,
            std=None,
            licence="not stated: your own data",
            source="image folder",
        )


def _opened(root: Path) -> tuple[list[str], Reader]:
    """The relative file names below ``root`` (folder or zip) and a function that reads one."""
    if root.is_dir():
        files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]

        def read(name: str) -> bytes:
            _refuse_large(name, (root / name).stat().st_size)
            return (root / name).read_bytes()

        return files, read
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
    if len(set(names)) < len(names):
        raise damaged(root, "it holds two files of one name")
    return names, archive.read


def _refuse_large(name: str, size: int) -> None:
    if size > LARGEST_FILE:
        raise damaged(name, f"{size} bytes, {LARGEST_FILE} are the most")


def _by_split(names: list[str], root: Path) -> tuple[list[str], list[str]]:
    """Sorted file names of the training and of the test split."""
    paths = [PurePosixPath(name) for name in names if not _is_clutter(PurePosixPath(name))]
    inside = [path for path in paths if path.parts[0] in ("train", "test")]
    depth = 0
    if not inside:
        depth = 1
        inside = [path for path in paths if len(path.parts) > 2 and path.parts[1] in ("train", "test")]
    if len({path.parts[:depth] for path in inside}) != 1:
        raise DataError(f"{root}: no single pair of folders train and test; expected {_LAYOUT}")
    for path in inside:
        if len(path.parts) != depth + 3 or path.suffix.lower() not in ENDINGS:
            raise DataError(f"{root}: {path} does not fit; expected {_LAYOUT}")
    # Sorted by class name first: comparing whole paths would put "a b/x" before "a/x".
    ordered = sorted(inside, key=lambda path: path.parts)
    splits = {split: [str(path) for path in ordered if path.parts[depth] == split] for split in ("train", "test")}
    return splits["train"], splits["test"]


def _is_clutter(path: PurePosixPath) -> bool:
    return any(part.startswith(".") or part in _CLUTTER for part in path.parts)


def _class_of(name: str) -> str:
    return PurePosixPath(name).parts[-2]


def _class_names(train: list[str], test: list[str], root: Path) -> tuple[str, ...]:
    in_train, in_test = {_class_of(name) for name in train}, {_class_of(name) for name in test}
    for name in sorted(in_train ^ in_test):
        where, other = ("train", "test") if name in in_train else ("test", "train")
        raise DataError(f"{root}: class {name!r} has images in {where} and none in {other}; both need the same classes")
    return tuple(sorted(in_train))


def _labels(files: list[str], class_names: tuple[str, ...]) -> np.ndarray:
    index = {name: label for label, name in enumerate(class_names)}
    return np.array([index[_class_of(name)] for name in files], dtype=np.int64)
