"""The interface of image sources, their errors, and test splits (data.md, section 1.0)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from flcore.core.errors import DataError, listed
from flcore.core.registry import Named
from flcore.core.text import shorten

_SPLIT_SEED = 0
MOST_LISTED = 11
"""Files, lines or names that an error lists; of more, the first ten and the number of the others."""


class BadFileError(DataError):
    """An image that cannot be read, with the ``reason``."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: damaged ({shorten(reason)}); replace it with an intact copy")
        self.reason = reason


class Encoded(Protocol):
    """Images that are not decoded yet, such as those in `flcore/data/sources/imagefiles.py`."""

    def __len__(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of :meth:`decode`."""

    def take(self, positions: np.ndarray) -> Self:
        """Return the images at ``positions``, int64 [M]."""

    def in_form(self, size: tuple[int, int] | None, channels: int) -> Self:
        """Return the same images with another height and width (None: as before) and number of channels."""

    def decode(self) -> np.ndarray:
        """Return uint8 NxHxW for one channel, else NxHxWx3; raise DataError for a file that cannot be read."""

    def faults(self) -> dict[str, str]:
        """Decode every image and return the reason for each bad file by name."""


@dataclass(frozen=True)
class RawSplit:
    """Images as found: ``images`` uint8 NxHxW or NxHxWx3, ``labels`` int64 [N] from 0, ``groups`` int64 [N] or None.

    Images may be files that are not decoded yet. A group is the writer or user of a sample.
    """

    images: np.ndarray | Encoded
    labels: np.ndarray
    groups: np.ndarray | None = None

    def take(self, positions: np.ndarray) -> RawSplit:
        """Return the samples at ``positions``, int64 [M], without decoding files."""
        images = self.images[positions] if isinstance(self.images, np.ndarray) else self.images.take(positions)
        return RawSplit(images, self.labels[positions], None if self.groups is None else self.groups[positions])

    def decoded(self) -> np.ndarray:
        """Return the images as an array, or raise DataError."""
        return self.images if isinstance(self.images, np.ndarray) else self.images.decode()


@dataclass(frozen=True)
class RawDataset:
    """Training and test split with their metadata.

    ``mean`` and ``std`` are per channel on the scale 0 to 1; None measures them on the prepared training images.
    ``group_names`` are by group number, if any; ``skipped`` maps omitted files to the reason.
    """

    train: RawSplit
    test: RawSplit
    class_names: tuple[str, ...]
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    licence: str
    source: str
    group_names: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source(Named, abc.ABC):
    """A dataset family. Options of a source are dataclass fields made with :func:`flcore.core.params.param`.

    Attributes:
        num_classes: of the published data; None if only the files state it.
        channels: likewise, of the images: 1 or 3.
        unsaid: options that do not enter the data's identity at their default, since they are newer than it.
        bad_file_cure: advice for files that cannot be decoded.
    """

    num_classes: ClassVar[int | None] = None
    channels: ClassVar[int | None] = None
    unsaid: ClassVar[frozenset[str]] = frozenset()
    bad_file_cure: ClassVar[str] = "replace them with intact copies"

    @property
    def display_name(self) -> str:
        """Name of the data in ``meta.json``, pages and tracking."""
        return self.name

    def options(self) -> dict[str, Any]:
        """Return the options that identify the data, by name."""
        return {
            option.name: getattr(self, option.name)
            for option in dataclasses.fields(self)
            if option.name not in self.unsaid or getattr(self, option.name) != option.default
        }

    @abc.abstractmethod
    def load(self, root: Path | None, download: bool) -> RawDataset:
        """Read the dataset below ``root``, which ``download`` allows to fetch; raise DataError for bad or no files."""

    def places(self, root: Path) -> tuple[Path, ...]:
        """Return the files and folders that :meth:`load` reads; ``root`` may contain other data sets too."""
        return (root,)


def missing(name: str, root: Path | None, layout: str, *, can_download: bool = True) -> DataError:
    """Return the error for missing data, with the expected layout and the key to set."""
    where = "data.root is not set" if root is None else f"not found below data.root = {root}"
    cure = "set data.root" + (", or data.download=true to fetch it" if can_download and root is not None else "")
    return DataError(f"{name}: {where}; expected {layout}\n{cure}")


def not_downloaded(folder: Path, why: object) -> DataError:
    """Return the error for a failed download."""
    return DataError(f"{folder}: download failed ({why}); copy the files there by hand and set data.download=false")


def damaged(path: Path | str, why: object) -> DataError:
    """Return the error for an unreadable file."""
    return DataError(f"{path}: damaged ({shorten(str(why))}); replace it with an intact copy")


def bad_files(faults: Mapping[str, str], cure: str) -> DataError:
    """Return the error for files that cannot be read: their number, and the first ten with the reason for each."""
    each = listed(
        (f"{shorten(name, 100)} ({shorten(reason, 100)})" for name, reason in sorted(faults.items())), MOST_LISTED
    )
    return DataError(f"{len(faults)} bad file{'s' if len(faults) > 1 else ''}: {each}\n{cure}")


def read_text_lines(path: Path) -> list[str]:
    """Return the lines of a list of files or labels; raise DataError if it is not UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise damaged(path, "no text in UTF-8") from error


def leads_out(name: str) -> bool:
    """Return whether a name from a list or an archive leads outside its folder: absolute, or through ``..``."""
    return name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/")


def hold_out_of_groups(groups: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide every group's samples into training and test, for datasets without a division (LEAF's rule).

    A group of n >= 2 samples gives ``fraction`` · n to the test split, rounded half up, at least one and not all; a
    single sample stays. The draw is the same for every seed of an experiment. ``groups`` are int64 [N]. Returns
    ascending indices of both splits.
    """
    rng = np.random.default_rng(_SPLIT_SEED)
    order = np.argsort(groups, kind="stable")
    is_test = np.zeros(len(groups), dtype=bool)
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(members) > 1:
            is_test[rng.permutation(members)[: _test_size(len(members), fraction)]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def hold_out_of_classes(labels: np.ndarray, groups: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide every class's samples into training and test, each group's in proportion (:func:`hold_out_of_groups`)."""
    rng = np.random.default_rng(_SPLIT_SEED)
    rank, size = _ranks(groups, labels, by=rng.permutation(len(labels)))
    # Samples at the same share of their class and group follow each other, so that each group gives its share.
    rank, size = _ranks(labels, (rank + 0.5) / size, by=rng.permutation(len(labels)), blocks=1)
    is_test = rank < [_test_size(count, fraction) for count in size.tolist()]
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _ranks(*keys: np.ndarray, by: np.ndarray, blocks: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return each sample's rank in its block when sorted by ``keys`` and ``by``, and the size of the block.

    A block has equal values in the first ``blocks`` keys; ``by`` decides between samples of equal keys. All are [N].
    """
    order = np.lexsort((by, *reversed(keys)))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = np.any([np.diff(key[order]) != 0 for key in keys[:blocks]], axis=0)
    starts = np.flatnonzero(is_first)
    sizes = np.diff(np.append(starts, len(order)))
    rank, size = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    size[order] = np.repeat(sizes, sizes)
    return rank, size


def _test_size(count: int, fraction: float) -> int:
    wanted = int(np.floor(fraction * count + 0.5 + 1e-9))  # 0.29 · 50 is 14.499999999999998
    return min(max(wanted, 1), count - 1)
