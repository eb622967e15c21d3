"""A prepared dataset: two splits of uint8 images as tensors, their metadata, and their form on disk."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flcore.core.errors import Cure, DataError
from flcore.core.params import LARGEST
from flcore.core.text import shorten
from flcore.data.images import Normalisation, channel_statistics, convert_channels, of_channels, resize
from flcore.data.sources.base import BadFileError, RawDataset, RawSplit, Source, bad_files
from flcore.io import disk
from flcore.io.files import Blocks, content_digest, read_json, read_tensors, write_json, write_tensors

_CURE = Cure.PREPARE_AGAIN
_BLOCK_BYTES = 32 * 2**20  # images decoded and converted at a time
_OPTIONAL = frozenset({"group_names", "skipped"})  # in meta.json only where there are any
_SMALLEST_STD = 1e-4  # a constant channel must not divide by zero


@dataclass(frozen=True, eq=False)
class Split:
    """``images`` uint8 [N, C, H, W] contiguous, ``labels`` int64 [N], ``groups`` int64 [N] or None."""

    images: Tensor
    labels: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True)
class Meta:
    """Metadata of a dataset.

    ``shape`` is (channels, height, width); ``mean`` and ``std`` are per channel on the scale 0 to 1; ``preparation``
    has the options of the source and the requested size, channels and limit; ``fingerprint`` identifies all content.
    ``group_names`` are by group number, such as sites; ``skipped`` maps omitted files to the reason.
    """

    name: str
    num_classes: int
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    source: str
    train_size: int
    test_size: int
    preparation: Mapping[str, Any]
    fingerprint: str
    group_names: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        """Return the content of ``meta.json``, without empty ``group_names`` and ``skipped``."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value or key not in _OPTIONAL}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test split with :class:`Meta`."""

    train: Split
    test: Split
    meta: Meta

    def save(self, directory: Path) -> None:
        """Write ``train.safetensors``, ``test.safetensors`` and ``meta.json``; same content, same bytes."""
        # A folder without meta.json is unfinished: a stop in between never leaves a mixture that looks whole.
        disk.remove(directory / "meta.json", missing_ok=True)
        for part, split in (("train", self.train), ("test", self.test)):
            write_tensors(directory / f"{part}.safetensors", split.tensors())
        write_json(directory / "meta.json", self.meta.to_mapping())

    def check_content(self, directory: Path) -> None:
        """Raise DataError, with the ``directory``, if images and labels have another hash than the fingerprint."""
        if _fingerprint(self.train, self.test, self.meta) != self.meta.fingerprint:
            raise DataError(f"{directory}: content differs from the fingerprint in meta.json; {_CURE}")

    @classmethod
    def sealed(cls, train: Split, test: Split, meta: Meta) -> Dataset:
        """Return a dataset with the fingerprint of its content in place of ``meta.fingerprint``."""
        return cls(train, test, dataclasses.replace(meta, fingerprint=_fingerprint(train, test, meta)))

    @classmethod
    def load(cls, directory: Path) -> Dataset:
        """Map a directory of :meth:`save`; raise DataError if a file is missing, damaged or of other data."""
        path = directory / "meta.json"
        if not path.exists():  # it may be a folder of anything
            raise DataError(f"{directory}: no prepared data there (meta.json); {Cure.PREPARE}")
        try:
            meta = _meta_from_json(path, read_json(path, _CURE))
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{path}: damaged ({shorten(str(error))}); {_CURE}") from error
        train = _load_split(directory / "train.safetensors", meta, meta.train_size)
        test = _load_split(directory / "test.safetensors", meta, meta.test_size)
        return cls(train, test, meta)


