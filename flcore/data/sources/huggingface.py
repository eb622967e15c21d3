"""Images of a Hugging Face dataset on disk, read with Apache Arrow; nothing is fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flcore.core.errors import ConfigError, DataError, listed
from flcore.core.params import param
from flcore.data.sources.base import MOST_LISTED, RawDataset, RawSplit, damaged, leads_out, missing
from flcore.data.sources.own import LICENCE, OwnSource, check_names, no_test, numbered

EXPECTED = "a folder of save_to_disk, of the cache, or of a dataset's repository, with .arrow or .parquet files"

_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "extra", "unsupervised")
"""Usual names of splits."""


@dataclass(frozen=True)
class HuggingFace(OwnSource, name="huggingface"):
    """A Hugging Face dataset of images on disk: a folder of save_to_disk, of the cache, or with Parquet files.

    Column types and class names come from the files. Needs the package pyarrow, which comes with MLflow.
    """

    image_column: str | None = param(None, "column of the images; null: the only one of type Image")
    label_column: str | None = param(
        None, "column of the classes, of type ClassLabel, integers or text; null: the only one of type ClassLabel"
    )
    group_column: str | None = param(None, "column of each sample's writer, user or site, for partition.name=by_group")
    train_split: str = param("train", "name of the split to train on, as in the files' names")
    test_split: str = param(
        "test", "name of the split to test on; another one where data.test_fraction is set is left out"
    )

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """List the images below the folder ``root``; they are decoded later."""
        if root is None or not root.is_dir():
            raise missing(self.name, root, EXPECTED, can_download=False)
        by_split = _files_by_split(root, {*_SPLITS, self.train_split, self.test_split})
        if not by_split:
            raise DataError(f"{root}: no .arrow or .parquet file; expected {EXPECTED}")
        train = "" if list(by_split) == [""] else self.train_split  # one dataset without a name
        known = listed([name or "one without a name" for name in sorted(by_split)], MOST_LISTED)
        if train not in by_split:
            raise DataError(f"{root}: no split {train}, there is {known}; set data.train_split")
        has_test = self.test_split in by_split
        if not has_test and self.test_fraction is None:
            raise no_test(root, f"; or name a split in data.test_split (there is {known})")
        names = [train, self.test_split] if has_test else [train]
        parts = [_Part(root, by_split[name], self) for name in names]
        return self._dataset(root, parts)

    def _dataset(self, root: Path, parts: Sequence[_Part]) -> RawDataset:
        class_names, labels = _classes(root, parts)
        check_names(class_names, "class", root)
        with_groups = self.group_column is not None
        every = np.unique(np.concatenate([part.groups for part in parts]))
        groups = [numbered(part.groups, every) for part in parts]
        contents = {name: content for part in parts for name, content in part.images.items()}
        images = self.image_files(list(contents), lambda name: _bytes_of(contents[name], root))
        raw = [
            RawSplit(images(list(part.images)), of_labels, of_groups if with_groups else None)
            for part, of_labels, of_groups in zip(parts, labels, groups, strict=True)
        ]
        if self.test_fraction is not None:
            rows = self.drawn_test(labels[0], groups[0], class_names, root, has_test=len(raw) > 1)
            raw = [raw[0].take(part) for part in rows]
        group_names = tuple(map(str, every.tolist())) if with_groups else ()
        check_names(group_names, "group", root)
        return RawDataset(raw[0], raw[1], class_names, None, None, LICENCE, "Hugging Face dataset", group_names)


@dataclass
class _Part:
    """A split's columns.

    Attributes:
        images: Arrow's value by name. labels: as in the files. groups: text [N], empty without a column.
        class_names: of ClassLabel; empty for another type.
    """

    images: dict[str, Any] = field(default_factory=dict)
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0))
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0))
    class_names: Sequence[str] = ()

    def __init__(self, root: Path, files: Sequence[Path], source: HuggingFace) -> None:
        tables = {path: _table(path) for path in files}
        features = next(filter(None, map(_features, tables.values())), {})
        image = _column(root, "image_column", source.image_column, tables, features, "Image")
        label = _column(root, "label_column", source.label_column, tables, features, "ClassLabel")
        group = source.group_column
        self.images = {}
        labels: list[Any] = []
        groups: list[str] = []
        for path, table in tables.items():
            if group is not None and group not in table.column_names:
                raise _no_column(root, "group_column", group, table)
            name = path.relative_to(root).as_posix()
            self.images |= {f"{name}, row {row}": value for row, value in enumerate(table[image])}
            labels += table[label].to_pylist()
            groups += [""] * len(table) if group is None else map(str, table[group].to_pylist())
        if not labels or any(not isinstance(value, int | str) or value == -1 for value in labels):
            raise DataError(f"{root}: {label} has rows without a class; remove them")
        self.labels, self.groups = np.array(labels), np.array(groups)
        self.class_names = tuple(features.get(label, {}).get("names", ()))


def _classes(root: Path, parts: Sequence[_Part]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Return the names of classes that training has, and each part's labels from 0."""
    known = np.unique(parts[0].labels)
    labels = [numbered(part.labels, known) for part in parts]
    if any((of_part < 0).any() for of_part in labels):
        raise DataError(f"{root}: the test split has classes that the training split has not")
    names = parts[0].class_names
    return tuple(names[value] if names else str(value) for value in known.tolist()), labels


