"""Operations on arrays of images: resizing, channels, statistics, normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flcore.core.errors import ConfigError
from flcore.core.text import to_yaml

# Luma weights of ITU-R 601 in 1/65536, as in the usual conversion of RGB to gray.
_LUMA = (19595, 38470, 7471)
_BLOCK = 256  # images that are counted at a time


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 images [N, C, H, W] to ``size`` (height, width), bilinear and antialiased, contiguous.

    Torch resizes uint8 in fixed-point arithmetic, image by image: the result does not depend on the number of threads.
    """
    if tuple(images.shape[-2:]) == size:
        return images.contiguous()
    return functional.interpolate(images, size=size, mode="bilinear", antialias=True).contiguous()


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Convert gray to RGB by repetition, RGB to gray by luma (ITU-R 601, rounded); uint8 [N, C, H, W]."""
    have = images.shape[1]
    if have == channels:
        return images
    if (have, channels) == (1, 3):
        return images.repeat(1, 3, 1, 1)
    if (have, channels) == (3, 1):
        red, green, blue = (images[:, c : c + 1].to(torch.int32) * weight for c, weight in enumerate(_LUMA))
        return ((red + green + blue + 32768) >> 16).to(torch.uint8)
    raise ValueError(f"cannot convert images of {have} channels to {channels}")


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of uint8 [N, C, H, W], on the scale 0 to 1, to 4 decimals."""
    # Through histograms: integer sums are exact, so that the result cannot depend on the order of summation.
    histograms = np.zeros((images.shape[1], 256), dtype=np.int64)
    for first in range(0, len(images), _BLOCK):
        block = images[first : first + _BLOCK].numpy()
        for c, histogram in enumerate(histograms):
            histogram += np.bincount(block[:, c].ravel(), minlength=256)
    pairs = [_mean_and_std(histogram) for histogram in histograms]
    return tuple(mean for mean, _ in pairs), tuple(std for _, std in pairs)


def _mean_and_std(histogram: np.ndarray) -> tuple[float, float]:
    levels = np.arange(256)
    count = int(histogram.sum())
    total, squares = int(histogram @ levels), int(histogram @ levels**2)
    mean = total / count
    variance = (count * squares - total**2) / count**2
    return round(mean / 255, 4), round(variance**0.5 / 255, 4)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return ``(images / 255 - mean) / std`` per channel of uint8 [..., C, H, W], float32, as one multiply and add."""
    return scaled(images, *scale_and_shift(mean, std, images.device))


def scale_and_shift(mean: Sequence[float], std: Sequence[float], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the factor and the summand of :func:`normalise`, float32 [C, 1, 1] each."""
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    return _per_channel([1 / (255 * s) for s in std], device), _per_channel(shift, device)


def scaled(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return images [..., C, H, W] as float32, times ``scale``, plus ``shift``."""
    return torch.addcmul(shift, images.to(torch.float32), scale)


def _per_channel(values: Sequence[float], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


ChannelValues = float | tuple[float, ...]
"""One number for all channels, or one for each."""

Normalisation = tuple[ChannelValues, ChannelValues]
"""Mean and standard deviation, on the scale 0 to 1."""


def of_channels(normalisation: Normalisation, channels: int, owner: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each of ``channels``, or raise ConfigError with the images' ``owner``."""

    def each(key: str, values: ChannelValues) -> tuple[float, ...]:
        if not isinstance(values, tuple):
            return (values,) * channels
        if len(values) != channels:
            number = "1 channel" if channels == 1 else f"{channels} channels"
            key = f"data.{key} = {to_yaml(list(values))}"
            raise ConfigError(f"{key}: images of {owner} have {number}; give one number, or one for each")
        return values

    return each("mean", normalisation[0]), each("std", normalisation[1])


Policy = Literal["none", "crop_flip", "reflect_crop_flip", "crop_flip_rot"]

_PAD = 4
_MAX_DEGREES = 15.0


def augmentation_draws(numbers: Tensor, policy: Policy) -> dict[str, Tensor]:
    """Return the draws of images for :func:`augment`, from uniform integers below 2^32, int64 [..., 4] each.

    ``shift`` int64 [..., 2], rows and columns from 0 to 8; ``flip`` bool [...]; for ``crop_flip_rot`` also ``angle``
    float32 [...], degrees from -15 to 15. Nothing for ``none``.
    """
    if policy == "none":
        return {}
    draws = {"shift": (numbers[..., :2] * (2 * _PAD + 1)) >> 32, "flip": numbers[..., 2] < 2**31}
    if policy == "crop_flip_rot":
        uniform = (numbers[..., 3] >> 8).to(torch.float32) * 2**-24
        draws["angle"] = (2 * uniform - 1) * _MAX_DEGREES
    return draws


def augment(images: Tensor, policy: Policy, draws: Mapping[str, Tensor], fill: Tensor | float = 0.0) -> Tensor:
    """Pad by 4 and crop at random, flip horizontally and, for ``crop_flip_rot``, rotate about the centre (bilinear).

    ``images`` are float [B, C, H, W], normalised. ``fill`` is the value outside, one number or [C]: 0 is the mean
    colour; black, as in published code that pads before it normalises, is ``-mean / std``. ``reflect_crop_flip``
    mirrors instead.
    """
    if policy == "none":
        return images
    moved = {name: draw.to(images.device) for name, draw in draws.items()}
    if policy == "reflect_crop_flip":
        padded = functional.pad(images, (_PAD, _PAD, _PAD, _PAD), mode="reflect")
        return _crop_and_flip(padded, moved["shift"], moved["flip"])
    background = torch.as_tensor(fill, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
    # Minus: outside is zero from here on.
    padded = functional.pad(images - background, (_PAD, _PAD, _PAD, _PAD))
    changed = _crop_and_flip(padded, moved["shift"], moved["flip"])
    if policy == "crop_flip_rot":
        changed = _rotate(changed, moved["angle"])
    return changed + background


def _crop_and_flip(padded: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    channels, padded_width = padded.shape[1], padded.shape[-1]
    height, width = (side - 2 * _PAD for side in padded.shape[-2:])
    rows = shift[:, :1] + torch.arange(height, device=padded.device)
    columns = torch.arange(width, device=padded.device)
    columns = shift[:, 1:] + torch.where(flip[:, None], width - 1 - columns, columns)
    # Pixels by one index each: several times faster than by an index of each axis.
    pixels = (rows[:, :, None] * padded_width + columns[:, None, :]).flatten(1)
    cropped = padded.flatten(2).gather(2, pixels[:, None].expand(-1, channels, -1))
    return cropped.reshape(-1, channels, height, width)


def _rotate(images: Tensor, degrees: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    radians = degrees.to(images.dtype) * (math.pi / 180)
    cos, sin, zero = torch.cos(radians), torch.sin(radians), torch.zeros_like(radians)
    # The grid counts in half widths and half heights; the ratios keep the rotation rigid on images that are not square.
    top = torch.stack([cos, -sin * (height / width), zero], dim=-1)
    bottom = torch.stack([sin * (width / height), cos, zero], dim=-1)
    grid = functional.affine_grid(torch.stack([top, bottom], dim=1), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
