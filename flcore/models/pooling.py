"""Maximum of 2×2 pixels, as vectors where nobody differentiates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def max_pool(maps: Tensor) -> Tensor:
    """Non-overlapping 2×2 maximum of maps [..., H, W], [..., H // 2, W // 2]: ``F.max_pool2d(maps, 2)``.

    The same values, NaN included. PyTorch notes where each maximum stood, one number after the other, whether or not a
    gradient will ask for it; on a CPU that took 7 to 12 times as long as two elementwise maxima of rows and of columns,
    and in scoring ``fedcspc_cnn`` longer than its convolutions. With gradients it stays PyTorch's, which gives a tie's
    to the first, and which the compiler of steps looks for.

    Raises:
        RuntimeError: fewer than two rows or columns.
    """
    height, width = maps.shape[-2:]
    if torch.is_grad_enabled() or maps.device.type != "cpu" or min(height, width) < 2:
        return F.max_pool2d(maps, 2)
    height, width = height - height % 2, width - width % 2
    rows = torch.maximum(maps[..., 0:height:2, :width], maps[..., 1:height:2, :width])
    return torch.maximum(rows[..., 0::2], rows[..., 1::2])


class MaxPool(nn.MaxPool2d):
    """:func:`max_pool` as a layer."""

    def __init__(self) -> None:
        """2×2, as every network here has it."""
        super().__init__(2)

    def forward(self, input: Tensor) -> Tensor:
        """Pool maps [B, C, H, W]."""
        return max_pool(input)
