"""A user's own images."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from flcore.core.errors import DataError, listed
from flcore.core.params import param
from flcore.core.text import is_control, shorten
from flcore.data.sources.base import (
    MOST_LISTED,
    BadFileError,
    RawDataset,
    RawSplit,
    Source,
    bad_files,
    hold_out_of_classes,
    missing,
)
from flcore.data.sources.imagefiles import ImageFiles, depth_of, faults_of, is_gray, size_of
from flcore.data.sources.layouts import EXPECTED, SPLITS, Listing, Sample, Tree, list_images, natural_order, open_tree

_TITLE = re.compile(r"\w([\w .+()-]{0,58}[\w)])?")
"""A name that experiments, registered models and labels of LaTeX accept."""


@dataclass(frozen=True)
class ImageFolder(Source, name="imagefolder"):
    """Your own images: a folder or zip of train/<class>/* and test/<class>/*, by site, or a CSV.

    Classes and sites are numbered in natural order; sites are the groups.
    """

    unsaid: ClassVar[frozenset[str]] = frozenset({"title", "layout", "test_fraction", "on_bad_file"})
    bad_file_cure: ClassVar[str] = "repair or remove them, or set data.on_bad_file=skip"

    title: str | None = param(
        None,
        "name of your data in pages, MLflow's experiments and registered models; null: imagefolder. Runs with another "
        "title are other runs",
    )
    image_size: int | None = param(
        None,
        "height and width in pixels where data.size is null; null: the images' own, which must be alike",
        low=1,
    )
    layout: Literal["classes", "sites", "csv"] = param(
        "classes",
        "classes: <class>/*; sites: <site>/<class>/*, for partition.name=by_group; csv: index.csv with the columns "
        "file, label and, where known, site and split",
    )
    test_fraction: float | None = param(
        None,
        "share of each class to test on, drawn once for all seeds; null: the images have a test split",
        above=0,
        below=1,
    )
    on_bad_file: Literal["refuse", "skip"] = param(
        "refuse", "files that are no readable image: refuse the data, or leave them out and name them in meta.json"
    )

    def __post_init__(self) -> None:
        if self.title is not None and not _TITLE.fullmatch(self.title):
            raise ValueError(f"title = {shorten(self.title)}: expected 1 to 60 letters, digits, spaces and _.+()-")

    @property
    def display_name(self) -> str:
        """Title of the data, if they have one."""
        return self.title or self.name

    def places(self, root: Path) -> tuple[Path, ...]:
        """Return the split folders alone, if they are directly in ``root``, else ``root``."""
        split = tuple(root / name for name in SPLITS)
        return split if self.layout != "csv" and all(folder.is_dir() for folder in split) else (root,)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """List the images below the folder or inside the zip ``root``; they are decoded later."""
        if root is None or not root.exists():
            raise missing(self.name, root, EXPECTED[self.layout], can_download=False)
        tree = open_tree(root, EXPECTED[self.layout])
        listing = list_images(tree, self.layout, undivided=self.test_fraction is not None)
        samples, skipped = self._readable(tree, listing)
        if not samples:
            raise DataError(f"{root}: no images; expected {EXPECTED[self.layout]}")
        class_names = natural_order({sample.label for sample in listing.samples})
        _check_names(class_names, "class", root)
        parts = self._divide(samples, class_names, root)
        _check_classes(parts, class_names, root)
        site_names = natural_order({sample.site for sample in samples if sample.site is not None})
        _check_names(site_names, "site", root)
        images = self._images(tree, [sample.file for part in parts for sample in part])
        train, test = (
            RawSplit(
                images([sample.file for sample in part]),
                _numbers([sample.label for sample in part], class_names),
                _numbers([sample.site or "" for sample in part], site_names) if site_names else None,
            )
            for part in parts
        )
        licence, source = "not stated: your own data", "image folder"
        return RawDataset(train, test, class_names, None, None, licence, source, site_names, skipped)

    def _readable(self, tree: Tree, listing: Listing) -> tuple[list[Sample], dict[str, str]]:
        """Return the images to use, and the reasons for omitted files; raise DataError for others that are bad."""
        skip = self.on_bad_file == "skip"
        if not skip and not listing.faults:
            return listing.samples, {}  # files that cannot be decoded are refused when they are
        faults = listing.faults | faults_of([sample.file for sample in listing.samples], tree.read)
        if not skip:
            raise bad_files(faults, self.bad_file_cure)
        return [sample for sample in listing.samples if sample.file not in faults], dict(sorted(faults.items()))

    def _divide(self, samples: Sequence[Sample], class_names: Sequence[str], root: Path) -> list[list[Sample]]:
        train, test = ([sample for sample in samples if sample.split == split] for split in SPLITS)
        if self.test_fraction is None:
            if not test:
                raise DataError(f"{root}: no test images; add a test split, or set data.test_fraction=0.2 to draw one")
            return [train, test]
        key = f"data.test_fraction = {self.test_fraction:g}"
        if test:
            raise DataError(f"{key}: {root} has test images of its own; set it to null")
        labels = _numbers([sample.label for sample in samples], class_names)
        sites = [sample.site or "" for sample in samples]
        counts = np.bincount(labels, minlength=len(class_names))
        single = [name for name, count in zip(class_names, counts, strict=True) if count < 2]
        if single:
            names = listed(map(repr, single), MOST_LISTED)
            raise DataError(f"{key}: needs two images of each class; {root} has fewer of {names}")
        rows = hold_out_of_classes(labels, _numbers(sites, list(dict.fromkeys(sites))), self.test_fraction)
        return [[samples[row] for row in part] for part in rows]

    def _images(self, tree: Tree, names: Sequence[str]) -> Callable[[Sequence[str]], ImageFiles]:
        """Return a function that makes the images of some files, with size, channels and depth from all of them."""
        square = self.image_size
        try:
            size = size_of(names[0], tree.read) if square is None else (square, square)
            # One colour image makes all RGB. In a collection in colour that is the first, so that no other is opened.
            channels = 1 if all(is_gray(name, tree.read) for name in names) else 3
        except BadFileError as error:
            raise bad_files(faults_of(names, tree.read), self.bad_file_cure) from error
        depth, sized_by = depth_of(names, tree.read), names[0] if square is None else None
        return lambda chosen: ImageFiles(tuple(chosen), tree.read, size, channels, sized_by=sized_by, depth=depth)


def _check_names(names: Iterable[str], kind: str, root: Path) -> None:
    """Refuse class or site names that cannot be shown, or that differ in Unicode form only."""
    known: dict[str, str] = {}
    for name in sorted(names):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{root}: the {kind} name {shorten(name)} is no text in UTF-8; rename it") from error
        if any(map(is_control, name)):
            raise DataError(f"{root}: the {kind} name {name!a} contains control characters; rename it")
        other = known.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise DataError(
                f"{root}: the {kind} names {other!a} and {name!a} are one name in two Unicode forms (NFC, NFD); "
                "rename one of them"
            )


def _check_classes(parts: Sequence[Sequence[Sample]], class_names: Sequence[str], root: Path) -> None:
    for split, part in zip(SPLITS, parts, strict=True):
        present = {sample.label for sample in part}
        if lacking := [repr(name) for name in class_names if name not in present]:
            several = len(lacking) > 1
            kind = f"classes {listed(lacking, MOST_LISTED)} have" if several else f"class {lacking[0]} has"
            raise DataError(f"{root}: {kind} no images in {split}; both splits need the same classes")


def _numbers(names: Sequence[str], known: Sequence[str]) -> np.ndarray:
    """Return the index of each name among the known ones, int64."""
    index = {name: number for number, name in enumerate(known)}
    return np.array([index[name] for name in names], dtype=np.int64)
