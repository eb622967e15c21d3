"""Images of a tree with their labels: class folders, class folders by site, or a CSV."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flcore.core.errors import DataError, listed
from flcore.core.text import is_control, shorten, unknown_key
from flcore.data.sources.base import MOST_LISTED, damaged, leads_out
from flcore.data.sources.imagefiles import KINDS
from flcore.data.sources.trees import A_FOLDER, Tree, found_name

Layout = Literal["classes", "sites", "csv"]

INDEX = "index.csv"
"""Name of the file that lists images, labels, sites and splits."""

SPLITS = ("train", "test")
_COLUMNS = ("file", "label", "site", "split")
_FOLDERS = {"classes": "<class>/*", "sites": "<site>/<class>/*"}

EXPECTED = {
    **{
        layout: f"a folder or a zip with train/{below} and test/{below} ({KINDS}), or these below one folder; with "
        f"data.test_fraction also {below} alone"
        for layout, below in _FOLDERS.items()
    },
    "csv": f"a folder or a zip with {INDEX}, whose first line is file,label or file,label,site,split, and the images "
    f"({KINDS})",
}
"""Layout → what a tree has to look like."""


@dataclass(frozen=True)
class Sample:
    """An image's file with its label; ``site`` and ``split`` are None if the layout does not state them."""

    file: str
    label: str
    site: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Listing:
    """Images in their order, and the reason for each name that cannot be one."""

    samples: list[Sample] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)


def list_images(tree: Tree, layout: Layout, *, undivided: bool) -> Listing:
    """Return all images of a tree; none is opened.

    Folders of classes and sites come in natural order, files in the order of their names, and rows in the CSV's order.
    ``undivided`` allows a tree without a split into training and test.

    Raises:
        DataError: the tree has another layout, or the CSV an invalid line.
    """
    if layout == "csv":
        return _from_csv(tree)
    levels = ["site", "class"] if layout == "sites" else ["class"]
    top, splits = _top(tree, layout, undivided)
    listing = Listing()
    if not splits:
        _collect(tree, top, levels, None, [], listing)
    for split in splits:
        _collect(tree, _join(top, split), levels, split, [], listing)
    if not listing.samples and any(fault in (A_FOLDER, _outside(levels)) for fault in listing.faults.values()):
        other = "sites" if layout == "classes" else "classes"
        raise DataError(
            f"{tree.root}: no images in {_FOLDERS[layout]}; expected {EXPECTED[layout]}\n"
            f"if they are in {_FOLDERS[other]}, set data.layout={other}"
        )
    return listing


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names sorted with numbers by value, so that 2 comes before 10."""
    return tuple(sorted(names, key=_natural))


def check_names(names: Iterable[str], kind: str, tree: Tree) -> None:
    """Refuse class or site names (``kind``) that cannot be shown, or that differ in Unicode form only.

    Raises:
        DataError: always with the name.
    """
    known: dict[str, str] = {}
    for name in sorted(names):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{tree.root}: the {kind} name {shorten(name)} is no text in UTF-8; rename it") from error
        if any(map(is_control, name)):
            raise DataError(f"{tree.root}: the {kind} name {name!a} contains control characters; rename it")
        other = known.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise DataError(
                f"{tree.root}: the {kind} names {other!a} and {name!a} are one name in two Unicode forms (NFC, NFD); "
                "rename one of them"
            )


# ---- folders -----------------------------------------------------------------------------------------------------


def _top(tree: Tree, layout: Layout, undivided: bool) -> tuple[str, list[str]]:
    """Return the folder that contains the images' folders, and its split folders; none if it has no split."""
    folders, levels = tree.folders(""), _FOLDERS[layout].count("/")
    # Without a split, folders are classes or sites, and one may be called train or test.
    least = levels if undivided else 0
    if splits := _splits(tree, "", least):
        return "", splits
    if not undivided or len(folders) == 1:
        below = [folder for folder in folders if _splits(tree, folder, least)]
        if len(below) == 1:
            return below[0], _splits(tree, below[0], least)
    if not undivided:
        raise DataError(
            f"{tree.root}: no single pair of folders train and test; expected {EXPECTED[layout]}\n"
            "without a test folder, set data.test_fraction=0.2 to draw a test set"
        )
    if len(folders) == 1 and _depth(tree, folders[0]) >= levels:
        return folders[0], []
    return "", []


