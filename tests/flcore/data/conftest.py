"""What the data tests share: the place of real images, and a dataset of labels."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flcore.data.dataset import Dataset, Meta, Split

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images: PROTOFL_DATA, or shared/data beside the repository."""
    return Path(os.environ.get("PROTOFL_DATA") or REPOSITORY.parent / "shared" / "data")


def labelled(labels: np.ndarray, test_labels: np.ndarray, num_classes: int) -> Dataset:
    """Images of one black pixel with these labels, and a group for every five samples."""

    def split(values: np.ndarray) -> Split:
        images = torch.zeros(len(values), 1, 1, 1, dtype=torch.uint8)
        return Split(images, torch.from_numpy(values.astype(np.int64)), torch.arange(len(values)) // 5)

    meta = Meta(
        name="labelled",
        num_classes=num_classes,
        class_names=tuple(str(c) for c in range(num_classes)),
        shape=(1, 1, 1),
        mean=(0.5,),
        std=(0.5,),
        licence="none",
        source="made by a test",
        train_size=len(labels),
        test_size=len(test_labels),
        preparation={},
        fingerprint="of labelled",
    )
    return Dataset(split(labels), split(test_labels), meta)


@pytest.fixture
def with_labels() -> Callable[..., Dataset]:
    """A function that makes a dataset of given training and test labels and number of classes."""
    return labelled
