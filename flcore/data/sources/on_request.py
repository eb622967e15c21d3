"""Photographs that protofl cannot download: CelebA, Tiny ImageNet and VireoFood-172, as JPEG files below the root."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.sources.base import (
    RawDataset,
    RawSplit,
    Source,
    damaged,
    hold_out_of_groups,
    leads_out,
    missing,
    read_text_lines,
)
from flcore.data.sources.imagefiles import ImageFiles

_DRAW_SEED = 42  # as in FedGen's preparation
_DISHES = 172
_MARGIN = 256 / 224  # the shorter side over the side of the square that is cut out
_HALVES = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class CelebA(Source, name="celeba", num_classes=2, channels=3):
    """Faces in colour, smiling or not, by person, up to 202,599 images (Liu et al.).

    The person is the group, as in LEAF and FedPA; every person's images are divided into training and test. FedGen and
    FedPA draw users with seed 42 and merge ten of them into a client: ``users: 200`` here, then partition ``by_group``
    with ``merge: 10``, ``min_size: 1`` and 20 clients. Their generator draws other persons.
    """

    image_size: int = param(84, "height and width in pixels where data.size is null", low=8, high=218)
    min_images: int = param(5, "persons with fewer images are dropped (LEAF)", low=2)
    users: int | None = param(None, "number of persons to draw; null takes all", low=1)
    test_fraction: float = param(0.2, "share of each person's images to test on", above=0, below=1)

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "celeba",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        needed = ("identity_CelebA.txt", "list_attr_celeba.txt", "img_align_celeba")
        layout = "celeba/ with identity_CelebA.txt, list_attr_celeba.txt and img_align_celeba/*.jpg"
        folder = _folder(self, root, "celeba", needed, layout)
        identity = _read_persons(folder / needed[0])
        smiling = _read_smiles(folder / needed[1])
        names = np.array(sorted(identity))
        persons = np.array([identity[name] for name in names], dtype=np.int64)
        used = self._draw(persons)
        names, persons = names[used], persons[used]
        present = {path.name for path in (folder / needed[2]).iterdir()}
        for name in names:
            if name not in smiling or name not in present:
                where = needed[1] if name not in smiling else needed[2]
                raise damaged(folder / needed[0], f"{name} is not in {where}")
        labels = [smiling[name] for name in names]
        everything = _split(folder / needed[2], names, labels, self.image_size, persons)
        train, test = map(everything.take, hold_out_of_groups(persons, self.test_fraction))
        source = f"CelebA (Liu et al., 2015), attribute Smiling, {len(np.unique(persons))} persons"
        classes = ("not smiling", "smiling")
        return RawDataset(train, test, classes, _HALVES, _HALVES, "non-commercial research", source)

    def _draw(self, persons: np.ndarray) -> np.ndarray:
        """Return the mask of images of persons with enough of them and, if requested, of the drawn persons."""
        numbers, sizes = np.unique(persons, return_counts=True)
        eligible = numbers[sizes >= self.min_images]
        if len(eligible) < (self.users or 1):
            raise DataError(
                f"data.users = {self.users or 'null'}: {len(eligible)} persons have at least {self.min_images} images; "
                "lower data.users or data.min_images"
            )
        if self.users is not None:
            eligible = np.random.default_rng(_DRAW_SEED).choice(eligible, size=self.users, replace=False)
        return np.isin(persons, eligible)


@dataclass(frozen=True)
class TinyImageNet(Source, name="tinyimagenet", num_classes=200, channels=3):
    """Photographs 64x64 in colour, 100,000 / 10,000 images, 200 classes; Stanford CS231n.

    The official ``val`` is the test split: ``test`` has no labels. A class's label is the position of its wnid in
    sorted order; gray images become RGB.
    """

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "tiny-imagenet-200",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        layout = (
            "tiny-imagenet-200/ with wnids.txt, train/<wnid>/images/*.JPEG, val/val_annotations.txt and "
            "val/images/*.JPEG"
        )
        needed = ("wnids.txt", "train", "val/val_annotations.txt", "val/images")
        folder = _folder(self, root, "tiny-imagenet-200", needed, layout)
        wnids = tuple(sorted(word for line in read_text_lines(folder / "wnids.txt") for word in line.split()))
        labels = {wnid: label for label, wnid in enumerate(wnids)}
        if not labels or len(labels) < len(wnids) or any(leads_out(wnid) for wnid in wnids):
            raise damaged(folder / "wnids.txt", "names no classes, one twice, or another folder")
        train, test = (
            _split(folder, list(files), list(files.values()), 64)
            for files in (_list_train(folder, labels), _list_val(folder, labels))
        )
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        source = "Tiny ImageNet (Stanford CS231n), files as published; val is the test split"
        return RawDataset(train, test, wnids, mean, std, "ImageNet terms: non-commercial research", source)


@dataclass(frozen=True)
class VireoFood172(Source, name="vireofood172", num_classes=_DISHES, channels=3):
    """Dishes in colour, any size, about 66,000 / 33,000 images, 172 classes; on request (VIREO).

    Train: ``TR.txt``; test: ``TE.txt``; label: the class folder's number minus 1. The paper's counts (68,175 / 25,250)
    agree with no published split. The shorter side is scaled to 8/7 of ``image_size`` (256 for 224) and the central
    square is cut out.
    """

    image_size: int = param(
        224, "height and width in pixels where data.size is null; 64 for cheap runs", low=8, high=512
    )
    train_on_val: bool = param(False, "add the images of VAL.txt to the training split")

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "ready_chinese_food", root / "SplitAndIngreLabel")

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        lists = ("TR.txt", "TE.txt", *(["VAL.txt"] if self.train_on_val else []))
        needed = ("ready_chinese_food", *(f"SplitAndIngreLabel/{name}" for name in lists))
        layout = (
            "ready_chinese_food/<class from 1 to 172>/*.jpg and SplitAndIngreLabel/ with TR.txt, VAL.txt and TE.txt "
            "(a path such as /1/1_0.jpg in each line)"
        )
        folder = _folder(self, root, "", needed, layout)
        train, test, *val = (_list_dishes(folder, name) for name in lists)
        source = "VIREO Food-172 (Chen and Ngo, 2016), lists as published"
        names = tuple(str(number) for number in range(1, _DISHES + 1))
        splits = self._split(folder, sum(val, train)), self._split(folder, test)
        return RawDataset(*splits, names, _HALVES, _HALVES, "on request, research only", source)

    def _split(self, folder: Path, names: list[str]) -> RawSplit:
        labels = [int(name.partition("/")[0]) - 1 for name in names]
        return _split(folder / "ready_chinese_food", names, labels, self.image_size, margin=_MARGIN)


def _folder(source: Source, root: Path | None, folder: str, needed: Sequence[str], layout: str) -> Path:
    if root is None or not all((root / folder / name).exists() for name in needed):
        raise missing(source.name, root, layout, can_download=False)
    return root / folder


def _split(
    folder: Path,
    names: Sequence[str],
    labels: Sequence[int],
    side: int,
    groups: np.ndarray | None = None,
    margin: float | None = None,
) -> RawSplit:
    files = ImageFiles(tuple(map(str, names)), lambda name: (folder / name).read_bytes(), (side, side), 3, margin)
    return RawSplit(files, np.array(labels, dtype=np.int64), groups)


def _read_persons(path: Path) -> dict[str, int]:
    """Return the person of each file name, from lines such as ``000001.jpg 2880``."""
    persons = {}
    for number, line in enumerate(read_text_lines(path), 1):
        words = line.split()
        if len(words) != 2 or not re.fullmatch("[0-9]{1,18}", words[1]):
            raise damaged(path, f"line {number}: {line!r} is not a file name and a person's number")
        persons[words[0]] = int(words[1])
    return persons


def _read_smiles(path: Path) -> dict[str, int]:
    """Return 0 or 1 by file name: a line with the count, one with attributes, then a file name and -1 or 1 each."""
    lines = read_text_lines(path)
    names = lines[1].split() if len(lines) > 1 else []
    if "Smiling" not in names:
        raise damaged(path, "its second line does not name the attribute Smiling")
    column = names.index("Smiling") + 1
    smiles = {}
    for number, line in enumerate(lines[2:], 3):
        words = line.split()
        if len(words) != len(names) + 1 or words[column] not in ("-1", "1"):
            raise damaged(path, f"line {number}: expected a file name and {len(names)} values of -1 or 1")
        smiles[words[0]] = (int(words[column]) + 1) // 2
    return smiles


def _list_train(folder: Path, labels: dict[str, int]) -> dict[str, int]:
    files: dict[str, int] = {}
    for wnid, label in labels.items():
        names = sorted(path.name for path in (folder / "train" / wnid / "images").glob("[!.]*.JPEG"))
        if not names:
            raise damaged(folder, f"class {wnid} of wnids.txt has no images in train/{wnid}/images")
        files |= {f"train/{wnid}/images/{name}": label for name in names}
    return files


def _list_val(folder: Path, labels: dict[str, int]) -> dict[str, int]:
    """Return the labels in ``val_annotations.txt``: a line has file, wnid and box, separated by tabs."""
    annotations = folder / "val" / "val_annotations.txt"
    present = {path.name for path in (folder / "val" / "images").iterdir()}
    files = {}
    for number, line in enumerate(read_text_lines(annotations), 1):
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in labels:
            raise damaged(annotations, f"line {number}: {wnid!r} is not in wnids.txt")
        if name not in present:
            raise damaged(annotations, f"line {number}: val/images/{name} does not exist")
        files[f"val/images/{name}"] = labels[wnid]
    return files


def _list_dishes(root: Path, list_name: str) -> list[str]:
    path, names = root / "SplitAndIngreLabel" / list_name, []
    for number, line in enumerate(read_text_lines(path), 1):
        name = line.strip().lstrip("/")
        folder = name.partition("/")[0]
        if leads_out(name):
            raise damaged(path, f"line {number}: {line!r} leads out of ready_chinese_food")
        if not folder.isdecimal() or not 1 <= int(folder) <= _DISHES:
            raise damaged(path, f"line {number}: {line!r} does not begin with a class from 1 to {_DISHES}")
        if not (root / "ready_chinese_food" / name).is_file():
            raise damaged(path, f"line {number}: ready_chinese_food/{name} does not exist")
        names.append(name)
    return names
