"""Images in files, decoded when asked for: a list that is too large for memory is never held at once.

Of a file that holds several images, as GIF and TIFF may, the first is read.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from flcore.data.images import resize
from flcore.data.sources.base import damaged
from flcore.errors import DataError

Reader = Callable[[str], bytes]

_COMMON = ("JPEG", "PNG", "WEBP")
_DECODERS = {
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp"), _COMMON),  # which people take for each other
    **dict.fromkeys((".ppm", ".pgm"), ("PPM",)),
    **dict.fromkeys((".tif", ".tiff"), ("TIFF",)),
    ".bmp": ("BMP",),
    ".gif": ("GIF",),
}
"""Ending → Pillow's decoders that a file of that name is tried with, and no others."""

ENDINGS = frozenset(_DECODERS)
"""Of files that can be read, in lower case."""

KINDS = "jpg, png, webp, ppm, pgm, bmp, tif or gif"
"""The same in words."""

_GRAY_MODES = ("1", "L", "LA")
_IMAGES_PER_TASK = 64
LARGEST_FILE = 2**28
"""Bytes of an image's file, as it is stored in a folder or unpacked from a zip."""

_MOST_PIXELS = 2**26
"""Of an image: what its file unpacks to is bounded before it is unpacked."""

_BITS, _TILE_WIDTH, _TILE_HEIGHT = 258, 322, 323  # numbers of TIFF's tags


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """N images that are still encoded, and the form that they are decoded to.

    Attributes:
        names: of the files; the ending says which decoders one is tried with, others are taken for jpg, png or webp.
        read: the bytes of a file by its name; called from several threads.
        size: height and width.
        channels: 1 or 3.
        shorter_side: scale this side to so many pixels and cut ``size`` out of the middle; None stretches to ``size``.
    """

    names: tuple[str, ...]
    read: Reader
    size: tuple[int, int]
    channels: int
    shorter_side: int | None = None

    def __len__(self) -> int:
        """Number of images."""
        return len(self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that :meth:`decode` gives."""
        return (len(self), *self.size) if self.channels == 1 else (len(self), *self.size, 3)

    def take(self, positions: np.ndarray) -> ImageFiles:
        """The images at ``positions``, int64 [M]."""
        return replace(self, names=tuple(self.names[position] for position in positions))

    def decode(self) -> np.ndarray:
        """All images, uint8 NxHxW for one channel, else NxHxWx3.

        Raises:
            DataError: a file cannot be read, naming it.
        """
        decoded = np.empty(self.shape, dtype=np.uint8)

        def fill(first: int) -> None:
            for position in range(first, min(first + _IMAGES_PER_TASK, len(self))):
                decoded[position] = self._decode_one(self.names[position])

        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(fill, range(0, len(self), _IMAGES_PER_TASK)))
        return decoded

    def _decode_one(self, name: str) -> np.ndarray:
        try:
            with _opened(name, self.read) as image:
                values = _pixels(image, self.channels)
        except DataError:
            raise
        except Exception as error:
            raise damaged(name, _reason(name, error)) from error
        return self._fitted(values)

    def _fitted(self, values: np.ndarray) -> np.ndarray:
        size = self.size
        if self.shorter_side is not None:
            scale = self.shorter_side / min(values.shape[:2])
            size = (round(values.shape[0] * scale), round(values.shape[1] * scale))
        if values.shape[:2] != size:
            values = _resized(values, size)
        top, left = (size[0] - self.size[0]) // 2, (size[1] - self.size[1]) // 2
        return values[top : top + self.size[0], left : left + self.size[1]]


def image_form(name: str, read: Reader) -> tuple[int, int, int]:
    """Height, width and channels (1 for gray, 3 for any other) of an image, from the head of its file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with _opened(name, read) as image:
            is_gray = image.mode in _GRAY_MODES or image.mode.startswith("I")
            return image.height, image.width, 1 if is_gray else 3
    except DataError:
        raise
    except Exception as error:
        raise damaged(name, _reason(name, error)) from error


def _opened(name: str, read: Reader) -> Image.Image:
    """An image whose head is read.

    Whoever uses it takes any exception for a damaged file: decoders raise what a wrong byte makes them trip over, of a
    broken PNG a SyntaxError, of others IndexError, struct.error, MemoryError; a zip of an unknown kind RuntimeError.

    Raises:
        DataError: it would be too large, or its pixels are of a kind whose scale nobody knows.
    """
    with warnings.catch_warnings(action="ignore"):  # of sizes, which are looked at here
        image = Image.open(io.BytesIO(read(name)), formats=_decoders(name))
    _refuse_large(name, "", image.width, image.height)
    bits: tuple[int, ...] = ()
    if isinstance(image, TiffImageFile):
        # libtiff makes room for a whole tile, which may be larger than the image: 900 MB of a file of 200 bytes.
        _refuse_large(name, "tiles of ", image.tag_v2.get(_TILE_WIDTH, 1), image.tag_v2.get(_TILE_HEIGHT, 1))
        bits = image.tag_v2.get(_BITS, ())
    # Pillow brings a PPM's whole numbers to 16 bits; of a TIFF's 12, 32 and floating ones none knows what is white.
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM") or 12 in bits:
        raise DataError(
            f"{name}: pixels of {_kind(image, bits)}, whose scale is not known; store them with 8 or 16 bits"
        )
    return image


def _decoders(name: str) -> tuple[str, ...]:
    return _DECODERS.get(PurePosixPath(name).suffix.lower(), _COMMON)


def _refuse_large(name: str, what: str, width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise damaged(name, f"{what}{width} x {height} pixels, {_MOST_PIXELS} are the most")


def _kind(image: Image.Image, bits: tuple[int, ...]) -> str:
    return "floating point" if image.mode == "F" else "12 bits" if 12 in bits else "signed or 32 bit numbers"


def _pixels(image: Image.Image, channels: int) -> np.ndarray:
    """uint8 HxW or HxWx3; gray is repeated, colour is weighted as in ITU-R 601, transparency is dropped."""
    if image.mode.startswith("I"):  # gray of 16 bits; Pillow's own conversion would clip it at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image.convert("L" if channels == 1 else "RGB"))


def _resized(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    fitted = resize(torch.from_numpy(planes.copy())[None], size)[0].numpy()
    return fitted[0] if values.ndim == 2 else fitted.transpose(1, 2, 0)


def _reason(name: str, error: BaseException) -> str:
    if not isinstance(error, UnidentifiedImageError):
        return str(error)
    tried = _decoders(name)
    return f"not a {'jpg, png or webp' if tried == _COMMON else tried[0].lower()} image"
