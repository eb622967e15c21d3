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

KINDS = "jpg, png, webp, ppm, pgm, bmp, tif or gif"
"""The same in words."""

_GRAY_MODES = ("1", "L", "LA")
_IMAGES_PER_TASK = 64
LARGEST_FILE = 2**28
"""Bytes of an image's file, as it is stored in a folder or unpacked from a zip."""

_MOST_PIXELS = 2**26
"""Largest image: the size is checked before the file is unpacked."""

_BITS, _INTERPRETATION, _TILE_WIDTH, _TILE_HEIGHT = 258, 262, 322, 323  # numbers of TIFF's tags
_UNKNOWN_EXIF = (SyntaxError, ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error)
_DEPTHS = (8, 10, 12, 14, 16)
"""Bits of a pixel that cameras and scanners give."""


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """N images that are still encoded, and the form that they are decoded to.

    Attributes:
        names: of the files; the ending selects the decoders, unknown ones are taken for jpg, png or webp.
        read: returns the bytes of a file by its name; called from several threads.
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

        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(fill, range(0, len(self), _IMAGES_PER_TASK)))
        return decoded

    def faults(self) -> dict[str, str]:
        return faults_of(self.names, self.read)

    def _decode_one(self, name: str) -> np.ndarray:
        with _damage_named(name), _opened(name, self.read) as image:
            values = _pixels(image, self.channels, self.depth)
        if self.sized_by is not None and values.shape[:2] != self.size:
            (height, width), (own_height, own_width) = self.size, values.shape[:2]
            raise DataError(
                f"{name} has {own_width} x {own_height} pixels, {self.sized_by} has {width} x {height}: set data.size "
                "to bring all images to one size"
            )
        return self._fitted(values)

    def _fitted(self, values: np.ndarray) -> np.ndarray:
        size = self.size
        if self.margin is not None:
            scale = round(min(size) * self.margin) / min(values.shape[:2])
            size = (round(values.shape[0] * scale), round(values.shape[1] * scale))
        if values.shape[:2] != size:
            values = _resized(values, size)
        top, left = (size[0] - self.size[0]) // 2, (size[1] - self.size[1]) // 2
        return values[top : top + self.size[0], left : left + self.size[1]]


def faults_of(names: Sequence[str], read: Reader) -> dict[str, str]:
    """Decode every image and return the reason for each bad file by name."""

    def fault(name: str) -> str | None:
        try:
            with _damage_named(name), _opened(name, read) as image:
                _pixels(image, channels=1, depth=lambda: 16)
        except BadFileError as error:
            return error.reason
        return None

    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        reasons = pool.map(fault, names)
        return {name: reason for name, reason in zip(names, reasons, strict=True) if reason is not None}


def size_of(name: str, read: Reader) -> tuple[int, int]:
    """Return the height and width of an image, after its rotation by EXIF."""
    with _damage_named(name), _opened(name, read) as image:
        _turn_upright(image)
        return image.height, image.width


def is_gray(name: str, read: Reader) -> bool:
    """Return whether an image is gray, with or without transparency; reads the head of its file."""
    with _damage_named(name), _opened(name, read) as image:
        return image.mode in _GRAY_MODES or image.mode.startswith("I")


def depth_of(names: Sequence[str], read: Reader) -> Callable[[], int]:
    """Return a function that returns the bits in use in images that are stored with 16 bits.

    Cameras' 12 bits are often stored as 0 to 4095 of 65535. A single dark image looks the same, so that all images
    decide: the fewest of 8, 10, 12, 14 and 16 bits that hold their largest value. The function reads them at its first
    call.

    Raises:
        DataError: by the function: 16-bit colours use fewer than 15 bits, and Pillow reads the upper 8 only.
    """
    lock = Lock()

    @cache
    def found() -> tuple[int, str | None]:
        gray, colour, first = 0, 0, None
        for name in names:
            # A damaged image is refused when it is decoded.
            with suppress(DataError), _damage_named(name), _opened(name, read) as image:
                if _is_deep_colour(image):
                    first = first or name
                    colour = max(colour, int(np.asarray(image.convert("RGB")).max()))
                elif image.mode.startswith("I;16"):
                    gray = max(gray, int(np.asarray(image).max()))
        depth = next(depth for depth in _DEPTHS if gray < 1 << depth)
        return depth, first if colour < 1 << 6 else None  # the upper bytes of 14 bits

    def asked() -> int:
        with lock:
            depth, too_dark = found()
        if too_dark is not None:
            raise DataError(
                f"{too_dark}: no 16-bit colour image uses the two highest bits; store them with 8 bits, or scale them "
                "to 65535"
            )
        return depth

    return asked


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Raise BadFileError for any exception.

    Decoders raise many types for damaged files, such as SyntaxError, IndexError, struct.error, MemoryError or
    RuntimeError.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise BadFileError(name, _reason(name, error)) from error


def _opened(name: str, read: Reader) -> Image.Image:
    """Return an image with its head read.

    Raises:
        DataError: it would be too large, or the scale of its pixels is unknown.
    """
    content = read(name)
    if not content:
        raise BadFileError(name, "empty")
    with warnings.catch_warnings(action="ignore"):  # of sizes, which are looked at here
        image = Image.open(io.BytesIO(content), formats=_decoders(name))
    _refuse_large(name, "", image.width, image.height)
    bits: tuple[int, ...] = ()
    is_negative = False
    if isinstance(image, TiffImageFile):
        # libtiff makes room for a whole tile, which may be larger than the image: 900 MB of a file of 200 bytes.
        _refuse_large(name, "tiles of ", image.tag_v2.get(_TILE_WIDTH, 1), image.tag_v2.get(_TILE_HEIGHT, 1))
        bits = image.tag_v2.get(_BITS, ())
        is_negative = image.mode.startswith("I;16") and image.tag_v2.get(_INTERPRETATION) == 0  # which Pillow leaves so
    # Pillow brings a PPM's whole numbers to 16 bits; of a TIFF's 12, 32 and floating ones none knows what is white.
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM") or 12 in bits:
        raise BadFileError(
            name, f"pixels of {_kind(image, bits)}, whose scale is not known; store them with 8 or 16 bits"
        )
    if is_negative or image.mode == "LAB":
        kind = "16 bits whose 0 is white" if is_negative else "Lab colour"
        raise BadFileError(name, f"pixels of {kind} are not read; store them as RGB, or as gray whose 0 is black")
    return image


def _decoders(name: str) -> tuple[str, ...]:
    return _DECODERS.get(PurePosixPath(name).suffix.lower(), _COMMON)


def _refuse_large(name: str, what: str, width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise BadFileError(name, f"{what}{width} x {height} pixels, {_MOST_PIXELS} are the most")


def _kind(image: Image.Image, bits: tuple[int, ...]) -> str:
    return "floating point" if image.mode == "F" else "12 bits" if 12 in bits else "signed or 32 bit numbers"


def _pixels(image: Image.Image, channels: int, depth: Callable[[], int]) -> np.ndarray:
    """Return uint8 HxW or HxWx3, upright, over white; gray is repeated, colour is weighted as in ITU-R 601."""
    if _is_deep_colour(image):
        depth()  # raises where the upper 8 bits would be a few shades
    _scale_transparency(image)
    is_portable = image.format == "PPM"  # states its own maximum, which Pillow scales to 16 bits
    _turn_upright(image)
    if image.mode.startswith("I"):  # gray of 16 bits; Pillow's own conversion would clip it at 255
        values = np.asarray(image)
        shown = (values >> (8 if is_portable else depth() - 8)).astype(np.uint8)
        shown[values == image.info.get("transparency", -1)] = 255
        image = Image.fromarray(shown)
    elif image.has_transparency_data:
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    return np.asarray(image.convert("L" if channels == 1 else "RGB"))


def _is_deep_colour(image: Image.Image) -> bool:
    """Return whether the file has 16-bit colours (Pillow reads 8 bits); call it before decoding."""
    return not image.mode.startswith("I") and any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))


def _scale_transparency(image: Image.Image) -> None:
    """Scale a PNG's transparent grey of 1, 2 or 4 bits to 8 bits, as Pillow scales pixels; call it before decoding."""
    value = image.info.get("transparency")
    if image.format == "PNG" and isinstance(value, int):
        tile = getattr(image, "tile", ())
        image.info["transparency"] = value * {"1": 255, "L;2": 85, "L;4": 17}.get(str(tile[0][3]) if tile else "", 1)


def _turn_upright(image: Image.Image) -> None:
    """Decode an image and rotate it in place by its EXIF orientation; unreadable EXIF data are ignored."""
    image.load()
    with suppress(*_UNKNOWN_EXIF):
        ImageOps.exif_transpose(image, in_place=True)


def _resized(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    fitted = resize(torch.from_numpy(planes.copy())[None], size)[0].numpy()
    return fitted[0] if values.ndim == 2 else fitted.transpose(1, 2, 0)


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:  # such as of a link to nothing
        return error.strerror
    if not isinstance(error, UnidentifiedImageError):
        return str(error)
    tried = _decoders(name)
    return f"not a {'jpg, png or webp' if tried == _COMMON else tried[0].lower()} image"
