"""Images in files, decoded in blocks: memory never holds a large list at once.

Of a file with several images, such as GIF and TIFF, the first is read.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePosixPath
from threading import Lock

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from flcore.core.errors import DataError
from flcore.data.images import resize
from flcore.data.sources.base import BadFileError

Reader = Callable[[str], bytes]
"""Returns the bytes of a file by its name; called from several threads."""

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
"""Endings of readable files, in lower case."""

READABLE = "jpg, png, webp, ppm, pgm, bmp, tif or gif"
"""The same in words."""

LARGEST_FILE = 2**28
"""Bytes of an image's file, as it is stored in a folder or unpacked from a zip."""

_MOST_PIXELS = 2**26  # checked before a file is unpacked
_IMAGES_PER_TASK = 64
_GRAY_MODES = ("1", "L", "LA")
_DEPTHS = (8, 10, 12, 14, 16)  # bits of a pixel of cameras and scanners
_BITS, _INTERPRETATION, _TILE_WIDTH, _TILE_HEIGHT = 258, 262, 322, 323  # numbers of TIFF's tags
_UNKNOWN_EXIF = (SyntaxError, ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error)


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """N images that are still encoded, and the form that they are decoded to.

    Attributes:
        names: of the files; the ending selects the decoders, unknown ones are taken for jpg, png or webp.
        size: height and width.
        channels: 1 or 3.
        margin: length of the scaled shorter side divided by ``size``, which is cut out of the middle; None stretches.
        sized_by: name of the image that has this size; images of other sizes are refused. None: all are scaled.
        depth: returns the bits in use of 16-bit images; called for such images only.
    """

    names: tuple[str, ...]
    read: Reader
    size: tuple[int, int]
    channels: int
    margin: float | None = None
    sized_by: str | None = None
    depth: Callable[[], int] = lambda: 16

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.size) if self.channels == 1 else (len(self), *self.size, 3)

    def take(self, positions: np.ndarray) -> ImageFiles:
        return replace(self, names=tuple(self.names[position] for position in positions))

    def in_form(self, size: tuple[int, int] | None, channels: int) -> ImageFiles:
        if size is None:
            return replace(self, channels=channels)
        return replace(self, size=size, channels=channels, sized_by=None)

    def decode(self) -> np.ndarray:
        decoded = np.empty(self.shape, dtype=np.uint8)

        def fill(first: int) -> None:
            for position in range(first, min(first + _IMAGES_PER_TASK, len(self))):
                decoded[position] = self._decode_one(self.names[position])

        with _threads() as pool:
            list(pool.map(fill, range(0, len(self), _IMAGES_PER_TASK)))
        return decoded

    def faults(self) -> dict[str, str]:
        return faults_of(self.names, self.read)

    def _decode_one(self, name: str) -> np.ndarray:
        with _opened(name, self.read) as image:
            values = _pixels(image, self.channels, self.depth)
        if self.sized_by is not None and values.shape[:2] != self.size:
            raise DataError(
                f"{name} has {values.shape[1]} x {values.shape[0]} pixels, {self.sized_by} has {self.size[1]} x "
                f"{self.size[0]}: set data.size to bring all images to one size"
            )
        size = self.size
        if self.margin is not None:
            scale = round(min(size) * self.margin) / min(values.shape[:2])
            size = (round(values.shape[0] * scale), round(values.shape[1] * scale))
        if values.shape[:2] != size:
            planes = torch.from_numpy(np.atleast_3d(values).transpose(2, 0, 1).copy())
            values = resize(planes[None], size)[0].permute(1, 2, 0).numpy().reshape(*size, *values.shape[2:])
        top, left = (size[0] - self.size[0]) // 2, (size[1] - self.size[1]) // 2
        return values[top : top + self.size[0], left : left + self.size[1]]


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))


def faults_of(names: Sequence[str], read: Reader) -> dict[str, str]:
    """Decode every image and return the reason for each bad file by name."""

    def fault(name: str) -> str | None:
        try:
            with _opened(name, read) as image:
                _pixels(image, channels=1, depth=lambda: 16)
        except BadFileError as error:
            return error.reason
        return None

    with _threads() as pool:
        reasons = zip(names, pool.map(fault, names), strict=True)
        return {name: reason for name, reason in reasons if reason is not None}


def size_of(name: str, read: Reader) -> tuple[int, int]:
    """Return the height and width of an image, after its rotation by EXIF."""
    with _opened(name, read) as image:
        _turn_upright(image)
        return image.height, image.width


def is_gray(name: str, read: Reader) -> bool:
    """Return whether an image is gray, with or without transparency; reads the head of its file."""
    with _opened(name, read) as image:
        return image.mode in _GRAY_MODES or image.mode.startswith("I")


