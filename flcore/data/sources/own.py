"""Common to all sources of own images: a title, and a drawn test split."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flcore.core.errors import DataError, listed
from flcore.core.params import param
from flcore.core.text import is_control, shorten
from flcore.data.sources.base import MOST_LISTED, BadFileError, Source, bad_files, hold_out_of_classes
from flcore.data.sources.imagefiles import ImageFiles, Reader, depth_of, faults_of, is_gray, size_of

LICENCE = "not stated: your own data"

_TITLE = re.compile(r"\w([\w .+()-]{0,58}[\w)])?")
"""A name that experiments, registered models and labels of LaTeX accept."""


@dataclass(frozen=True)
class OwnSource(Source):
    """A user's own images in some form."""

    title: str | None = param(
        None,
        "name of your data in pages, MLflow's experiments and registered models; null: the source's. Runs with another "
        "title are other runs",
    )
    test_fraction: float | None = param(
        None,
        "share of each class to test on, drawn once for all seeds; null: the images have a test split",
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        if self.title is not None and not _TITLE.fullmatch(self.title):
            raise ValueError(f"title = {shorten(self.title)}: expected 1 to 60 letters, digits, spaces and _.+()-")

    @property
    def display_name(self) -> str:
        """Title of the data, if they have one."""
        return self.title or self.name

    def drawn_test(
        self, labels: np.ndarray, groups: np.ndarray, class_names: Sequence[str], root: Path, *, has_test: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Divide samples by ``test_fraction``; return the rows of training and test, ascending.

        Args:
            labels, groups: int64 [N]. class_names: by label. root: for errors. has_test: the data have a test split.

        Raises:
            DataError: they have one, or a class has a single image.
        """
        assert self.test_fraction is not None
        key = f"data.test_fraction = {self.test_fraction:g}"
        if has_test:
            raise DataError(f"{key}: {root} has test images of its own; set it to null")
        counts = np.bincount(labels, minlength=len(class_names))
        single = [name for name, count in zip(class_names, counts, strict=True) if count < 2]
        if single:
            names = listed(map(repr, single), MOST_LISTED)
            raise DataError(f"{key}: needs two images of each class; {root} has fewer of {names}")
        return hold_out_of_classes(labels, groups, self.test_fraction)

    def image_files(
        self, names: Sequence[str], read: Reader, square: int | None = None
    ) -> Callable[[Sequence[str]], ImageFiles]:
        """Return a function that makes the images of some files, with size, channels and depth from all of them.

        Args:
            names: of all files. read: one. square: height and width; None: the images' own.
        """
        try:
            size = size_of(names[0], read) if square is None else (square, square)
            # One colour image makes all RGB. In a collection in colour that is the first, so that no other is opened.
            channels = 1 if all(is_gray(name, read) for name in names) else 3
        except BadFileError as error:
            raise bad_files(faults_of(names, read), self.bad_file_cure) from error
        depth, sized_by = depth_of(names, read), names[0] if square is None else None
        return lambda chosen: ImageFiles(tuple(chosen), read, size, channels, sized_by=sized_by, depth=depth)


def check_names(names: Iterable[str], kind: str, root: Path) -> None:
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


def no_test(root: Path, more: str = "") -> DataError:
    """Return the error for data without a test split; ``more``: another cure."""
    return DataError(f"{root}: no test images; add a test split, or set data.test_fraction=0.2 to draw one{more}")


def numbered(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the index of each value among ``known`` ones, which are sorted; int64, -1 for an unknown one."""
    place = np.searchsorted(known, values).clip(0, len(known) - 1)
    return np.where(known[place] == values, place, -1).astype(np.int64)
