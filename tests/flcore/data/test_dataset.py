"""Preparing, storing and loading datasets; normalisation and resizing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flcore.core.errors import ConfigError, Cure, DataError
from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.images import channel_statistics, convert_channels, normalise, resize
from flcore.data.partition import Partition
from flcore.data.sources import SOURCES
from flcore.data.sources.base import RawDataset, RawSplit, Source


@dataclass(frozen=True)
class Made(Source):
    """Six training images 2x3 in colour with labels 0, 1, 1, 0, 1, 0, three test images, with or without groups."""

    name: ClassVar[str] = "made"
    summary: ClassVar[str] = "made by a test"
    with_groups: bool = False
    labels: str = "011010"

    def load(self, root: Path | None, download: bool) -> RawDataset:
        images = np.arange(6 * 2 * 3 * 3, dtype=np.uint8).reshape(6, 2, 3, 3)
        groups = np.array([5, 5, 6, 6, 7, 7]) if self.with_groups else None
        train = RawSplit(images, np.array([int(label) for label in self.labels]), groups)
        test = RawSplit(images[:3], np.array([0, 1, 1]), None if groups is None else groups[:3])
        return RawDataset(train, test, ("no", "yes"), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "free", "a test")


def test_prepare_gives_channels_first_contiguous_tensors() -> None:
    data = prepare_dataset(Made())
    images = data.train.images
    assert images.shape == (6, 3, 2, 3) and images.dtype == torch.uint8 and images.is_contiguous()
    # Image 1, row 0, column 2, channel 1 was number 18 + 0 + 2 · 3 + 1 = 25.
    assert images[1, 1, 0, 2] == 25
    assert data.train.labels.dtype == torch.int64 and len(data.train) == 6
    assert (data.meta.name, data.meta.num_classes, data.meta.shape) == ("made", 2, (3, 2, 3))
    assert (data.meta.mean, data.meta.train_size, data.meta.test_size) == ((0.1, 0.2, 0.3), 6, 3)


def test_limit_keeps_the_first_of_each_class_in_file_order() -> None:
    """Labels 0, 1, 1, 0, 1, 0: the first two of class 0 are images 0 and 3, of class 1 images 1 and 2."""
    data = prepare_dataset(Made(with_groups=True), limit_per_class=2)
    assert data.train.images[:, 0, 0, 0].tolist() == [0, 18, 36, 54]
    assert data.train.labels.tolist() == [0, 1, 1, 0] and data.test.labels.tolist() == [0, 1, 1]
    assert data.train.groups is not None and data.train.groups.tolist() == [5, 5, 6, 6]


def test_channels_and_size_on_request() -> None:
    data = prepare_dataset(SOURCES["digits"](), size=28, channels=3, limit_per_class=1)
    assert data.meta.shape == (3, 28, 28) and data.meta.mean == (0.5,) * 3 and data.meta.std == (0.5,) * 3
    assert torch.equal(data.train.images[:, 0], data.train.images[:, 2])
    gray = prepare_dataset(Made(), channels=1)
    assert gray.meta.shape == (1, 2, 3) and len(gray.meta.mean) == 1
    halves = prepare_dataset(Made(), normalisation=(0.5, 0.25))
    assert (halves.meta.mean, halves.meta.std) == ((0.5,) * 3, (0.25,) * 3)
    assert halves.meta.fingerprint != prepare_dataset(Made()).meta.fingerprint
    assert halves.meta.preparation["normalisation"] == [0.5, 0.25]  # as it always stood in fingerprints


def test_normalisation_of_each_channel(tmp_path: Path) -> None:
    """Values 51, 102, 204 of 255 are 0.2, 0.4, 0.8; less 0.1, 0.5, 0.9, by 0.2, 0.5, 0.1: 0.5, -0.2, -1."""
    data = prepare_dataset(Made(), normalisation=((0.1, 0.5, 0.9), (0.2, 0.5, 0.1)), directory=tmp_path)
    meta = data.meta
    assert (meta.mean, meta.std) == ((0.1, 0.5, 0.9), (0.2, 0.5, 0.1))
    assert meta.preparation["normalisation"] == [[0.1, 0.5, 0.9], [0.2, 0.5, 0.1]]
    pixel = torch.tensor([51, 102, 204], dtype=torch.uint8).view(3, 1, 1)
    assert normalise(pixel, meta.mean, meta.std).flatten().tolist() == pytest.approx([0.5, -0.2, -1.0], abs=1e-6)
    assert Dataset.load(tmp_path).meta == meta
    one_std = prepare_dataset(Made(), normalisation=((0.1, 0.5, 0.9), 0.5)).meta
    assert (one_std.mean, one_std.std) == ((0.1, 0.5, 0.9), (0.5, 0.5, 0.5))
    assert len({meta.fingerprint, one_std.fingerprint, prepare_dataset(Made()).meta.fingerprint}) == 3


@pytest.mark.parametrize(
    ("channels", "wrong", "words"),
    [
        (
            None,
            (0.1, 0.2),
            r"data\.mean = \[0\.1, 0\.2\]: images of made have 3 channels; give one number, or one for ",
        ),
        (1, (0.1, 0.2, 0.3), r"data\.mean = \[0\.1, 0\.2, 0\.3\]: images of made have 1 channel; give one number"),
        (None, (), r"data\.mean = \[\]: images of made have 3 channels"),
    ],
)
def test_a_normalisation_that_does_not_fit_leaves_what_was_prepared(
    channels: int | None, wrong: tuple[float, ...], words: str, tmp_path: Path
) -> None:
    before = prepare_dataset(Made(), directory=tmp_path)
    with pytest.raises(ConfigError, match=words):
        prepare_dataset(Made(), channels=channels, normalisation=(wrong, 0.5), directory=tmp_path)
    assert Dataset.load(tmp_path).meta == before.meta


def test_labels_outside_the_classes_are_refused() -> None:
    with pytest.raises(DataError, match="train labels reach from 0 to 2, expected 0 to 1"):
        prepare_dataset(Made(labels="012010"))


def test_fingerprint_depends_on_content_and_preparation() -> None:
    prints = {
        prepare_dataset(source, size=size, limit_per_class=limit).meta.fingerprint
        for source in (Made(), Made(with_groups=True), Made(labels="111010"))
        for size, limit in ((None, None), (4, None), (None, 3))
    }
    assert len(prints) == 9
    assert prepare_dataset(Made()).meta.fingerprint == prepare_dataset(Made()).meta.fingerprint


@pytest.mark.parametrize("with_groups", [False, True])
def test_round_trip_and_equal_bytes(with_groups: bool, tmp_path: Path) -> None:
    data = prepare_dataset(Made(with_groups=with_groups), limit_per_class=2)
    data.save(tmp_path / "one")
    read = Dataset.load(tmp_path / "one")
    read.check_content(tmp_path / "one")
    read.save(tmp_path / "two")
    for name in ("train.safetensors", "test.safetensors", "meta.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "meta.json", "test.safetensors", "train.safetensors",
    ]  # fmt: skip
    assert read.meta == data.meta
    assert torch.equal(read.train.images, data.train.images) and torch.equal(read.test.labels, data.test.labels)
    assert (read.train.groups is not None) == with_groups


def spoil(name: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-3])

    return harm


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def drop_labels(folder: Path) -> None:
    save_file({"images": load_file(folder / "train.safetensors")["images"]}, folder / "train.safetensors")


def float_images(folder: Path) -> None:
    tensors = load_file(folder / "train.safetensors")
    save_file(tensors | {"images": tensors["images"].float()}, folder / "train.safetensors")


def swap_splits(folder: Path) -> None:
    (folder / "train.safetensors").write_bytes((folder / "test.safetensors").read_bytes())


def drop_key(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["mean"]
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        (spoil("train.safetensors"), "train.safetensors"),
        (spoil("meta.json"), "meta.json"),
        (remove("test.safetensors"), "test.safetensors"),
        (drop_labels, "train.safetensors"),
        (float_images, "train.safetensors"),
        (swap_splits, "train.safetensors"),
        (drop_key, "meta.json"),
    ],
)
def test_damage_is_noticed_and_the_file_named(harm: Callable[[Path], None], file: str, tmp_path: Path) -> None:
    prepare_dataset(Made()).save(tmp_path)
    harm(tmp_path)
    with pytest.raises(DataError, match=f"{file}: ") as told:
        Dataset.load(tmp_path)
    assert Cure.PREPARE_AGAIN in str(told.value)


@pytest.mark.parametrize(
    ("kind", "file", "cure"), [(Dataset, "meta.json", Cure.PREPARE), (Partition, "manifest.json", Cure.DIVIDE)]
)
def test_a_folder_of_something_else_is_not_damaged_and_nobody_is_told_to_delete_it(
    kind: type[Dataset | Partition], file: str, cure: str, tmp_path: Path
) -> None:
    (tmp_path / "ch1.tex").write_text("mine")
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=re.escape(file)) as told:
            kind.load(place)
        assert cure in str(told.value)
        assert str(told.value).startswith(f"{place}: ") and "delete" not in str(told.value)


def test_a_changed_pixel_is_found_on_request(tmp_path: Path) -> None:
    prepare_dataset(Made()).save(tmp_path)
    content = bytearray((tmp_path / "train.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "train.safetensors").write_bytes(content)
    with pytest.raises(DataError, match="differs from the fingerprint"):
        Dataset.load(tmp_path).check_content(tmp_path)


def test_normalise_by_hand() -> None:
    """(255/255 - 0.5)/0.25 = 2, (0 - 0.5)/0.25 = -2, (51/255 - 0.5)/0.25 = -1.2; the second channel is x/255."""
    images = torch.tensor([[[[255, 0, 51]], [[255, 0, 51]]]], dtype=torch.uint8)
    result = normalise(images, (0.5, 0.0), (0.25, 1.0))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor([[[[2.0, -2.0, -1.2]], [[1.0, 0.0, 0.2]]]]))


def test_resize_keeps_constants_and_averages_halves() -> None:
    """Halving with antialias weights pixels 1, 3, 3, 1 over 8; at the edge 3, 3, 1 over 7 (rounded in fixed point)."""
    constant = torch.full((2, 1, 8, 8), 77, dtype=torch.uint8)
    assert (resize(constant, (28, 28)) == 77).all()
    ramp = torch.tensor([[[[0, 80, 160, 240]]]], dtype=torch.uint8)
    # (3·0 + 3·80 + 1·160)/7 = 57.1 and, mirrored, 240 - 57.1 = 182.9
    assert resize(ramp, (1, 2)).flatten().tolist() == [57, 183]


def test_resize_does_not_depend_on_threads_or_batch() -> None:
    images = torch.randint(0, 256, (40, 3, 13, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = resize(images, (28, 28))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(resize(images, (28, 28)), whole)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([resize(image[None], (28, 28)) for image in images]), whole)


def test_gray_of_pure_colours() -> None:
    """ITU-R 601: 0.299, 0.587 and 0.114 of 255 are 76.2, 149.7 and 29.1; white stays 255."""
    colours = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], dtype=torch.uint8)
    assert convert_channels(colours[:, :, None, None], 1).flatten().tolist() == [76, 150, 29, 255]


def test_channel_statistics_agree_with_numpy() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    mean, std = channel_statistics(torch.from_numpy(images).permute(0, 3, 1, 2))
    assert np.allclose(mean, images.mean(axis=(0, 1, 2)) / 255, atol=5.1e-5)
    assert np.allclose(std, images.std(axis=(0, 1, 2)) / 255, atol=5.1e-5)
