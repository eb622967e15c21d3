"""Augmentation of normalised batches: draws first, then a pure transform (data.md, section 1.0).

Draws are separate so that they can travel with a batch to any device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Policy = Literal["none", "crop_flip", "reflect_crop_flip", "crop_flip_rot"]

_PAD = 4
_MAX_DEGREES = 15.0


def draw_augmentation(batch_size: int, policy: Policy, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the random numbers for one batch, on the generator's device; nothing for ``none``.

    ``shift`` int64 [B, 2], rows and columns from 0 to 8; ``flip`` bool [B]; for ``crop_flip_rot`` also ``angle``
    float32 [B], degrees from -15 to 15.
    """
    if policy == "none":
        return {}
    device = generator.device
    draws = {
        "shift": torch.randint(0, 2 * _PAD + 1, (batch_size, 2), generator=generator, device=device),
        "flip": torch.rand(batch_size, generator=generator, device=device) < 0.5,
    }
    if policy == "crop_flip_rot":
        uniform = torch.rand(batch_size, generator=generator, device=device)
        draws["angle"] = (2 * uniform - 1) * _MAX_DEGREES
    return draws


def augment(images: Tensor, policy: Policy, draws: Mapping[str, Tensor], fill: Tensor | float = 0.0) -> Tensor:
    """Pad by 4 and crop at random, flip horizontally and, for ``crop_flip_rot``, rotate about the centre (bilinear).

    Args:
        images: float [B, C, H, W]. policy: as of the draws; ``none`` returns ``images``.
        draws: from :func:`draw_augmentation`, on any device.
        fill: value outside the image, one number or [C]. On normalised images 0 is the mean colour; black, as in
            published code that pads before it normalises, is ``-mean / std``. ``reflect_crop_flip`` mirrors the image
            instead.
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
    batch, channels = padded.shape[:2]
    height, width = (side - 2 * _PAD for side in padded.shape[-2:])
    device = padded.device
    rows = shift[:, :1] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(batch, width)
    columns = shift[:, 1:] + torch.where(flip[:, None], width - 1 - columns, columns)
    sample = torch.arange(batch, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _rotate(images: Tensor, degrees: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    radians = degrees.to(images.dtype) * (math.pi / 180)
    cos, sin, zero = torch.cos(radians), torch.sin(radians), torch.zeros_like(radians)
    # The grid counts in half widths and half heights; the ratios keep the rotation rigid on images that are not square.
    top = torch.stack([cos, -sin * (height / width), zero], dim=-1)
    bottom = torch.stack([sin * (width / height), cos, zero], dim=-1)
    grid = functional.affine_grid(torch.stack([top, bottom], dim=1), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