def prepare_dataset(
    source: Source,
    root: Path | None = None,
    *,
    download: bool = False,
    size: int | None = None,
    channels: int | None = None,
    limit_per_class: int | None = None,
    normalisation: Normalisation | None = None,
    directory: Path | None = None,
) -> Dataset:
    """Read ``source`` and convert its images to one form (data.md, section 1.0).

    Args:
        root: folder (or zip) of the files. download: fetch missing files.
        size: resize to ``size`` x ``size``, bilinear and antialiased; None keeps the size.
        channels: 1 or 3: convert to gray or RGB; None keeps the channels.
        limit_per_class: keep the first images of each class in each split, in file order.
        normalisation: mean and standard deviation, of every channel or a list of each, in place of the source's.
        directory: write the dataset there as :meth:`Dataset.save` would and return it mapped, with few images in
            memory.

    Raises:
        DataError: data are missing or damaged.
        ConfigError: ``normalisation`` does not fit the channels; nothing is decoded or written then.
    """
    raw = source.load(root, download)
    _check(raw, source.name)
    forms = [_Form.of(split, size, channels, limit_per_class) for split in (raw.train, raw.test)]
    statistics = None if normalisation is None else of_channels(normalisation, forms[0].channels, source.name)
    if directory is not None:
        disk.remove(directory / "meta.json", missing_ok=True)
    try:
        train, test = (
            form.prepared(directory and directory / f"{part}.safetensors")
            for part, form in zip(("train", "test"), forms, strict=True)
        )
    except BadFileError as error:
        raise bad_files(forms[0].faults() | forms[1].faults(), source.bad_file_cure) from error
    _, c, h, w = train.images.shape
    mean, std = statistics or _statistics(raw, train)
    meta = Meta(
        name=source.display_name,
        num_classes=len(raw.class_names),
        class_names=raw.class_names,
        shape=(c, h, w),
        mean=mean,
        std=std,
        licence=raw.licence,
        source=raw.source,
        train_size=len(train),
        test_size=len(test),
        preparation={
            "channels": channels,
            "limit_per_class": limit_per_class,
            **({} if normalisation is None else {"normalisation": json.loads(json.dumps(normalisation))}),
            "options": source.options(),
            "size": size,
        },
        fingerprint="",
        group_names=raw.group_names,
        skipped=raw.skipped,
    )
    dataset = Dataset.sealed(train, test, meta)
    if directory is not None:
        write_json(directory / "meta.json", dataset.meta.to_mapping())
    return dataset


def _check(raw: RawDataset, name: str) -> None:
    for part, split in (("train", raw.train), ("test", raw.test)):
        labels = split.labels
        if len(labels) == 0:
            raise DataError(f"{name}: the {part} split has no images; check data.root")
        if labels.min() < 0 or labels.max() >= len(raw.class_names):
            raise DataError(
                f"{name}: {part} labels reach from {labels.min()} to {labels.max()}, expected 0 to "
                f"{len(raw.class_names) - 1}; the files belong to another dataset"
            )


