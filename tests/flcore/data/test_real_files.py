"""Partitions of the real MNIST and CIFAR-10 files: the numbers that data.md states of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.dividing import make_partition
from flcore.data.imbalance import Imbalance
from flcore.data.partitioners.classes_per_client import ClassesPerClient
from flcore.data.partitioners.simple import Dominant, Shards
from flcore.data.partitioners.ways_shots import WaysShots
from flcore.data.sources.imagefolder import ImageFolder
from flcore.data.sources.mnist import Mnist


@pytest.fixture(scope="module")
def mnist(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root: Path = request.getfixturevalue("real_data")
    if not (root / "MNIST" / "raw" / "train-images-idx3-ubyte").exists():
        pytest.skip("real MNIST not found")
    return prepare_dataset(Mnist(), root, directory=tmp_path_factory.mktemp("mnist"))


def test_two_class_division(mnist: Dataset) -> None:
    """Halves of the smallest two classes (5,421 and 5,842): 2,710 + 2,921 = 5,631; of the largest: 3,371 + 3,133."""
    for seed in range(5):
        made = make_partition(mnist, ClassesPerClient(), num_clients=10, seed=seed)
        assert ((made.counts > 0).sum(axis=1) == 2).all()
        assert min(made.sizes["train"]) >= 5631 and max(made.sizes["train"]) <= 6504


def test_dominant_share(mnist: Dataset) -> None:
    made = make_partition(mnist, Dominant(), num_clients=10, seed=0)
    shares = np.diag(made.counts) / made.counts.sum(axis=1)
    assert round(shares.min(), 3) >= 0.944 and round(shares.max(), 3) <= 0.956
    assert (made.counts > 0).all()


def test_shards_of_the_long_tail(mnist: Dataset) -> None:
    """39,273 samples in 400 shards of 98 or 99: tasks of 392 to 396, all of them used."""
    made = make_partition(mnist, Shards(shards=4, tasks=5), num_clients=20, seed=0, imbalance=Imbalance(0.5))
    assert made.counts.sum() == made.class_counts.sum() == 39273
    sizes = made.task_counts.sum(axis=2)
    assert sizes.shape == (20, 5) and sizes.min() >= 392 and sizes.max() <= 396
    assert (made.task_counts > 0).sum(axis=2).mean() == pytest.approx(3.5, abs=0.2)


def test_ways_and_shots_are_disjoint(mnist: Dataset) -> None:
    """Few-shot tests of 40 images: 20 · 40 = 800 of at least 892 images of a class."""
    made = make_partition(mnist, WaysShots(), num_clients=20, seed=0, client_test="few_shot", test_shots=40)
    assert not made.overlap and made.notes == ()
    assert set(made.test_counts.ravel()) == {0, 40}


@pytest.mark.slow
def test_cifar10_from_its_zip(real_data: Path, tmp_path: Path) -> None:
    if not (real_data / "cifar10-images.zip").exists():
        pytest.skip("cifar10-images.zip not found")
    data = prepare_dataset(ImageFolder(), real_data / "cifar10-images.zip", directory=tmp_path)
    assert np.bincount(data.train.labels).tolist() == [5000] * 10 and data.meta.shape == (3, 32, 32)
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    # JPEG copies: close to the mean and standard deviation of the published arrays.
    assert np.allclose(data.meta.mean, (0.4914, 0.4822, 0.4465), atol=0.001)
    assert np.allclose(data.meta.std, (0.2470, 0.2435, 0.2616), atol=0.003)
