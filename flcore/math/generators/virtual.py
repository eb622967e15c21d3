"""VHL's virtual images: noise with a class (Tang et al., ICML 2022)."""

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
    """Return VHL's virtual set, uint8 ``[K·n, C, H, W]``, class-major: noise around a random mean map per class.

    A mean map ``[C, map_size, map_size]`` per class from N(0, 1), n samples each from N(mean, std²), enlarged
    bilinearly to ``shape`` (C, H, W), scaled with the minimum and maximum of the *whole set* to 0..255 and rounded
    (baselines.md section 8). The set is a function of the state of ``generator``, on the CPU.
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
