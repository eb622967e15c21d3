"""MNIST, FashionMNIST and EMNIST: gray images 28x28 in IDX files, named as torchvision names them."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.error import URLError

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, missing, not_downloaded

_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
# Letters with one class for both cases in the split `balanced`.
_MERGED = "cijklmopsuvwxyz"
_SIGNS: Mapping[str, str] = {
    "letters": string.ascii_lowercase,
    "balanced": string.digits + string.ascii_uppercase + "".join(s for s in string.ascii_lowercase if s not in _MERGED),
    "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
}

_SIDE = 28
PUBLISHED: dict[str, tuple[int, int]] = {
    "MNIST": (60_000, 10_000),
    "FashionMNIST": (60_000, 10_000),
    "EMNIST letters": (124_800, 20_800),
    "EMNIST balanced": (112_800, 18_800),
    "EMNIST byclass": (697_932, 116_323),
}
"""Training and test images of each data set, as published."""


@dataclass(frozen=True)
class Mnist(Source):
    """60,000 / 10,000 digits; mean and standard deviation as in the FedCSPC and FedProto code."""

    name: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "handwritten digits 28x28, 60,000 / 10,000 images, 10 classes; torchvision (LeCun et al.)"
    num_classes: ClassVar[int | None] = 10
    channels: ClassVar[int | None] = 1

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "MNIST" / "raw",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/MNIST/raw``."""
        train, test = _read_pair(self.name, root, download, "MNIST", ("train", "t10k"))
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
    num_classes: ClassVar[int | None] = len(_CLOTHES)
    channels: ClassVar[int | None] = 1

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "FashionMNIST" / "raw",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/FashionMNIST/raw``."""
        train, test = _read_pair(self.name, root, download, "FashionMNIST", ("train", "t10k"))
        return RawDataset(
            train,
            test,
            class_names=_CLOTHES,
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
    num_classes = property(lambda self: len(_SIGNS[self.split]))
    channels: ClassVar[int | None] = 1

    split: Literal["letters", "balanced", "byclass"] = param(
        "letters", "letters: 26 classes, both cases together; balanced: 47; byclass: digits, upper and lower case, 62"
    )

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "EMNIST" / "raw",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/EMNIST/raw``."""
        prefixes = (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        train, test = _read_pair(self.name, root, download, "EMNIST", prefixes, split=self.split)
        first = 1 if self.split == "letters" else 0  # letters count from 1, after a dummy class
        return RawDataset(
            _upright(train, first),
            _upright(test, first),
            class_names=tuple(_SIGNS[self.split]),
            mean=(0.5,),
            std=(0.5,),
            licence="NIST-derived, public domain in the US",
            source=f"EMNIST (Cohen et al., 2017), split {self.split}; images transposed to stand upright",
        )


def _upright(split: RawSplit, first: int) -> RawSplit:
    return RawSplit(np.ascontiguousarray(split.decoded().transpose(0, 2, 1)), split.labels - first)


def _read_pair(
    name: str, root: Path | None, download: bool, kind: str, prefixes: tuple[str, str], **options: Any
) -> tuple[RawSplit, RawSplit]:
    """Return both splits from the IDX files ``<root>/<kind>/raw/<prefix>-{images-idx3,labels-idx1}-ubyte``.

    ``kind`` is torchvision's class, which downloads them with ``options``.
    """
    names = [f"{prefix}-{part}-ubyte" for prefix in prefixes for part in ("images-idx3", "labels-idx1")]
    layout = f"{kind}/raw/ with {', '.join(names)}"
    if root is None:
        raise missing(name, root, layout)
    raw = root / kind / "raw"
    if not all((raw / file).is_file() for file in names):
        if not download:
            raise missing(name, root, layout)
        _fetch(kind, root, [raw / file for file in names], options)
    published = " ".join((kind, *options.values()))
    train, test = (_read_split(raw, prefix) for prefix in prefixes)
    for prefix, split, count in zip(prefixes, (train, test), PUBLISHED[published], strict=True):
        if split.images.shape != (count, _SIDE, _SIDE):
            found, height, width = split.images.shape
            raise DataError(
                f"{raw / prefix}-*: {found} images of {height} x {width}, but {published} has {count} of "
                f"{_SIDE} x {_SIDE}; for images of your own set data.name=imagefolder"
            )
    return train, test


def _fetch(kind: str, root: Path, files: Sequence[Path], options: Mapping[str, Any]) -> None:
    from torchvision import datasets  # here, because it takes seconds, and files that are there do without

    raw = files[0].parent
    try:
        getattr(datasets, kind)(root=str(root), download=True, **options)
    except URLError as error:
        raise not_downloaded(raw, error.reason) from error
    except (RuntimeError, AssertionError, ValueError, KeyError, IndexError, OSError) as error:
        if not all(file.is_file() for file in files):  # torchvision reports failed mirrors as RuntimeError
            raise not_downloaded(raw, "no mirror answered") from error
        raise damaged(raw, str(error) or "wrong size or header") from error


def _read_split(raw: Path, prefix: str) -> RawSplit:
    try:
        images = read_idx(raw / f"{prefix}-images-idx3-ubyte", 3)
        labels = read_idx(raw / f"{prefix}-labels-idx1-ubyte", 1).astype(np.int64)
    except (ValueError, OSError) as error:
        raise damaged(raw / f"{prefix}-*", error) from error
    if len(images) != len(labels):
        raise damaged(raw / f"{prefix}-*", f"images {images.shape} and labels {labels.shape} do not belong together")
    return RawSplit(images, labels)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the values of an IDX file of unsigned bytes: 0, 0, 8, the number of dimensions, a size each, values.

    Sizes are 32 bit, big-endian. torchvision, which also reads them, takes seconds to import.

    Raises:
        ValueError: the header has other ``dimensions`` or another type, or its sizes do not fit the file.
    """
    content = np.fromfile(path, dtype=np.uint8)
    start = 4 * (dimensions + 1)
    if len(content) < start or content[:4].tolist() != [0, 0, 8, dimensions]:
        raise ValueError(f"{path.name} does not begin as an IDX file of bytes in {dimensions} dimension(s)")
    sizes = content[4:start].view(">u4").tolist()
    if len(content) - start != math.prod(sizes) or 0 in sizes:
        stated = " x ".join(map(str, sizes))
        raise ValueError(f"{path.name} states {stated} values and has {len(content) - start}")
    return content[start:].reshape(sizes)