@dataclass(frozen=True, eq=False)
class _Form:
    """A raw split, the samples to keep, and the requested form of image."""

    raw: RawSplit
    keep: np.ndarray
    channels: int
    size: tuple[int, int]

    @classmethod
    def of(cls, raw: RawSplit, size: int | None, channels: int | None, limit: int | None) -> _Form:
        found = raw.images.shape
        channels = channels or (1 if len(found) == 3 else found[3])
        square = None if size is None else (size, size)
        if not isinstance(raw.images, np.ndarray):  # decoded to what is asked for: a size between would lose detail
            raw = dataclasses.replace(raw, images=raw.images.in_form(square, channels))
        keep = np.arange(len(raw.labels))
        if limit is not None:
            keep = np.sort(np.concatenate([np.flatnonzero(raw.labels == c)[:limit] for c in np.unique(raw.labels)]))
        return cls(raw, keep=keep, channels=channels, size=square or (found[1], found[2]))

    def prepared(self, path: Path | None) -> Split:
        """Return the split in memory or, with a path, written there and mapped."""
        arrays = {"labels": torch.from_numpy(self.raw.labels[self.keep].astype(np.int64))}
        if self.raw.groups is not None:
            arrays["groups"] = torch.from_numpy(self.raw.groups[self.keep].astype(np.int64))
        if path is None:
            return Split(images=torch.cat(list(self._images())), **arrays)
        shape = (len(self.keep), self.channels, *self.size)
        write_tensors(path, {"images": Blocks(torch.uint8, shape, self._images()), **arrays})
        return Split(**read_tensors(path, _CURE)[0])

    def faults(self) -> dict[str, str]:
        """Return the reason for each file that cannot be decoded."""
        kept = self.raw.take(self.keep).images
        return {} if isinstance(kept, np.ndarray) else kept.faults()

    def _images(self) -> Iterator[Tensor]:
        found = math.prod(self.raw.images.shape[1:])
        step = max(1, _BLOCK_BYTES // max(found, self.channels * math.prod(self.size)))
        for first in range(0, len(self.keep), step):
            block = torch.from_numpy(self.raw.take(self.keep[first : first + step]).decoded())
            block = block[:, None] if block.ndim == 3 else block.permute(0, 3, 1, 2)
            yield resize(convert_channels(block, self.channels).contiguous(), self.size)


def _statistics(raw: RawDataset, train: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std for the images' final channels."""
    channels = train.images.shape[1]
    if raw.mean is not None and raw.std is not None:
        if channels == len(raw.mean):
            return raw.mean, raw.std
        if channels == 3:
            return raw.mean * 3, raw.std * 3
    mean, std = channel_statistics(train.images)  # also for gray made of RGB: its std does not follow from theirs
    return mean, tuple(max(value, _SMALLEST_STD) for value in std)


def _fingerprint(train: Split, test: Split, meta: Meta) -> str:
    """Return the sha256 of everything that can change a result; licence and source are left out."""
    facts = {
        "class_names": meta.class_names,
        "mean": meta.mean,
        "name": meta.name,
        "preparation": meta.preparation,
        "std": meta.std,
    }
    if meta.group_names:
        facts["group_names"] = meta.group_names
    splits = (("train", train), ("test", test))
    tensors = ((f"{part}/{key}", t.numpy()) for part, split in splits for key, t in sorted(split.tensors().items()))
    return content_digest(facts, tensors)


def _meta_from_json(path: Path, content: Mapping[str, Any]) -> Meta:
    names = {field.name for field in dataclasses.fields(Meta)}
    if set(content) | _OPTIONAL != names:
        raise DataError(f"{path}: damaged, keys differ ({', '.join(sorted(names ^ set(content)))}); {_CURE}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    meta = Meta(**values)
    sizes = (meta.num_classes, meta.train_size, meta.test_size, *meta.shape)
    if not all(type(size) is int and 0 < size <= LARGEST for size in sizes) or len(meta.shape) != 3:
        raise ValueError("sizes are not whole numbers above 0")
    if len(meta.class_names) != meta.num_classes:
        raise ValueError(f"{len(meta.class_names)} names for {meta.num_classes} classes")
    if not isinstance(meta.group_names, tuple) or not isinstance(meta.skipped, dict):
        raise ValueError("group_names is no list, or skipped no object")
    channels = {len(meta.mean), len(meta.std), meta.shape[0]}
    if len(channels) > 1 or not all(type(value) in (int, float) for value in (*meta.mean, *meta.std)):
        raise ValueError("mean and std are not a number for each channel")
    return meta


def _load_split(path: Path, meta: Meta, size: int) -> Split:
    tensors, _ = read_tensors(path, _CURE)
    expected = {"images": (torch.uint8, (size, *meta.shape)), "labels": (torch.int64, (size,))}
    if "groups" in tensors:
        expected["groups"] = (torch.int64, (size,))
    if set(tensors) != set(expected):
        raise DataError(f"{path}: damaged, has {', '.join(sorted(tensors)) or 'nothing'}; {_CURE}")
    for key, (dtype, shape) in expected.items():
        found = tensors[key]
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise DataError(
                f"{path}: {key} is {found.dtype} {tuple(found.shape)}, meta.json says {dtype} {shape}; {_CURE}"
            )
    labels = tensors["labels"]
    if labels.min() < 0 or labels.max() >= meta.num_classes:
        raise DataError(f"{path}: damaged, labels beyond 0 to {meta.num_classes - 1}; {_CURE}")
    return Split(**tensors)