def _files_by_split(root: Path, names: Collection[str]) -> dict[str, list[Path]]:
    """Return files by the last of ``names`` in their path; "" without any."""
    files = [path for path in root.rglob("*.parquet") if path.is_file()]
    files = files or [path for path in root.rglob("*.arrow") if path.is_file() and not path.name.startswith("cache-")]
    by_split: dict[str, list[Path]] = {}
    for path in sorted(files):
        words = re.split(r"[^A-Za-z0-9]+", path.relative_to(root).as_posix())
        split = next((word for word in reversed(words) if word in names), "")
        by_split.setdefault(split, []).append(path)
    return by_split


def _table(path: Path) -> Any:
    """Return a file's table; of an Arrow file views of the mapped file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError("data.name = huggingface: pyarrow is not installed; pip install pyarrow") from error
    try:
        if path.suffix == ".parquet":
            return parquet.ParquetFile(path).read()
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error


def _features(table: Any) -> Mapping[str, Any]:
    """Return the types of columns as Hugging Face wrote them; empty if it did not."""
    described = (table.schema.metadata or {}).get(b"huggingface")
    return {} if described is None else json.loads(described)["info"]["features"]


def _column(
    root: Path, key: str, chosen: str | None, tables: Mapping[Path, Any], features: Mapping[str, Any], kind: str
) -> str:
    """Return the column that ``key`` chooses, or the only one of a type."""
    one = next(iter(tables.values()))
    if chosen is not None:
        if chosen not in one.column_names:
            raise _no_column(root, key, chosen, one)
        return chosen
    found = [name for name, feature in features.items() if isinstance(feature, dict) and feature.get("_type") == kind]
    if len(found) != 1:
        which = f"several columns of type {kind}: {', '.join(found)}" if found else f"no column of type {kind}"
        raise DataError(f"{root}: {which}; set data.{key} to one of {listed(one.column_names, MOST_LISTED)}")
    return found[0]


def _no_column(root: Path, key: str, chosen: str, table: Any) -> DataError:
    columns = listed(table.column_names, MOST_LISTED)
    return DataError(f"data.{key} = {chosen}: {root} has no such column; its columns are {columns}")


def _bytes_of(value: Any, root: Path) -> bytes:
    """Return an encoded image: its bytes in the file, or of a file below ``root``."""
    content = value.as_py()
    if isinstance(content, bytes):
        return content
    known = content if isinstance(content, dict) else {}
    if known.get("bytes") is not None:
        return bytes(known["bytes"])
    path = known.get("path")
    return b"" if not path or leads_out(path) or not (root / path).is_file() else (root / path).read_bytes()
