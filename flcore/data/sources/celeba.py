"""CelebA: faces with the attribute Smiling and the identity of the person (LEAF, FedPA)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, hold_out_of_groups, missing, read_text_lines
from flcore.data.sources.imagefiles import ImageFiles

_LAYOUT = "celeba/ with identity_CelebA.txt, list_attr_celeba.txt and img_align_celeba/*.jpg"
_DRAW_SEED = 42  # of FedGen's preparation
_PERSON = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class CelebA(Source):
    """Smiling or not, with the person as group. Every person's images are divided into training and test.

    FedGen and FedPA draw users with seed 42 and merge ten of them into a client: ``users: 200`` here, then partition
    ``by_group`` with ``merge: 10``, ``min_size: 1`` and 20 clients. Their generator draws other persons.
    """

    name: ClassVar[str] = "celeba"
    summary: ClassVar[str] = "faces in colour, smiling or not, by person, up to 202,599 images; Liu et al."
    num_classes: ClassVar[int | None] = 2
    channels: ClassVar[int | None] = 3

    image_size: int = param(84, "height and width in pixels where data.size is null", low=8, high=218)
    min_images: int = param(5, "persons with fewer images are dropped (LEAF)", low=2)
    users: int | None = param(None, "draw so many persons; null takes all", low=1)
    test_fraction: float = param(0.2, "share of each person's images to test on", above=0, below=1)

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "celeba",)

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """List the images below ``<root>/celeba``; they cannot be fetched."""
        folder = None if root is None else root / "celeba"
        needed = ("identity_CelebA.txt", "list_attr_celeba.txt", "img_align_celeba")
        if folder is None or not all((folder / name).exists() for name in needed):
            raise missing(self.name, root, _LAYOUT, can_download=False)
        identity = _identities(folder / "identity_CelebA.txt")
        smiling = _smiling(folder / "list_attr_celeba.txt")
        names = np.array(sorted(identity))
        persons = np.array([identity[name] for name in names], dtype=np.int64)
        kept = self._draw(persons)
        names, persons = names[kept], persons[kept]
        present = {path.name for path in (folder / "img_align_celeba").iterdir()}
        for name in names:
            if name not in smiling or name not in present:
                where = "list_attr_celeba.txt" if name not in smiling else "img_align_celeba"
                raise damaged(folder / "identity_CelebA.txt", f"{name} is not in {where}")
        labels = np.array([smiling[name] for name in names], dtype=np.int64)
        train, test = (
            RawSplit(self._images(folder, names[rows]), labels[rows], persons[rows])
            for rows in hold_out_of_groups(persons, self.test_fraction)
        )
        return RawDataset(
            train,
            test,
            class_names=("not smiling", "smiling"),
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            licence="non-commercial research",
            source=f"CelebA (Liu et al., 2015), attribute Smiling, {len(np.unique(persons))} persons",
        )

    def _draw(self, persons: np.ndarray) -> np.ndarray:
        """Return which images belong to persons with enough of them and, if requested, to the drawn ones."""
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

    def _images(self, folder: Path, names: np.ndarray) -> ImageFiles:
        size = (self.image_size, self.image_size)
        return ImageFiles(
            tuple(map(str, names)), lambda name: (folder / "img_align_celeba" / name).read_bytes(), size, channels=3
        )


def _identities(path: Path) -> dict[str, int]:
    """File name to person, from lines such as ``000001.jpg 2880``."""
    found = {}
    for number, line in enumerate(read_text_lines(path), 1):
        words = line.split()
        if len(words) != 2 or not _PERSON.fullmatch(words[1]):
            raise damaged(path, f"line {number}: {line!r} is not a file name and a person's number")
        found[words[0]] = int(words[1])
    return found


def _smiling(path: Path) -> dict[str, int]:
    """File name to 0 or 1: a line with the count, one with the attributes' names, then a file name and -1 or 1 each."""
    lines = read_text_lines(path)
    names = lines[1].split() if len(lines) > 1 else []
    if "Smiling" not in names:
        raise damaged(path, "its second line does not name the attribute Smiling")
    column = names.index("Smiling") + 1
    found = {}
    for number, line in enumerate(lines[2:], 3):
        words = line.split()
        if len(words) != len(names) + 1 or words[column] not in ("-1", "1"):
            raise damaged(path, f"line {number}: expected a file name and {len(names)} values of -1 or 1")
        found[words[0]] = (int(words[column]) + 1) // 2
    return found
