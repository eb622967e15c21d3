"""Operations on arrays of images: resizing, channels, statistics, normalisation."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return mean and standard deviation of each of ``channels``; ``owner`` of the images is for errors.

    Raises:
        ConfigError: a list has not one value for each channel.
    """

    def each(key: str, values: ChannelValues) -> tuple[float, ...]:
        if not isinstance(values, tuple):
            return (values,) * channels
        if len(values) != channels:
            number = "1 channel" if channels == 1 else f"{channels} channels"
            key = f"data.{key} = {to_yaml(list(values))}"
            raise ConfigError(f"{key}: images of {owner} have {number}; give one number, or one for each")
        return values

    return each("mean", normalisation[0]), each("std", normalisation[1])
