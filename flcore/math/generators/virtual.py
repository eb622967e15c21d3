"""Virtual images that nobody trained: noise with a class (VHL, Tang et al., ICML 2022)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gaussian_virtual_images(
    num_classes: int,
    per_class: int,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    map_size: int = 8,
    std: float = 0.5,
) -> Tensor:
    """VHL's virtual set: noise around one random mean map per class (baselines.md section 8).

    A mean map ``[C, map_size, map_size]`` per class from N(0, 1), samples from N(mean, std²), enlarged bilinearly to
    the image size, scaled with the minimum and maximum of the *whole set* to 0..255 and rounded.

    Args:
        num_classes: K.
        per_class: n, images of every class.
        shape: (C, H, W) of an image; one-channel sets draw one-channel maps.
        generator: a CPU generator; the set is a function of its state.
        map_size: side of the mean maps.
        std: standard deviation within a class, before the scaling.

    Returns:
        uint8 ``[K·n, C, H, W]``, class-major: image i has label ``i // per_class``.
    """
    channels, height, width = shape
    means = torch.randn(num_classes, 1, channels, map_size, map_size, generator=generator)
    maps = means + std * torch.randn(num_classes, per_class, channels, map_size, map_size, generator=generator)

    def enlarge(block: Tensor) -> Tensor:
        return F.interpolate(block, size=(height, width), mode="bilinear", align_corners=False)

    # Two passes class by class: the whole set as float32 would need four times the memory of the result.
    low = min(float(enlarge(block).min()) for block in maps)
    high = max(float(enlarge(block).max()) for block in maps)
    scale = 255 / max(high - low, 1e-12)
    return torch.cat([((enlarge(block) - low) * scale).round().clamp(0, 255).to(torch.uint8) for block in maps])
