"""TinyImageNet-200: photographs 64x64 in JPEG files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, leads_out, missing, read_text_lines
from flcore.data.sources.imagefiles import ImageFiles

_LAYOUT = "tiny-imagenet-200/ with wnids.txt, train/<wnid>/images/*.JPEG, val/val_annotations.txt and val/images/*.JPEG"
_SIZE = (64, 64)


@dataclass(frozen=True)
class TinyImageNet(Source):
    """100,000 / 10,000 images, 500 / 50 per class. The official ``val`` is the test split: ``test`` has no labels.

    A class's label is the position of its wnid in sorted order; gray images become RGB.
    """

    name: ClassVar[str] = "tinyimagenet"
    summary: ClassVar[str] = "photographs 64x64 in colour, 100,000 / 10,000 images, 200 classes; Stanford CS231n"
    num_classes: ClassVar[int | None] = 200
    channels: ClassVar[int | None] = 3

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "tiny-imagenet-200",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """List ``<root>/tiny-imagenet-200``; it cannot be fetched."""
        folder = None if root is None else root / "tiny-imagenet-200"
        needed = ("wnids.txt", "train", "val/val_annotations.txt", "val/images")
        if folder is None or not all((folder / name).exists() for name in needed):
            raise missing(self.name, root, _LAYOUT, can_download=False)
        wnids = tuple(sorted(word for line in read_text_lines(folder / "wnids.txt") for word in line.split()))
        labels = {wnid: label for label, wnid in enumerate(wnids)}
        if not labels or len(labels) < len(wnids) or any(leads_out(wnid) for wnid in wnids):
            raise damaged(folder / "wnids.txt", "names no classes, one twice, or another folder")
        return RawDataset(
            _split(folder, _train_files(folder, labels)),
            _split(folder, _val_files(folder, labels)),
            class_names=wnids,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            licence="ImageNet terms: non-commercial research",
            source="Tiny ImageNet (Stanford CS231n), files as published; val is the test split",
        )


def _split(folder: Path, files: list[tuple[str, int]]) -> RawSplit:
    names = tuple(name for name, _ in files)
    images = ImageFiles(names, lambda name: (folder / name).read_bytes(), _SIZE, channels=3)
    return RawSplit(images, np.array([label for _, label in files], dtype=np.int64))


def _train_files(folder: Path, labels: dict[str, int]) -> list[tuple[str, int]]:
    files = []
    for wnid, label in labels.items():
        names = sorted(path.name for path in (folder / "train" / wnid / "images").glob("[!.]*.JPEG"))
        if not names:
            raise damaged(folder, f"class {wnid} of wnids.txt has no images in train/{wnid}/images")
        files += [(f"train/{wnid}/images/{name}", label) for name in names]
    return files


def _val_files(folder: Path, labels: dict[str, int]) -> list[tuple[str, int]]:
    """The files and labels that ``val_annotations.txt`` lists: per line file, wnid and box, separated by tabs."""
    annotations = folder / "val" / "val_annotations.txt"
    present = {path.name for path in (folder / "val" / "images").iterdir()}
    files = []
    for number, line in enumerate(read_text_lines(annotations), 1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in labels:
            raise damaged(annotations, f"line {number}: {wnid!r} is not in wnids.txt")
        if name not in present:
            raise damaged(annotations, f"line {number}: val/images/{name} does not exist")
        files.append((f"val/images/{name}", labels[wnid]))
    return files
