"""How alike two images are: mean squared error, PSNR and SSIM; pixels are floats on 0 to 1."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2


def squared_errors(images: Tensor, others: Tensor) -> Tensor:
    """Mean squared error of every pair of images, [N] for two [N, C, H, W]."""
    return (images - others).square().flatten(1).mean(dim=1)


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of images on 0 to 1; infinite where there is no error."""
    return math.inf if mse == 0 else -10 * math.log10(mse)


def ssim(images: Tensor, others: Tensor) -> Tensor:
    """Structural similarity of every pair of images (Wang et al., IEEE TIP 2004), at most 1.

    Gaussian windows of 11×11 with standard deviation 1.5 that lie inside the image, C1 = 0.01², C2 = 0.03²; the mean
    over windows and channels. Smaller images get the largest odd window that fits.

    Args:
        images: ``[N, C, H, W]``. others: likewise.

    Returns:
        ``[N]``.
    """
    size = min(_WINDOW, *(side - 1 + side % 2 for side in images.shape[-2:]))
    offsets = torch.arange(size, dtype=torch.float64) - size // 2
    line = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    line = line / line.sum()
    window = torch.outer(line, line).expand(images.shape[1], 1, size, size)

    def local_mean(values: Tensor) -> Tensor:
        return F.conv2d(values, window, groups=images.shape[1])

    x, y = images.cpu().double(), others.cpu().double()
    mean_x, mean_y = local_mean(x), local_mean(y)
    # Rounding may make a variance slightly negative, which the constants outweigh.
    variances = local_mean(x * x) - mean_x.square() + local_mean(y * y) - mean_y.square()
    covariance = local_mean(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x.square() + mean_y.square() + _C1)
    structure = (2 * covariance + _C2) / (variances + _C2)
    return (luminance * structure).flatten(1).mean(dim=1)
