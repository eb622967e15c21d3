"""A Hugging Face dataset on disk, in the three layouts that its library writes (checked against datasets 5.2)."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flcore.core.errors import DataError
from flcore.data.sources.huggingface import HuggingFace

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"},
    "writer": {"dtype": "string", "_type": "Value"},
}


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((6, 8), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def table(first: int, count: int, features: dict[str, Any] | None = FEATURES) -> Any:
    """Image n is of the value n, of class n mod 3 and by writer n mod 2."""
    rows = range(first, first + count)
    columns = {
        "image": [{"bytes": png(row), "path": None} for row in rows],
        "label": [row % 3 for row in rows],
        "writer": [f"w{row % 2}" for row in rows],
    }
    made = pa.table(columns)
    described = {} if features is None else {"huggingface": json.dumps({"info": {"features": features}})}
    return made.replace_schema_metadata(described)


def write(path: Path, made: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(made, path)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, made.schema) as stream:
        stream.write_table(made)


LAYOUTS = {
    "save_to_disk": (
        "train/data-00000-of-00002.arrow",
        "train/data-00001-of-00002.arrow",
        "test/data-00000-of-00001.arrow",
    ),
    "repository": ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet"),
    "cache": (
        "0.0.0/ab12/x-train-00000-of-00002.arrow",
        "0.0.0/ab12/x-train-00001-of-00002.arrow",
        "0.0.0/ab12/x-test.arrow",
    ),
}


def dataset(
    root: Path, files: Sequence[str] = LAYOUTS["save_to_disk"], features: dict[str, Any] | None = FEATURES
) -> Path:
    """Six training images in two files, and three test images."""
    for name, first in zip(files, (0, 3, 6), strict=True):
        write(root / name, table(first, 3, features))
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_have_the_same_images(layout: str, tmp_path: Path) -> None:
    root = dataset(tmp_path / "hf", LAYOUTS[layout])
    write(root / "train" / "cache-0123.arrow", table(90, 3)) if layout == "cache" else None  # what map() leaves
    raw = HuggingFace(group_column="writer").load(root)
    assert raw.train.decoded()[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert raw.test.decoded()[:, 0, 0].tolist() == [6, 7, 8]
    assert raw.train.decoded().shape == (6, 6, 8)
    assert raw.class_names == ("cat", "dog", "owl") and raw.train.labels.tolist() == [0, 1, 2] * 2
    assert raw.group_names == ("w0", "w1")
    assert raw.train.groups is not None and raw.train.groups.tolist() == [0, 1] * 3


def test_a_dataset_without_splits_is_divided(tmp_path: Path) -> None:
    """Half of two images of each class is one: three in all."""
    write(tmp_path / "hf" / "data-00000-of-00001.arrow", table(0, 6))
    raw = HuggingFace(test_fraction=0.5).load(tmp_path / "hf")
    assert sorted(raw.test.labels.tolist()) == [0, 1, 2]
    assert sorted([*raw.train.decoded()[:, 0, 0], *raw.test.decoded()[:, 0, 0]]) == list(range(6))


def test_columns_and_splits_of_other_names_are_chosen(tmp_path: Path) -> None:
    files = ("fold1/a-0.parquet", "fold1/a-1.parquet", "fold2/a.parquet")
    root = dataset(tmp_path / "hf", files, features=None)
    chosen = {"image_column": "image", "label_column": "writer", "train_split": "fold1", "test_split": "fold2"}
    raw = HuggingFace(**chosen).load(root)
    assert raw.class_names == ("w0", "w1") and raw.test.labels.tolist() == [0, 1, 0]


def test_an_image_may_be_a_file_below_the_folder_and_none_outside(tmp_path: Path) -> None:
    root = dataset(tmp_path / "hf")
    (root / "one.png").write_bytes(png(200))
    (tmp_path / "outside.png").write_bytes(png(201))
    for name, value in (("one.png", 200), ("../outside.png", None)):
        made = table(6, 3).set_column(0, "image", pa.array([{"bytes": None, "path": name}] * 3))
        write(root / "test" / "data-00000-of-00001.arrow", made)
        if value is not None:
            assert HuggingFace().load(root).test.decoded()[:, 0, 0].tolist() == [value] * 3
        else:
            with pytest.raises(DataError, match=r"test/data-00000-of-00001\.arrow, row 0"):
                HuggingFace().load(root)


@pytest.mark.parametrize(
    ("chosen", "key"),
    [
        ({"test_split": "validation"}, "data.test_split"),
        ({"train_split": "all"}, "data.train_split"),
        ({"test_fraction": 0.2}, "data.test_fraction"),
        ({"label_column": "digit"}, "data.label_column = digit"),
        ({"group_column": "user"}, "data.group_column = user"),
    ],
    ids=str,
)
def test_what_is_not_there_is_named(chosen: dict[str, Any], key: str, tmp_path: Path) -> None:
    root = dataset(tmp_path / "hf")
    with pytest.raises(DataError) as refused:
        HuggingFace(**chosen).load(root)
    assert str(root) in str(refused.value) and key in str(refused.value)


def test_data_that_say_no_types_need_columns(tmp_path: Path) -> None:
    root = dataset(tmp_path / "hf", features=None)
    with pytest.raises(DataError, match=r"data\.image_column to one of image, label and writer"):
        HuggingFace().load(root)


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    root = dataset(tmp_path / "hf")
    damaged = root / "train" / "data-00001-of-00002.arrow"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(DataError, match="data-00001-of-00002"):
        HuggingFace().load(root)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(DataError, match=folder.name):
            HuggingFace().load(folder)
