"""CIFAR-10 and CIFAR-100: colour images 32x32, read and checked by torchvision (which unpickles the official files)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import URLError

import numpy as np

from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, missing, not_downloaded


@dataclass(frozen=True)
class Cifar10(Source):
    """50,000 / 10,000 images, 5,000 / 1,000 per class."""

    name: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = "objects 32x32 in colour, 50,000 / 10,000 images, 10 classes; torchvision (Krizhevsky)"
    num_classes: ClassVar[int | None] = 10
    channels: ClassVar[int | None] = 3

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "cifar-10-batches-py",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/cifar-10-batches-py``."""
        return _read(
            self.name,
            root,
            download,
            "CIFAR10",
            "cifar-10-batches-py",
            (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
        )


@dataclass(frozen=True)
class Cifar100(Source):
    """50,000 / 10,000 images with the 100 fine labels, 500 / 100 per class."""

    name: ClassVar[str] = "cifar100"
    summary: ClassVar[str] = "objects 32x32 in colour, 50,000 / 10,000 images, 100 classes; torchvision (Krizhevsky)"
    num_classes: ClassVar[int | None] = 100
    channels: ClassVar[int | None] = 3

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "cifar-100-python",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/cifar-100-python``."""
        return _read(
            self.name,
            root,
            download,
            "CIFAR100",
            "cifar-100-python",
            ("train", "test", "meta"),
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
        )


def _read(
    name: str,
    root: Path | None,
    download: bool,
    kind: str,
    folder_name: str,
    files: Sequence[str],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> RawDataset:
    """What torchvision's class ``kind`` finds, which reads ``files`` below ``<root>/<folder_name>``."""
    layout = f"{folder_name}/ with {', '.join(files)}"
    if root is None:
        raise missing(name, root, layout)
    folder = root / folder_name
    if not download and not all((folder / file).is_file() for file in files):
        raise missing(name, root, layout)
    from torchvision import datasets  # here, because it takes seconds, which missing files should not cost

    opened = getattr(datasets, kind)
    try:
        train, test = (opened(root=str(root), train=part, download=download) for part in (True, False))
    except URLError as error:
        raise not_downloaded(folder, error.reason) from error
    except (RuntimeError, OSError) as error:  # torchvision compares check sums before it reads
        raise damaged(folder, "a check sum differs from the published files") from error
    return RawDataset(
        _split(train), _split(test), tuple(train.classes), mean, std, "none stated by the authors",
        f"{kind} (Krizhevsky, 2009), files as published",
    )  # fmt: skip


def _split(found: Any) -> RawSplit:
    return RawSplit(np.ascontiguousarray(found.data), np.asarray(found.targets, dtype=np.int64))
