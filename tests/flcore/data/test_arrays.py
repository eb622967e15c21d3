"""Images of one's own in a NumPy or safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flcore.core.errors import DataError
from flcore.data.sources.arrays import Arrays

COUNT = 12


def images(*shape: int) -> np.ndarray:
    """Image n has the value n everywhere, so that each can be told from the others."""
    return np.broadcast_to(np.arange(shape[0], dtype=np.uint8).reshape(-1, *[1] * (len(shape) - 1)), shape).copy()


def content(**changes: Any) -> dict[str, np.ndarray]:
    """Twelve training and six test images of classes 3, 5 and 8; None leaves an array out."""
    labels = np.array([3, 5, 8] * 4)
    found = {
        "train_images": images(COUNT, 8, 6),
        "train_labels": labels,
        "test_images": images(6, 8, 6),
        "test_labels": labels[:6],
        **changes,
    }
    return {name: values for name, values in found.items() if values is not None}


def saved(folder: Path, arrays: dict[str, np.ndarray], name: str = "mine.npz") -> Path:
    path = folder / name
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file(arrays, path)
    return path


@pytest.mark.parametrize("name", ["mine.npz", "mine.safetensors"])
def test_labels_count_from_zero_and_classes_keep_their_names(name: str, tmp_path: Path) -> None:
    raw = Arrays().load(saved(tmp_path, content(), name))
    assert raw.class_names == ("3", "5", "8")
    assert raw.train.labels.tolist() == [0, 1, 2] * 4 and raw.test.labels.tolist() == [0, 1, 2] * 2
    assert raw.train.decoded().shape == (COUNT, 8, 6) and raw.test.decoded()[5, 0, 0] == 5
    assert raw.train.groups is None and raw.group_names == ()


def test_as_medmnist_and_keras_publish_them(tmp_path: Path) -> None:
    """MedMNIST's labels are a column and its validation split is left out; Keras has other names."""
    columns = content(
        train_labels=np.array([[0], [1]] * 6), test_labels=np.array([[0], [1]] * 3), val_images=images(3, 8, 6)
    )
    assert Arrays().load(saved(tmp_path, columns)).train.labels.tolist() == [0, 1] * 6
    keras = dict(zip(("x_train", "y_train", "x_test", "y_test"), content().values(), strict=True))
    assert len(Arrays().load(saved(tmp_path, keras)).test.labels) == 6


@pytest.mark.parametrize("shape", [(8, 6, 3), (3, 8, 6), (8, 6, 1), (1, 8, 6)])
def test_channels_may_come_first_or_last(shape: tuple[int, ...], tmp_path: Path) -> None:
    arrays = content(train_images=images(COUNT, *shape), test_images=images(6, *shape))
    decoded = Arrays().load(saved(tmp_path, arrays)).train.decoded()
    assert decoded.shape == ((COUNT, 8, 6, 3) if 3 in shape else (COUNT, 8, 6))
    assert decoded[7].min() == decoded[7].max() == 7


def test_groups_and_text(tmp_path: Path) -> None:
    """Sites are numbered in order of their names, over both splits."""
    arrays = content(
        train_labels=np.array(["cat", "ant", "cat"] * 4),
        test_labels=np.array(["ant", "cat"] * 3),
        train_groups=np.array(["south", "north"] * 6),
        test_groups=np.array(["east"] * 6),
    )
    raw = Arrays().load(saved(tmp_path, arrays))
    assert raw.class_names == ("ant", "cat") and raw.train.labels[:3].tolist() == [1, 0, 1]
    assert raw.group_names == ("east", "north", "south")
    assert raw.train.groups is not None and raw.train.groups[:2].tolist() == [2, 1]


def test_a_test_split_can_be_drawn(tmp_path: Path) -> None:
    """A quarter of four images of each class is one image: three in all."""
    alone = content(test_images=None, test_labels=None)
    raw = Arrays(test_fraction=0.25).load(saved(tmp_path, alone))
    assert len(raw.train.labels) == 9 and sorted(raw.test.labels.tolist()) == [0, 1, 2]
    values = [int(image[0, 0]) for part in (raw.train, raw.test) for image in part.decoded()]
    assert sorted(values) == list(range(COUNT))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"test_images": None}, "test_fraction"),
        ({"test_labels": np.array([3, 5, 8, 9, 3, 5])}, "test_labels has 9"),
        ({"train_labels": None}, "train_labels"),
        ({"train_labels": np.arange(5)}, "train_labels"),
        ({"train_labels": np.zeros(COUNT)}, "train_labels"),
        ({"train_images": np.zeros((COUNT, 8, 6), np.float32)}, "train_images"),
        ({"train_images": np.zeros((COUNT, 8, 6, 2), np.uint8)}, "train_images"),
        ({"train_labels": np.array([object()] * COUNT)}, "Python objects"),
    ],
    ids=range(8),
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    path = saved(tmp_path, content(**changes))
    with pytest.raises(DataError) as refused:
        Arrays().load(path)
    assert str(path) in str(refused.value) and key in str(refused.value)


@pytest.mark.parametrize("name", ["mine.npz", "mine.safetensors"])
def test_a_damaged_or_missing_file_is_named(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, content(), name)
    path.write_bytes(path.read_bytes()[:100])
    for wrong in (path, tmp_path / "other.npz"):
        with pytest.raises(DataError, match=wrong.stem):
            Arrays().load(wrong)
    with pytest.raises(DataError, match=r"test_fraction = 0\.5"):
        Arrays(test_fraction=0.5).load(saved(tmp_path, content()))
