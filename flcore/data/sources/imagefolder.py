"""A user's own images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from flcore.core.errors import DataError, listed
from flcore.core.params import param
from flcore.data.sources.base import (
    MOST_LISTED,
    RawDataset,
    RawSplit,
    bad_files,
    missing,
)
from flcore.data.sources.imagefiles import faults_of
from flcore.data.sources.layouts import EXPECTED, SPLITS, Listing, Sample, Tree, list_images, natural_order, open_tree
from flcore.data.sources.own import LICENCE, OwnSource, check_names, no_test


@dataclass(frozen=True)
class ImageFolder(OwnSource, name="imagefolder"):
    """Your own images: a folder or zip of train/<class>/* and test/<class>/*, by site, or a CSV.

    Classes and sites are numbered in natural order; sites are the groups.
    """

    unsaid: ClassVar[frozenset[str]] = frozenset({"title", "layout", "test_fraction", "on_bad_file"})
    bad_file_cure: ClassVar[str] = "repair or remove them, or set data.on_bad_file=skip"

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
    on_bad_file: Literal["refuse", "skip"] = param(
        "refuse", "files that are no readable image: refuse the data, or leave them out and name them in meta.json"
    )

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
        check_names(class_names, "class", root)
        parts = self._divide(samples, class_names, root)
        _check_classes(parts, class_names, root)
        site_names = natural_order({sample.site for sample in samples if sample.site is not None})
        check_names(site_names, "site", root)
        images = self.image_files([sample.file for part in parts for sample in part], tree.read, self.image_size)
        train, test = (
            RawSplit(
                images([sample.file for sample in part]),
                _numbers([sample.label for sample in part], class_names),
                _numbers([sample.site or "" for sample in part], site_names) if site_names else None,
            )
            for part in parts
        )
        return RawDataset(train, test, class_names, None, None, LICENCE, "image folder", site_names, skipped)

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
                raise no_test(root)
            return [train, test]
        labels = _numbers([sample.label for sample in samples], class_names)
        sites = [sample.site or "" for sample in samples]
        sites_of = _numbers(sites, list(dict.fromkeys(sites)))
        rows = self.drawn_test(labels, sites_of, class_names, root, has_test=bool(test))
        return [[samples[row] for row in part] for part in rows]


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
