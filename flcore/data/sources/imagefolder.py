"""Any folder or zip of images laid out as ``train/<class>/*`` and ``test/<class>/*``."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

from flcore.data.images import channel_statistics, convert_channels, resize
from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, missing
from flcore.errors import DataError
from flcore.params import param

_ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}
_CLUTTER = {"__MACOSX", "Thumbs.db", "desktop.ini"}
_LAYOUT = "a folder or a zip with train/<class>/* and test/<class>/* (jpg, png or webp), or these below one folder"

Reader = Callable[[str], bytes]


@dataclass(frozen=True)
class ImageFolder(Source):
    """Images in class folders; classes in sorted order, samples class by class in sorted file order."""

    name: ClassVar[str] = "imagefolder"
    summary: ClassVar[str] = "your own images: a folder or zip of train/<class>/* and test/<class>/*"

    image_size: int | None = param(
        None, "height and width to read at, in pixels; null: those of the first image", low=1
    )

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read and decode every image below the folder or inside the zip ``root``."""
        if root is None or not root.exists():
            raise missing(self.name, root, _LAYOUT, can_download=False)
        with _opened(root) as (names, read):
            train_files, test_files = _by_split(names, root)
            class_names = _class_names(train_files, test_files, root)
            train = _decode_all(train_files, read)
            test = _decode_all(test_files, read)
        size = (self.image_size, self.image_size) if self.image_size else (train[0].shape[1], train[0].shape[2])
        channels = max(image.shape[0] for image in (*train, *test))
        train_images, test_images = _stack(train, size, channels), _stack(test, size, channels)
        mean, std = channel_statistics(train_images)
        return RawDataset(
            RawSplit(train_images, _labels(train_files, class_names)),
            RawSplit(test_images, _labels(test_files, class_names)),
            class_names,
            mean,
            tuple(max(value, 1e-4) for value in std),  # a constant channel must not divide by zero
            licence="not stated: your own data",
            source="image folder",
        )


@contextlib.contextmanager
def _opened(root: Path) -> Iterator[tuple[list[str], Reader]]:
    """The relative file names below ``root`` (folder or zip) and a function that reads one."""
    if root.is_dir():
        files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        yield files, lambda name: (root / name).read_bytes()
        return
    try:
        archive = zipfile.ZipFile(root)
    except (zipfile.BadZipFile, OSError) as error:
        raise damaged(root, "neither a folder nor a readable zip") from error
    with archive:
        yield [info.filename for info in archive.infolist() if not info.is_dir()], archive.read


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
        if len(path.parts) != depth + 3 or path.suffix.lower() not in _ENDINGS:
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


def _decode_all(files: list[str], read: Reader) -> list[Tensor]:
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda name: _decode(name, read), files))


def _decode(name: str, read: Reader) -> Tensor:
    """One image as uint8 [1 or 3, H, W]; transparency is dropped."""
    try:
        encoded = torch.frombuffer(bytearray(read(name)), dtype=torch.uint8)
        image = decode_image(encoded)
        if image.shape[0] in (2, 4):  # with transparency, or CMYK
            image = decode_image(encoded, ImageReadMode.GRAY if image.shape[0] == 2 else ImageReadMode.RGB)
    except (RuntimeError, ValueError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise damaged(name, str(error).splitlines()[0] if str(error) else "not an image") from error
    if image.dtype != torch.uint8:  # a PNG of 16 bits
        image = (image.to(torch.int32) >> 8).to(torch.uint8)
    return cast(Tensor, image)


def _stack(images: list[Tensor], size: tuple[int, int], channels: int) -> np.ndarray:
    """All images in one array NxHxW or NxHxWx3."""
    stacked = np.empty((len(images), *size, channels), dtype=np.uint8)
    for position, image in enumerate(images):
        fitted = resize(convert_channels(image[None], channels), size)
        stacked[position] = fitted[0].permute(1, 2, 0).numpy()
    return stacked[..., 0] if channels == 1 else stacked
