"""What a source of images is: where a dataset's files lie and how they become arrays (data.md, section 1.0)."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, Self

import numpy as np

from flcore.core.errors import DataError
from flcore.core.text import brief

_SPLIT_SEED = 0


class Encoded(Protocol):
    """Images that are not decoded yet, such as `flcore/data/sources/imagefiles.py` has them."""

    def __len__(self) -> int:
        """Number of images."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that :meth:`decode` gives."""

    def take(self, positions: np.ndarray) -> Self:
        """The images at ``positions``, int64 [M]."""

    def in_form(self, size: tuple[int, int] | None, channels: int) -> Self:
        """Return the same images, to be decoded to this height and width (None: as before) and number of channels."""

    def decode(self) -> np.ndarray:
        """All images, uint8 NxHxW for one channel, else NxHxWx3.

        Raises:
            DataError: a file cannot be read.
        """


@dataclass(frozen=True)
class RawSplit:
    """Images as found: ``images`` uint8 NxHxW or NxHxWx3, ``labels`` int64 [N] from 0, ``groups`` int64 [N] or None.

    Images may also be files that are not decoded yet. A group is the writer or user a sample comes from.
    """

    images: np.ndarray | Encoded
    labels: np.ndarray
    groups: np.ndarray | None = None

    def take(self, positions: np.ndarray) -> RawSplit:
        """The samples at ``positions``, int64 [M]; files are not decoded by this."""
        images = self.images[positions] if isinstance(self.images, np.ndarray) else self.images.take(positions)
        return RawSplit(images, self.labels[positions], None if self.groups is None else self.groups[positions])

    def decoded(self) -> np.ndarray:
        """The images as an array.

        Raises:
            DataError: a file cannot be read.
        """
        return self.images if isinstance(self.images, np.ndarray) else self.images.decode()


@dataclass(frozen=True)
class RawDataset:
    """Training and test split with what is known about them.

    ``mean`` and ``std`` are per channel on the scale 0 to 1; None has them measured on the prepared training images.
    """

    train: RawSplit
    test: RawSplit
    class_names: tuple[str, ...]
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    licence: str
    source: str


@dataclass(frozen=True)
class Source(abc.ABC):
    """A dataset family. Options of a source are dataclass fields made with :func:`flcore.core.params.param`.

    Attributes:
        num_classes: of the published data, known before any are read; None where the files alone say.
        channels: likewise, of the images: 1 or 3.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    num_classes: ClassVar[int | None] = None
    channels: ClassVar[int | None] = None

    @abc.abstractmethod
    def load(self, root: Path | None, download: bool) -> RawDataset:
        """Read the dataset below ``root``; fetch it first only if ``download`` is true.

        Raises:
            DataError: files are missing or damaged.
        """

    def places(self, root: Path) -> tuple[Path, ...]:
        """The files and folders that hold all that :meth:`load` reads; other data sets may lie below ``root`` too."""
        return (root,)


def missing(name: str, root: Path | None, layout: str, *, can_download: bool = True) -> DataError:
    """The error for data that are not there: says which layout is expected and which key to set."""
    where = "data.root is not set" if root is None else f"not found below data.root = {root}"
    cure = "set data.root" + (", or data.download=true to fetch it" if can_download and root is not None else "")
    return DataError(f"{name}: {where}; expected {layout}\n{cure}")


def not_downloaded(folder: Path, why: object) -> DataError:
    """The error for a download that did not succeed."""
    return DataError(f"{folder}: download failed ({why}); copy the files there by hand and set data.download=false")


def damaged(path: Path | str, why: object) -> DataError:
    """The error for a file that is there and cannot be read."""
    return DataError(f"{path}: damaged ({brief(str(why))}); replace it with an intact copy")


def read_text_lines(path: Path) -> list[str]:
    """The lines of a list of files or labels.

    Raises:
        DataError: it is no text.
    """
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise damaged(path, "no text in UTF-8") from error


def leads_out(name: str) -> bool:
    """Whether a name from a list or an archive is no plain place below its folder: absolute, or by way of ``..``."""
    return name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/")


def hold_out_of_groups(groups: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide every group's samples into training and test, for datasets that come without a division (LEAF's rule).

    A group of n >= 2 samples gives ``fraction`` · n to the test split, rounded half up, at least one and not all; one
    of a single sample gives nothing. The draw is the same for every seed of an experiment.

    Args:
        groups: int64 [N].
        fraction: above 0 and below 1.

    Returns:
        Ascending indices of the training and of the test split.
    """
    rng = np.random.default_rng(_SPLIT_SEED)
    order = np.argsort(groups, kind="stable")
    is_test = np.zeros(len(groups), dtype=bool)
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(members) > 1:
            wanted = int(np.floor(fraction * len(members) + 0.5 + 1e-9))  # 0.29 · 50 is 14.499999999999998
            is_test[rng.permutation(members)[: np.clip(wanted, 1, len(members) - 1)]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
