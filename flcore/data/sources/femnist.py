"""FEMNIST, and the two other data sets that papers call by this name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.core.text import shorten
from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, hold_out_of_groups, missing
from flcore.data.sources.mnist import Emnist
from flcore.io.files import NOT_JSON

_LAYOUT = "femnist/train/*.json and femnist/test/*.json, or femnist/all_data/*.json, as made by LEAF"
_NAMES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_SIDE = 28
_DRAW_SEED = 0


@dataclass(frozen=True)
class Femnist(Source, name="femnist", num_classes=len(_NAMES), channels=1):
    """Handwritten characters 28x28 by writer, 62 classes; LEAF (Caldas et al.) or EMNIST byclass.

    Classes are digits, upper case, lower case; three data sets go by this name (data.md, section 1.3):

    - ``by_writer`` (LEAF; FedPG): all samples with their writers as groups. LEAF stores dark ink on white; images are
      inverted, so that ink is bright as in MNIST.
    - ``class_balanced`` (FedMLP): equally many images per class, without writers, drawn from EMNIST byclass; the draw
      is
      the same for every seed of an experiment.
    - ``byclass`` (FedProto, GFPL): all of EMNIST byclass, without writers.
    """

    reading: Literal["by_writer", "class_balanced", "byclass"] = param(
        "by_writer", "by_writer: LEAF's files; class_balanced: equal classes (FedMLP); byclass: all of EMNIST byclass"
    )
    train_per_class: int = param(600, "training images per class, for reading: class_balanced", low=1)
    test_per_class: int = param(100, "test images per class, for reading: class_balanced", low=1)
    test_fraction: float = param(
        0.2, "share of each writer's samples to test on, where LEAF made no split", above=0, below=1
    )

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "femnist" if self.reading == "by_writer" else root / "EMNIST" / "raw",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read ``<root>/femnist`` (LEAF) or ``<root>/EMNIST/raw``; LEAF's files cannot be fetched."""
        if self.reading == "by_writer":
            return self._by_writer(root)
        raw = Emnist(split="byclass").load(root, download)
        if self.reading == "byclass":
            return raw
        rng = np.random.default_rng(_DRAW_SEED)
        train = _draw(raw.train, self.train_per_class, "train", rng)
        test = _draw(raw.test, self.test_per_class, "test", rng)
        source = f"{raw.source}; {self.train_per_class} / {self.test_per_class} images drawn per class"
        return RawDataset(train, test, raw.class_names, raw.mean, raw.std, raw.licence, source)

    def _by_writer(self, root: Path | None) -> RawDataset:
        if root is None:
            raise missing(self.name, root, _LAYOUT, can_download=False)
        folder = root / "femnist"
        files = {part: sorted((folder / part).glob("[!.]*.json")) for part in ("train", "test", "all_data")}
        if files["train"] and files["test"]:
            (train, train_writers), (test, test_writers) = _read(files["train"]), _read(files["test"])
            names = np.unique(np.concatenate([train_writers, test_writers]))
            train = replace(train, groups=np.searchsorted(names, train_writers))
            test = replace(test, groups=np.searchsorted(names, test_writers))
        elif files["all_data"]:
            everything, writers = _read(files["all_data"])
            names, groups = np.unique(writers, return_inverse=True)
            everything = replace(everything, groups=groups)
            train, test = map(everything.take, hold_out_of_groups(groups, self.test_fraction))
        else:
            raise missing(self.name, root, _LAYOUT, can_download=False)
        return RawDataset(
            train,
            test,
            class_names=_NAMES,
            mean=(0.5,),
            std=(0.5,),
            licence="BSD-2 (LEAF); NIST-derived images, public domain in the US",
            source=f"FEMNIST (LEAF, Caldas et al., 2018), {len(names)} writers; images inverted to bright ink",
        )


def _draw(split: RawSplit, per_class: int, part: str, rng: np.random.Generator) -> RawSplit:
    chosen = []
    for c, name in enumerate(_NAMES):
        members = np.flatnonzero(split.labels == c)
        if len(members) < per_class:
            raise DataError(
                f"data.{part}_per_class = {per_class}: class {name!r} has {len(members)} {part} images; use fewer"
            )
        chosen.append(rng.permutation(members)[:per_class])
    return split.take(np.sort(np.concatenate(chosen)))


def _read(files: list[Path]) -> tuple[RawSplit, np.ndarray]:
    """Return the samples of LEAF files in their order, and the writer of each."""
    pixels = bytearray()  # grows in place: a list of arrays would have to be copied at the end
    labels: list[np.ndarray] = []
    writers: list[str] = []
    for file in files:
        for writer, images, classes in _samples(file):
            pixels += images.tobytes()
            labels.append(classes)
            writers += [writer] * len(classes)
    images = np.frombuffer(pixels, dtype=np.uint8).reshape(-1, _SIDE, _SIDE)
    return RawSplit(images, np.concatenate(labels)), np.array(writers)


def _samples(file: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield writer, inverted images uint8 [n, 784] and labels int64 [n] of each writer, or raise DataError."""
    try:
        content: Any = json.loads(file.read_bytes())
        users, sizes, data = content["users"], content["num_samples"], content["user_data"]
        lists = isinstance(users, list) and isinstance(sizes, list) and isinstance(data, dict)
    except (*NOT_JSON, TypeError, KeyError, OSError) as error:
        raise damaged(file, "not JSON with users, num_samples and user_data") from error
    if not lists or not all(isinstance(writer, str) for writer in users) or len(set(users)) < len(users):
        raise damaged(file, "users is no list of different names, num_samples no list, or user_data no object")
    if len(users) != len(sizes):
        raise damaged(file, f"{len(users)} users and {len(sizes)} num_samples")
    for writer, size in zip(users, sizes, strict=True):
        try:
            images, labels = np.array(data[writer]["x"]), np.array(data[writer]["y"])
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise damaged(file, f"writer {shorten(writer)}: no x of images and y of labels") from error
        # Neither texts that look like numbers nor labels that are none are read as what they may have been.
        if images.dtype.kind not in "iuf" or labels.dtype.kind not in "iu":
            raise damaged(file, f"writer {shorten(writer)}: x is no list of images, or y no list of whole numbers")
        images, labels = images.astype(np.float32), labels.astype(np.int64)
        if images.shape != (size, _SIDE * _SIDE) or labels.shape != (size,):
            raise damaged(
                file,
                f"writer {shorten(writer)}: x {images.shape} and y {labels.shape} for {shorten(size)} samples of 784",
            )
        if not (images.min() >= 0 and images.max() <= 1 and labels.min() >= 0 and labels.max() < len(_NAMES)):
            raise damaged(file, f"writer {shorten(writer)}: values beyond 0..1 or labels beyond 0..{len(_NAMES) - 1}")
        yield writer, np.floor((1 - images) * 255 + 0.5).astype(np.uint8), labels
