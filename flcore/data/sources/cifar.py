"""CIFAR-10 and CIFAR-100: colour images 32x32, as published for Python or as binary files.

torchvision reads, checks and unpickles the files for Python. A binary file is a list of records: a byte for the label
(CIFAR-100: one for the coarse, one for the fine label), then 32 x 32 bytes of red, green and blue.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.error import URLError

import numpy as np

from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, missing, not_downloaded, read_text_lines

_SIDE = 32
TRAIN_SIZE, TEST_SIZE = 50_000, 10_000
"""Images as published."""


@dataclass(frozen=True)
class _Cifar(Source):
    """Names of the files for Python, and of the binary ones: training files, test file, names of classes.

    ``label`` is the byte of a binary record that holds the label, the last before the pixels.
    """

    channels: ClassVar[int | None] = 3
    kind: ClassVar[str]
    folder: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    binary_folder: ClassVar[str]
    binary_files: ClassVar[tuple[str, ...]]
    label: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / (self.binary_folder if self._is_binary(root) else self.folder),)

    def _is_binary(self, root: Path) -> bool:
        return not (root / self.folder).exists() and (root / self.binary_folder).is_dir()

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        binary = f"{self.binary_folder}/ with {', '.join(self.binary_files)}"
        layout = f"{self.folder}/ with {', '.join(self.files)}, or {binary}"
        if root is None:
            raise missing(self.name, root, layout)
        files = self.binary_files if self._is_binary(root) else self.files
        (folder,) = self.places(root)
        if not download and not all((folder / file).is_file() for file in files):
            raise missing(self.name, root, layout)
        read = self._read_binary(folder) if self._is_binary(root) else self._read_by_torchvision(root, download)
        source = f"{self.kind} (Krizhevsky, 2009), files as published"
        return RawDataset(*read, self.mean, self.std, "none stated by the authors", source)

    def _read_by_torchvision(self, root: Path, download: bool) -> tuple[RawSplit, RawSplit, tuple[str, ...]]:
        from torchvision import datasets  # here, because it takes seconds

        opened, folder = getattr(datasets, self.kind), root / self.folder
        try:
            parts = [opened(root=str(root), train=part, download=download) for part in (True, False)]
        except URLError as error:
            raise not_downloaded(folder, error.reason) from error
        except (RuntimeError, OSError) as error:  # torchvision compares check sums before it reads
            raise damaged(folder, "a check sum differs from the published files") from error
        train, test = (
            RawSplit(np.ascontiguousarray(part.data), np.asarray(part.targets, dtype=np.int64)) for part in parts
        )
        return train, test, tuple(parts[0].classes)

    def _read_binary(self, folder: Path) -> tuple[RawSplit, RawSplit, tuple[str, ...]]:
        *train, test, names = (folder / file for file in self.binary_files)
        class_names = tuple(line.strip() for line in read_text_lines(names) if line.strip())
        if len(class_names) != self.num_classes:
            raise damaged(names, f"{len(class_names)} names of classes, expected {self.num_classes}")
        parts = [self._read_records(file, TRAIN_SIZE // len(train), len(class_names)) for file in train]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        tested = self._read_records(test, TEST_SIZE, len(class_names))
        return RawSplit(images, labels), RawSplit(*tested), class_names

    def _read_records(self, path: Path, count: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
        values = np.fromfile(path, dtype=np.uint8)
        size = self.label + 1 + 3 * _SIDE**2
        if len(values) != count * size:
            raise damaged(path, f"{len(values)} bytes, expected {count} images of {size}")
        records = values.reshape(count, size)
        labels = records[:, self.label].astype(np.int64)
        if labels.max() >= classes:
            raise damaged(path, f"label {labels.max()}, expected 0 to {classes - 1}")
        planes = records[:, self.label + 1 :].reshape(count, 3, _SIDE, _SIDE)
        return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


@dataclass(frozen=True)
class Cifar10(_Cifar, name="cifar10", num_classes=10):
    """Objects 32x32 in colour, 50,000 / 10,000 images, 10 classes; torchvision (Krizhevsky)."""

    kind, folder, label = "CIFAR10", "cifar-10-batches-py", 0
    files = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
    binary_folder = "cifar-10-batches-bin"
    binary_files = (*(f"data_batch_{number}.bin" for number in range(1, 6)), *("test_batch.bin", "batches.meta.txt"))
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Cifar100(_Cifar, name="cifar100", num_classes=100):
    """Objects 32x32 in colour, 50,000 / 10,000 images, 100 classes; torchvision (Krizhevsky).

    The labels are the fine ones.
    """

    kind, folder, label = "CIFAR100", "cifar-100-python", 1
    files = ("train", "test", "meta")
    binary_folder, binary_files = "cifar-100-binary", ("train.bin", "test.bin", "fine_label_names.txt")
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
