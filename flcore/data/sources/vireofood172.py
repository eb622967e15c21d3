"""VireoFood-172: photographs of Chinese dishes in JPEG files of many sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from flcore.core.params import param
from flcore.data.sources.base import RawDataset, RawSplit, Source, damaged, leads_out, missing, read_text_lines
from flcore.data.sources.imagefiles import ImageFiles

_LAYOUT = (
    "ready_chinese_food/<class from 1 to 172>/*.jpg and SplitAndIngreLabel/ with TR.txt, VAL.txt and TE.txt "
    "(a path such as /1/1_0.jpg in each line)"
)
_CLASSES = 172
_MARGIN = 256 / 224  # of the shorter side over the square that is cut out of it


@dataclass(frozen=True)
class VireoFood172(Source):
    """172 dishes. Train: ``TR.txt``; test: ``TE.txt``; label: the class folder's number minus 1.

    Counts follow the lists: the paper's (68,175 / 25,250) agree with no published split. The shorter side is scaled to
    8/7 of ``image_size`` (256 for 224) and the central square is cut out.
    """

    name: ClassVar[str] = "vireofood172"
    summary: ClassVar[str] = "dishes in colour, any size, about 66,000 / 33,000 images, 172 classes; on request (VIREO)"
    num_classes: ClassVar[int | None] = _CLASSES
    channels: ClassVar[int | None] = 3

    image_size: int = param(
        224, "height and width in pixels where data.size is null; 64 for cheap runs", low=8, high=512
    )
    train_on_val: bool = param(False, "add the images of VAL.txt to the training split")

    def places(self, root: Path) -> tuple[Path, ...]:
        return (root / "ready_chinese_food", root / "SplitAndIngreLabel")

    def load(self, root: Path | None, download: bool = False) -> RawDataset:
        """List the images below ``<root>/ready_chinese_food``; they cannot be fetched."""
        if root is None or not (root / "ready_chinese_food").is_dir():
            raise missing(self.name, root, _LAYOUT, can_download=False)
        train = self._listed(root, "TR.txt")
        if self.train_on_val:
            train += self._listed(root, "VAL.txt")
        return RawDataset(
            self._split(root, train),
            self._split(root, self._listed(root, "TE.txt")),
            class_names=tuple(str(number) for number in range(1, _CLASSES + 1)),
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            licence="on request, research only",
            source="VIREO Food-172 (Chen and Ngo, 2016), lists as published",
        )

    def _listed(self, root: Path, list_name: str) -> list[str]:
        path = root / "SplitAndIngreLabel" / list_name
        if not path.is_file():
            raise missing(self.name, root, _LAYOUT, can_download=False)
        names = []
        for number, line in enumerate(read_text_lines(path), 1):
            name = line.strip().lstrip("/")
            folder = name.partition("/")[0]
            if leads_out(name):
                raise damaged(path, f"line {number}: {line!r} leads out of ready_chinese_food")
            if not folder.isdecimal() or not 1 <= int(folder) <= _CLASSES:
                raise damaged(path, f"line {number}: {line!r} does not begin with a class from 1 to {_CLASSES}")
            if not (root / "ready_chinese_food" / name).is_file():
                raise damaged(path, f"line {number}: ready_chinese_food/{name} does not exist")
            names.append(name)
        return names

    def _split(self, root: Path, names: list[str]) -> RawSplit:
        images = ImageFiles(
            tuple(names),
            lambda name: (root / "ready_chinese_food" / name).read_bytes(),
            (self.image_size, self.image_size),
            channels=3,
            margin=_MARGIN,
        )
        return RawSplit(images, np.array([int(name.partition("/")[0]) - 1 for name in names], dtype=np.int64))
