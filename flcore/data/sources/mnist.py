"""MNIST, FashionMNIST and EMNIST: gray images 28x28 in IDX files, named as torchvision names them."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal
from urllib.error import URLError

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, missing, not_downloaded

_SIDE = 28
_MERGED = "cijklmopsuvwxyz"  # letters with one class for both cases in the split `balanced`
_SIGNS = {
    "letters": string.ascii_lowercase,
    "balanced": string.digits + string.ascii_uppercase + "".join(s for s in string.ascii_lowercase if s not in _MERGED),
    "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
}
PUBLISHED: dict[str, tuple[int, int]] = {
    "MNIST": (60_000, 10_000),
    "FashionMNIST": (60_000, 10_000),
    "EMNIST letters": (124_800, 20_800),
    "EMNIST balanced": (112_800, 18_800),
    "EMNIST byclass": (697_932, 116_323),
}
"""Training and test images of each data set."""


@dataclass(frozen=True)
class _IdxSource(Source):
    """Files ``<root>/<kind>/raw/<prefix>-{images-idx3,labels-idx1}-ubyte``; torchvision's class ``kind`` fetches them.

    ``facts`` are class names, mean, standard deviation, licence and source.
    """

    channels: ClassVar[int | None] = 1
    kind: ClassVar[str]
    facts: ClassVar[tuple[Sequence[str], float, float, str, str]]

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / self.kind / "raw",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        names, mean, std, licence, source = self.facts
        train, test = self._read(root, download, "train", "t10k")
        return RawDataset(train, test, tuple(names), (mean,), (std,), licence, source)

    def _read(self, root: Path | None, download: bool, *prefixes: str, split: str | None = None) -> list[RawSplit]:
        """Return the split of each prefix; ``split`` names a part of the data set."""
        names = [f"{prefix}-{part}-ubyte" for prefix in prefixes for part in ("images-idx3", "labels-idx1")]
        layout = f"{self.kind}/raw/ with {', '.join(names)}"
        if root is None:
            raise missing(self.name, root, layout)
        (raw,) = _IdxSource.places(self, root)
        if not all((raw / file).is_file() for file in names):
            if not download:
                raise missing(self.name, root, layout)
            _fetch(self.kind, root, [raw / file for file in names], {} if split is None else {"split": split})
        published = self.kind if split is None else f"{self.kind} {split}"
        splits = [_read_split(raw, prefix) for prefix in prefixes]
        for prefix, read, count in zip(prefixes, splits, PUBLISHED[published], strict=True):
            if read.images.shape != (count, _SIDE, _SIDE):
                number, height, width = read.images.shape
                raise DataError(
                    f"{raw / prefix}-*: {number} images of {height} x {width}, but {published} has {count} of "
                    f"{_SIDE} x {_SIDE}; for images of your own set data.name=imagefolder"
                )
        return splits


@dataclass(frozen=True)
class Mnist(_IdxSource, name="mnist", num_classes=10):
    """Handwritten digits 28x28, 60,000 / 10,000 images, 10 classes; torchvision (LeCun et al.).

    Mean and standard deviation are those in the FedCSPC and FedProto code.
    """

    kind = "MNIST"
    facts = (
        *(string.digits, 0.1307, 0.3081, "CC BY-SA 3.0 as commonly stated"),
        "MNIST (LeCun, Cortes, Burges), files as published",
    )


@dataclass(frozen=True)
class FashionMnist(_IdxSource, name="fashionmnist"):
    """Clothing 28x28, 60,000 / 10,000 images, 10 classes; torchvision (Zalando Research)."""

    num_classes = property(lambda self: 10 - len({*self.drop_classes}))
    unsaid = frozenset({"drop_classes"})
    kind = "FashionMNIST"
    facts = (
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        *(0.2860, 0.3530, "MIT", "Fashion-MNIST (Zalando Research), files as published"),
    )

    drop_classes: tuple[int, ...] = param(
        (), "numbers of classes left out of both splits; the others keep their order (FedPA's code: [0])", low=0, high=9
    )

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        raw = super().load(root, download)
        if not self.drop_classes:
            return raw
        kept = [label for label in range(10) if label not in self.drop_classes]
        train, test = (
            replace(split, labels=np.searchsorted(kept, split.labels))
            for split in (one.take(np.flatnonzero(np.isin(one.labels, kept))) for one in (raw.train, raw.test))
        )
        return replace(raw, train=train, test=test, class_names=tuple(raw.class_names[label] for label in kept))


@dataclass(frozen=True)
class Emnist(_IdxSource, name="emnist"):
    """Handwritten letters and digits 28x28, 26 to 62 classes; torchvision (Cohen et al., NIST).

    Labels start at 0 and images are upright, unlike in the files (data.md, section 1.3).
    """

    num_classes = property(lambda self: len(_SIGNS[self.split]))
    kind = "EMNIST"

    split: Literal["letters", "balanced", "byclass"] = param(
        "letters", "letters: 26 classes, both cases together; balanced: 47; byclass: digits, upper and lower case, 62"
    )

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        prefixes = (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        first = 1 if self.split == "letters" else 0  # letters count from 1, after a dummy class
        train, test = (
            RawSplit(np.ascontiguousarray(split.decoded().transpose(0, 2, 1)), split.labels - first)
            for split in self._read(root, download, *prefixes, split=self.split)
        )
        source = f"EMNIST (Cohen et al., 2017), split {self.split}; images transposed to stand upright"
        licence = "NIST-derived, public domain in the US"
        return RawDataset(train, test, tuple(_SIGNS[self.split]), (0.5,), (0.5,), licence, source)


def _fetch(kind: str, root: Path, files: Sequence[Path], options: dict[str, str]) -> None:
    from torchvision import datasets  # here, because it takes seconds

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
        images = _read_idx(raw / f"{prefix}-images-idx3-ubyte", 3)
        labels = _read_idx(raw / f"{prefix}-labels-idx1-ubyte", 1).astype(np.int64)
    except (ValueError, OSError) as error:
        raise damaged(raw / f"{prefix}-*", error) from error
    if len(images) != len(labels):
        raise damaged(raw / f"{prefix}-*", f"images {images.shape} and labels {labels.shape} do not belong together")
    return RawSplit(images, labels)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the values of an IDX file of bytes: 0, 0, 8, the number of dimensions, 32-bit big-endian sizes, values.

    torchvision reads them too, but takes seconds to import.

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
