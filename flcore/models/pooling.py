"""2×2 max-pooling, vectorised where no gradient is needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def max_pool(maps: Tensor) -> Tensor:
    """Return the non-overlapping 2×2 maximum of maps [..., H, W], [..., H // 2, W // 2]: ``F.max_pool2d(maps, 2)``.

    The same values, NaN included. PyTorch records the place of each maximum even without gradients; on a CPU that takes
    7 to 12 times as long as two elementwise maxima. With gradients PyTorch's is used, which gives a tie's gradient to
    the first, and which the compiler of steps looks for.

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
        super().__init__(2)

    def forward(self, input: Tensor) -> Tensor:
        return max_pool(input)
