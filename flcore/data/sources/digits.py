"""The default data, which need no file and no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flcore.data.sources.base import RawDataset, RawSplit, Source

_SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits(Source, name="digits", num_classes=10, channels=1):
    """Handwritten digits 8x8, 1,437 / 360 images, 10 classes; bundled with scikit-learn.

    The stratified 80/20 split is the same for every experiment seed.
    """

    def places(self, root: Path) -> tuple[Path, ...]:
        return ()

    def load(self, root: Path | None = None, download: bool = False) -> RawDataset:
        from sklearn.datasets import load_digits  # here, because it takes seconds
        from sklearn.model_selection import train_test_split

        bunch = load_digits()
        # Values are 0..16 and everything downstream divides by 255, so that v is stored as the nearest integer to v/16.
        images = np.floor(bunch.images * 255 / 16 + 0.5).astype(np.uint8)
        labels = bunch.target.astype(np.int64)
        train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=_SPLIT_SEED)
        return RawDataset(
            train=_take(images, labels, train),
            test=_take(images, labels, test),
            class_names=tuple(str(digit) for digit in range(10)),
            mean=(0.5,),
            std=(0.5,),
            licence="CC BY 4.0 (UCI data), BSD-3 (scikit-learn)",
            source="sklearn.datasets.load_digits; UCI Optical Recognition of Handwritten Digits, test part",
        )


def _take(images: np.ndarray, labels: np.ndarray, indices: np.ndarray) -> RawSplit:
    order = np.sort(indices)
    return RawSplit(images[order], labels[order])