def _splits(tree: Tree, folder: str, least: int) -> list[str]:
    """Return the splits among a folder's children, if train has ``least`` levels of folders below it."""
    here = [split for split in SPLITS if tree.exists(_join(folder, split))]
    return here if least == 0 or ("train" in here and _depth(tree, _join(folder, "train")) >= least) else []


def _depth(tree: Tree, folder: str) -> int:
    below = tree.folders(folder)
    return 1 + _depth(tree, below[0]) if below else 0


def _collect(
    tree: Tree, folder: str, levels: Sequence[str], split: str | None, above: list[str], listing: Listing
) -> None:
    names = tree.inside(folder)
    if not levels:
        site, label = above if len(above) > 1 else (None, above[0])
        for name in names:
            if (fault := tree.fault(name)) is None:
                listing.samples.append(Sample(name, label, site, split))
            else:
                listing.faults[name] = fault
        return
    for name in sorted(names, key=_natural):
        if tree.is_folder(name):
            _collect(tree, name, levels[1:], split, [*above, name.rpartition("/")[2]], listing)
        else:
            size = tree.size(name)
            listing.faults[name] = size if isinstance(size, str) else _outside(levels)


def _outside(levels: Sequence[str]) -> str:
    return f"not in a {levels[-1]} folder"


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _natural(name: str) -> tuple[tuple[str | tuple[int, str], ...], str]:
    parts = re.split("([0-9]+)", name)
    digits = {place: parts[place].lstrip("0") for place in range(1, len(parts), 2)}  # int() refuses very long numbers
    values = ((len(digits[place]), digits[place]) if place in digits else part for place, part in enumerate(parts))
    return tuple(values), name


# ---- CSV ---------------------------------------------------------------------------------------------------------


def _from_csv(tree: Tree) -> Listing:
    top = next((folder for folder in ("", *tree.folders("")) if tree.exists(_join(folder, INDEX))), None)
    if top is None:
        raise DataError(f"{tree.root}: no {INDEX}; expected {EXPECTED['csv']}")
    index = _join(top, INDEX)
    place = f"{tree.root}: {index}"
    try:
        text = tree.read(index).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise damaged(place, "no text in UTF-8; save it as CSV UTF-8") from error
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    listing, wrong, seen = Listing(), list[str](), dict[str, int]()
    try:
        columns = [name.strip().lower() for name in next(lines, [])]
        _check_columns(columns, place)
        for row in lines:
            if not any(map(str.strip, row)):
                continue
            number = lines.line_num
            values = dict(zip(columns, map(str.strip, row), strict=False))
            name = values.get("file", "").replace("\\", "/").removeprefix("./")
            fault = "has other columns than the first line" if len(row) != len(columns) else _row_fault(values, name)
            if fault is None and (first := seen.setdefault(unicodedata.normalize("NFC", name), number)) != number:
                fault = f"repeats the file of line {first}"
            if fault is not None:
                wrong.append(f"line {number} {fault}")
                continue
            name = found_name(tree, _join(top, name))
            if (reason := tree.fault(name)) is None:
                listing.samples.append(Sample(name, values["label"], values.get("site"), values.get("split")))
            else:
                listing.faults[name] = reason
    except csv.Error as error:
        raise damaged(place, f"line {lines.line_num}: {error}") from error
    if wrong:
        raise DataError(f"{place}: {listed(wrong, MOST_LISTED)}; correct them")
    return listing


def _check_columns(columns: Sequence[str], place: str) -> None:
    for name in columns:
        if name not in _COLUMNS:
            if ";" in name or "\t" in name:
                raise DataError(f"{place}: no commas in its first line; separate columns by commas")
            message = unknown_key(name or "''", name, _COLUMNS).replace("unknown key", "unknown column", 1)
            raise DataError(f"{place}: {message}; remove other columns")
    for name in ("file", "label"):
        if name not in columns:
            raise DataError(f"{place}: no column {name}; its first line has to be file,label or file,label,site,split")
    if len(set(columns)) < len(columns):
        raise DataError(f"{place}: a column is named twice in its first line")


def _row_fault(values: dict[str, str], name: str) -> str | None:
    empty = [column for column, value in values.items() if not value]
    if empty:
        return f"has no {empty[0]}"
    if leads_out(name) or re.match("[A-Za-z]:/", name):
        return f"names {shorten(name)}, which is not below the folder of {INDEX}"
    if values.get("split", SPLITS[0]) not in SPLITS:
        return f"has split {shorten(values['split'])}, allowed are train and test"
    return None