def depth_of(names: Sequence[str], read: Reader) -> Callable[[], int]:
    """Return a function that returns the bits in use in images that are stored with 16 bits.

    Cameras' 12 bits are often stored as 0 to 4095 of 65535. A single dark image looks the same, so that all images
    decide: the fewest of 8, 10, 12, 14 and 16 bits that hold their largest value. The first call reads them.

    Raises:
        DataError: by the function: 16-bit colours use fewer than 15 bits, and Pillow reads the upper 8 only.
    """
    lock = Lock()

    @cache
    def measure() -> tuple[int, str | None]:
        gray, colour, first = 0, 0, None
        for name in names:
            with suppress(DataError), _opened(name, read) as image:  # damaged images are refused when decoded
                if _is_deep_colour(image):
                    first = first or name
                    colour = max(colour, int(np.asarray(image.convert("RGB")).max()))
                elif image.mode.startswith("I;16"):
                    gray = max(gray, int(np.asarray(image).max()))
        depth = next(depth for depth in _DEPTHS if gray < 1 << depth)
        return depth, first if colour < 1 << 6 else None  # the upper bytes of 14 bits

    def measure_once() -> int:
        with lock:
            depth, too_dark = measure()
        if too_dark is not None:
            raise DataError(
                f"{too_dark}: no 16-bit colour image uses the two highest bits; store them with 8 bits, or scale them "
                "to 65535"
            )
        return depth

    return measure_once


@contextmanager
def _opened(name: str, read: Reader) -> Iterator[Image.Image]:
    """Yield an image with its head read; raise BadFileError for any exception inside.

    Decoders raise many types for damaged files, such as SyntaxError, IndexError, struct.error, MemoryError or
    RuntimeError. Images that are too large, or of an unknown scale of pixels, are refused.
    """
    try:
        with _open(name, read) as image:
            yield image
    except DataError:
        raise
    except Exception as error:
        raise BadFileError(name, _reason(name, error)) from error


def _open(name: str, read: Reader) -> Image.Image:
    content = read(name)
    if not content:
        raise BadFileError(name, "empty")
    with warnings.catch_warnings(action="ignore"):  # about sizes, which are checked here
        image = Image.open(io.BytesIO(content), formats=_decoders(name))
    _refuse_large(name, "", image.width, image.height)
    bits: tuple[int, ...] = ()
    is_negative = False
    if isinstance(image, TiffImageFile):
        # libtiff makes room for a whole tile, which may be larger than the image: 900 MB of a file of 200 bytes.
        _refuse_large(name, "tiles of ", image.tag_v2.get(_TILE_WIDTH, 1), image.tag_v2.get(_TILE_HEIGHT, 1))
        bits = image.tag_v2.get(_BITS, ())
        is_negative = image.mode.startswith("I;16") and image.tag_v2.get(_INTERPRETATION) == 0  # Pillow leaves them so
    # Pillow scales a PPM's whole numbers to 16 bits; the white of a TIFF's 12, 32 or floating bits is unknown.
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM") or 12 in bits:
        kind = "floating point" if image.mode == "F" else "12 bits" if 12 in bits else "signed or 32 bit numbers"
        raise BadFileError(name, f"pixels of {kind} have no known scale; store them with 8 or 16 bits")
    if is_negative or image.mode == "LAB":
        kind = "16 bits where 0 is white" if is_negative else "Lab colour"
        raise BadFileError(name, f"pixels of {kind} are not read; store them as RGB, or as gray where 0 is black")
    return image


def _decoders(name: str) -> tuple[str, ...]:
    return _DECODERS.get(PurePosixPath(name).suffix.lower(), _COMMON)


def _refuse_large(name: str, what: str, width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise BadFileError(name, f"{what}{width} x {height} pixels, {_MOST_PIXELS} are the most")


def _pixels(image: Image.Image, channels: int, depth: Callable[[], int]) -> np.ndarray:
    """Return uint8 HxW or HxWx3, upright, over white; gray is repeated, colour is weighted as in ITU-R 601."""
    if _is_deep_colour(image):
        depth()  # raises where the upper 8 bits would be a few shades
    value, tile = image.info.get("transparency"), getattr(image, "tile", ())
    if image.format == "PNG" and isinstance(value, int):  # a gray of 1, 2 or 4 bits, which Pillow does not scale to 8
        image.info["transparency"] = value * {"1": 255, "L;2": 85, "L;4": 17}.get(str(tile[0][3]) if tile else "", 1)
    is_portable = image.format == "PPM"  # states its own maximum, which Pillow scales to 16 bits
    _turn_upright(image)
    if image.mode.startswith("I"):  # gray of 16 bits; Pillow's own conversion would clip it at 255
        values = np.asarray(image)
        shades = (values >> (8 if is_portable else depth() - 8)).astype(np.uint8)
        shades[values == image.info.get("transparency", -1)] = 255
        image = Image.fromarray(shades)
    elif image.has_transparency_data:
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    return np.asarray(image.convert("L" if channels == 1 else "RGB"))


def _is_deep_colour(image: Image.Image) -> bool:
    """Return whether the file has 16-bit colours (Pillow reads 8 bits); call it before decoding."""
    return not image.mode.startswith("I") and any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))


def _turn_upright(image: Image.Image) -> None:
    """Decode an image and rotate it in place by its EXIF orientation; unreadable EXIF data are ignored."""
    image.load()
    with suppress(*_UNKNOWN_EXIF):
        ImageOps.exif_transpose(image, in_place=True)


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:  # such as of a link to nothing
        return error.strerror
    if not isinstance(error, UnidentifiedImageError):
        return str(error)
    tried = _decoders(name)
    return f"not a {'jpg, png or webp' if tried == _COMMON else tried[0].lower()} image"
