"""Images in one NumPy or safetensors file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flcore.core.errors import DataError, listed
from flcore.data.sources.base import MOST_LISTED, RawDataset, RawSplit, damaged, missing
from flcore.data.sources.own import LICENCE, OwnSource, check_names, no_test, numbered

EXPECTED = "a file .npz or .safetensors with train_images, train_labels, test_images and test_labels"

_SAME = {"x_train": "train_images", "y_train": "train_labels", "x_test": "test_images", "y_test": "test_labels"}
"""Keras's names."""


@dataclass(frozen=True)
class Arrays(OwnSource, name="arrays"):
    """Your own images in a .npz or .safetensors file, as MedMNIST and Keras publish them.

    ``train_images`` uint8 [N, H, W], [N, H, W, 3] or [N, 3, H, W], ``train_labels`` [N] or [N, 1] of integers or, in
    NumPy's file, text; likewise ``test_images`` and ``test_labels``, or data.test_fraction. ``train_groups`` and
    ``test_groups`` [N] name each sample's writer, user or site. Other arrays are ignored.
    """

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """Read the file ``root``."""
        if root is None or not root.is_file():
            raise missing(self.name, root, EXPECTED, can_download=False)
        arrays = {_SAME.get(name, name): values for name, values in _read(root).items()}
        has_test = "test_images" in arrays
        parts = [_Part(arrays, root, split) for split in (("train", "test") if has_test else ("train",))]
        labels = np.unique(parts[0].labels)
        class_names = tuple(map(str, labels.tolist()))
        check_names(class_names, "class", root)
        known = [numbered(part.labels, labels) for part in parts]
        for part, numbers in zip(parts, known, strict=True):
            if (numbers < 0).any():
                names = listed(map(repr, np.unique(part.labels[numbers < 0]).tolist()), MOST_LISTED)
                raise DataError(f"{root}: test_labels has {names}, which train_labels has not")
        of_groups = [part.groups for part in parts if part.groups is not None]
        with_groups = len(of_groups) == len(parts)
        every = np.unique(np.concatenate(of_groups)) if with_groups else np.array([""])
        groups = [numbered(one, every) for one in of_groups] if with_groups else [np.zeros_like(one) for one in known]
        raw = [
            RawSplit(part.images, numbers, one if with_groups else None)
            for part, numbers, one in zip(parts, known, groups, strict=True)
        ]
        if self.test_fraction is not None:
            rows = self.drawn_test(known[0], groups[0], class_names, root, has_test=has_test)
            raw = [raw[0].take(part) for part in rows]
        elif not has_test:
            raise no_test(root)
        group_names = tuple(map(str, every.tolist())) if with_groups else ()
        check_names(group_names, "group", root)
        return RawDataset(raw[0], raw[1], class_names, None, None, LICENCE, f"arrays in {root.name}", group_names)


class _Part:
    """The arrays of a split, checked."""

    def __init__(self, arrays: Mapping[str, np.ndarray], root: Path, split: str) -> None:
        lacking = [f"{split}_{name}" for name in ("images", "labels") if f"{split}_{name}" not in arrays]
        if lacking:
            raise DataError(
                f"{root}: has no {lacking[0]}, only {listed(sorted(arrays), MOST_LISTED)}; expected {EXPECTED}"
            )
        self.images = _channels_last(arrays[f"{split}_images"], f"{root}: {split}_images")
        self.labels = _vector(arrays[f"{split}_labels"], len(self.images), f"{root}: {split}_labels")
        groups = arrays.get(f"{split}_groups")
        self.groups = None if groups is None else _vector(groups, len(self.images), f"{root}: {split}_groups")


def _channels_last(images: np.ndarray, where: str) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise DataError(f"{where}: {images.dtype} {list(images.shape)}; expected uint8 [N, H, W] or [N, H, W, 3]")
    if images.ndim == 4 and images.shape[3] not in (1, 3) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if images.ndim == 4 and images.shape[3] not in (1, 3):
        raise DataError(f"{where}: {list(images.shape)}; expected 1 or 3 channels")
    return np.ascontiguousarray(images[..., 0] if images.ndim == 4 and images.shape[3] == 1 else images)


def _vector(values: np.ndarray, length: int, where: str) -> np.ndarray:
    flat = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if flat.shape != (length,) or flat.dtype.kind not in "iuU":
        raise DataError(f"{where}: {values.dtype} {list(values.shape)}; expected integers or text [{length}]")
    return flat


def _read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file; raise DataError if it cannot be read, or holds Python objects."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return load_file(path)
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, Mapping):
                raise DataError(f"{path}: a single array; expected {EXPECTED}")
            return {name: file[name] for name in file}
    except DataError:
        raise
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise DataError(
                f"{path}: holds Python objects, which may run code; save arrays of numbers or text"
            ) from error
        raise damaged(path, error) from error
    except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise damaged(path, error) from error
    except Exception as error:  # safetensors' own
        raise damaged(path, error) from error
