"""MNIST, FashionMNIST and EMNIST: gray images 28x28 in IDX files, read by torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.error import URLError

import numpy as np

from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, missing, not_downloaded
from flcore.params import param

# What torchvision raises on a file that is too short, has a wrong magic number or a wrong size.
_UNREADABLE = (RuntimeError, AssertionError, ValueError, KeyError, IndexError, OSError)


@dataclass(frozen=True)
class Mnist(Source):
    """60,000 / 10,000 digits; mean and standard deviation as in the FedCSPC and FedProto code."""

    name: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "handwritten digits 28x28, 60,000 / 10,000 images, 10 classes; torchvision (LeCun et al.)"

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/MNIST/raw``."""
        train, test = _read_pair(
            self.name, root, download, "MNIST", ("train", "t10k"), lambda **options: _torchvision().MNIST(**options)
        )
        return RawDataset(
            train,
            test,
            class_names=tuple(str(digit) for digit in range(10)),
            mean=(0.1307,),
            std=(0.3081,),
            licence="CC BY-SA 3.0 as commonly stated",
            source="MNIST (LeCun, Cortes, Burges), files as published",
        )


@dataclass(frozen=True)
class FashionMnist(Source):
    """60,000 / 10,000 articles of clothing, 6,000 / 1,000 per class."""

    name: ClassVar[str] = "fashionmnist"
    summary: ClassVar[str] = "clothing 28x28, 60,000 / 10,000 images, 10 classes; torchvision (Zalando Research)"

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/FashionMNIST/raw``."""
        train, test = _read_pair(
            self.name, root, download, "FashionMNIST", ("train", "t10k"), lambda **o: _torchvision().FashionMNIST(**o)
        )
        return RawDataset(
            train,
            test,
            class_names=tuple(_torchvision().FashionMNIST.classes),
            mean=(0.2860,),
            std=(0.3530,),
            licence="MIT",
            source="Fashion-MNIST (Zalando Research), files as published",
        )


@dataclass(frozen=True)
class Emnist(Source):
    """Handwritten letters and digits. Labels from 0 and images upright, unlike in the files (data.md, section 1.3)."""

    name: ClassVar[str] = "emnist"
    summary: ClassVar[str] = "handwritten letters and digits 28x28, 26 to 62 classes; torchvision (Cohen et al., NIST)"

    split: Literal["letters", "balanced", "byclass"] = param(
        "letters", "letters: 26 classes, both cases together; balanced: 47; byclass: digits, upper and lower case, 62"
    )

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/EMNIST/raw``."""
        prefixes = (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        train, test = _read_pair(
            self.name, root, download, "EMNIST", prefixes, lambda **o: _torchvision().EMNIST(split=self.split, **o)
        )
        names = _torchvision().EMNIST.classes_split_dict[self.split]
        first = 1 if self.split == "letters" else 0  # letters count from 1, behind a dummy class
        return RawDataset(
            _upright(train, first),
            _upright(test, first),
            class_names=tuple(names[first:]),
            mean=(0.5,),
            std=(0.5,),
            licence="NIST-derived, public domain in the US",
            source=f"EMNIST (Cohen et al., 2017), split {self.split}; images transposed to stand upright",
        )


def _torchvision() -> Any:
    from torchvision import datasets  # here, because it takes seconds, which missing files should not cost

    return datasets


def _upright(split: RawSplit, first: int) -> RawSplit:
    return RawSplit(np.ascontiguousarray(split.decoded().transpose(0, 2, 1)), split.labels - first)


def _read_pair(
    name: str,
    root: Path | None,
    download: bool,
    folder: str,
    prefixes: tuple[str, str],
    opened: Callable[..., Any],
) -> tuple[RawSplit, RawSplit]:
    """Training and test split from the IDX files ``<root>/<folder>/raw/<prefix>-{images-idx3,labels-idx1}-ubyte``."""
    names = [f"{prefix}-{part}-ubyte" for prefix in prefixes for part in ("images-idx3", "labels-idx1")]
    layout = f"{folder}/raw/ with {', '.join(names)}"
    if root is None:
        raise missing(name, root, layout)
    raw = root / folder / "raw"
    if not download and not all((raw / file).is_file() for file in names):
        raise missing(name, root, layout)
    pair = [_read_split(root, raw, prefix, download, opened, prefix == prefixes[0]) for prefix in prefixes]
    return pair[0], pair[1]


def _read_split(
    root: Path, raw: Path, prefix: str, download: bool, opened: Callable[..., Any], train: bool
) -> RawSplit:
    try:
        found = opened(root=str(root), train=train, download=download)
    except URLError as error:
        raise not_downloaded(raw, error.reason) from error
    except _UNREADABLE as error:
        if not (raw / f"{prefix}-images-idx3-ubyte").is_file():  # torchvision reports failed mirrors as RuntimeError
            raise not_downloaded(raw, "no mirror answered") from error
        raise damaged(raw / f"{prefix}-*", str(error) or "wrong size or header") from error
    images, labels = found.data.numpy(), found.targets.numpy().astype(np.int64)
    if images.ndim != 3 or images.dtype != np.uint8 or labels.ndim != 1 or len(images) != len(labels):
        raise damaged(raw / f"{prefix}-*", f"images {images.shape} and labels {labels.shape} do not belong together")
    return RawSplit(images, labels)
