"""CIFAR-10 and CIFAR-100: colour images 32x32, as published for Python or as binary files.

The files for Python are read and checked by torchvision, which unpickles them. A binary file is a list of records: a
byte for the label (CIFAR-100: one for the coarse, one for the fine label), then 32 x 32 bytes of red, green and blue.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.error import URLError

import numpy as np

from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, missing, not_downloaded, read_text_lines

_SIDE = 32
TRAIN_SIZE, TEST_SIZE = 50_000, 10_000
"""Images as published."""


@dataclass(frozen=True)
class _Form:
    """Names of a data set's files, for Python or binary.

    ``label`` is the byte of a binary record that holds the label, the last before the pixels.
    """

    kind: str
    folder: str
    files: tuple[str, ...]
    binary_folder: str
    binary_train: tuple[str, ...]
    binary_test: str
    binary_names: str
    label: int

    @property
    def layout(self) -> str:
        """The files expected, in words."""
        binary = ", ".join((*self.binary_train, self.binary_test, self.binary_names))
        return f"{self.folder}/ with {', '.join(self.files)}, or {self.binary_folder}/ with {binary}"

    def is_binary(self, root: Path) -> bool:
        """Return whether there are binary files only."""
        return not (root / self.folder).exists() and (root / self.binary_folder).is_dir()

    def place(self, root: Path) -> Path:
        """Return the folder to read."""
        return root / (self.binary_folder if self.is_binary(root) else self.folder)


_CIFAR10 = _Form(
    kind="CIFAR10",
    folder="cifar-10-batches-py",
    files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
    binary_folder="cifar-10-batches-bin",
    binary_train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    binary_test="test_batch.bin",
    binary_names="batches.meta.txt",
    label=0,
)
_CIFAR100 = _Form(
    kind="CIFAR100",
    folder="cifar-100-python",
    files=("train", "test", "meta"),
    binary_folder="cifar-100-binary",
    binary_train=("train.bin",),
    binary_test="test.bin",
    binary_names="fine_label_names.txt",
    label=1,
)


@dataclass(frozen=True)
class Cifar10(Source):
    """50,000 / 10,000 images, 5,000 / 1,000 per class."""

    name: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = "objects 32x32 in colour, 50,000 / 10,000 images, 10 classes; torchvision (Krizhevsky)"
    num_classes: ClassVar[int | None] = 10
    channels: ClassVar[int | None] = 3

    def places(self, root: Path) -> tuple[Path, ...]:
        return (_CIFAR10.place(root),)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/cifar-10-batches-py``, or ``cifar-10-batches-bin``."""
        return _read(self, root, download, _CIFAR10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True)
class Cifar100(Source):
    """50,000 / 10,000 images with the 100 fine labels, 500 / 100 per class."""

    name: ClassVar[str] = "cifar100"
    summary: ClassVar[str] = "objects 32x32 in colour, 50,000 / 10,000 images, 100 classes; torchvision (Krizhevsky)"
    num_classes: ClassVar[int | None] = 100
    channels: ClassVar[int | None] = 3

    def places(self, root: Path) -> tuple[Path, ...]:
        return (_CIFAR100.place(root),)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/cifar-100-python``, or ``cifar-100-binary``."""
        return _read(self, root, download, _CIFAR100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def _read(
    source: Source, root: Path | None, download: bool, form: _Form, mean: tuple[float, ...], std: tuple[float, ...]
) -> RawDataset:
    if root is None:
        raise missing(source.name, root, form.layout)
    files = (*form.binary_train, form.binary_test, form.binary_names) if form.is_binary(root) else form.files
    folder = form.place(root)
    if not download and not all((folder / file).is_file() for file in files):
        raise missing(source.name, root, form.layout)
    if form.is_binary(root):
        classes = cast("int", source.num_classes)
        train, test, names = _binary(folder, form, classes)
    else:
        train, test, names = _by_torchvision(root, form, download)
    origin = f"{form.kind} (Krizhevsky, 2009), files as published"
    return RawDataset(train, test, names, mean, std, "none stated by the authors", origin)


def _by_torchvision(root: Path, form: _Form, download: bool) -> tuple[RawSplit, RawSplit, tuple[str, ...]]:
    from torchvision import datasets  # here, because it takes seconds, which missing files should not cost

    opened, folder = getattr(datasets, form.kind), root / form.folder
    try:
        train, test = (opened(root=str(root), train=part, download=download) for part in (True, False))
    except URLError as error:
        raise not_downloaded(folder, error.reason) from error
    except (RuntimeError, OSError) as error:  # torchvision compares check sums before it reads
        raise damaged(folder, "a check sum differs from the published files") from error
    return _split(train), _split(test), tuple(train.classes)


def _split(found: Any) -> RawSplit:
    return RawSplit(np.ascontiguousarray(found.data), np.asarray(found.targets, dtype=np.int64))


def _binary(folder: Path, form: _Form, classes: int) -> tuple[RawSplit, RawSplit, tuple[str, ...]]:
    names = tuple(line.strip() for line in read_text_lines(folder / form.binary_names) if line.strip())
    if len(names) != classes:
        raise damaged(folder / form.binary_names, f"{len(names)} names of classes, expected {classes}")
    each = TRAIN_SIZE // len(form.binary_train)
    parts = [_records(folder / file, form.label, each, classes) for file in form.binary_train]
    train = RawSplit(
        np.concatenate([part.decoded() for part in parts]), np.concatenate([part.labels for part in parts])
    )
    return train, _records(folder / form.binary_test, form.label, TEST_SIZE, classes), names


def _records(path: Path, label: int, count: int, classes: int) -> RawSplit:
    values = np.fromfile(path, dtype=np.uint8)
    size = label + 1 + 3 * _SIDE**2
    if len(values) != count * size:
        raise damaged(path, f"{len(values)} bytes, expected {count} images of {size}")
    records = values.reshape(count, size)
    labels = records[:, label].astype(np.int64)
    if labels.max() >= classes:
        raise damaged(path, f"label {labels.max()}, expected 0 to {classes - 1}")
    planes = records[:, label + 1 :].reshape(count, 3, _SIDE, _SIDE)
    return RawSplit(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels)
