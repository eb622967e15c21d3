"""Small convolutions as matrix products, for steps that are compiled.

A convolution of a few channels spends its time in layout conversions for the library's kernels. As one product of the
weights [O, C·h·w] with the columns [C·h·w, B·H·W] of a mini-batch, values are in order of channels: bias, BatchNorm and
activation are contiguous passes, and the compiler fuses the columns with the operation before them. Columns larger than
a cache lose that again, hence :data:`MAX_COLUMN_BYTES`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_COLUMN_BYTES = {"cpu": 3 * 2**20, "cuda": 64 * 2**20}
"""Columns of a client's mini-batch above which the library's convolution is used.

On a CPU no cache holds more. A GPU's library goes through a stack's convolutions client by client, as long as columns
are few.
"""

Pair = tuple[int, int]


class _Im2colLayer(nn.Conv2d):
    """A two-dimensional convolution that may be computed by columns, where they are ``most_bytes`` at most."""

    most_bytes: int

    def forward(self, input: Tensor) -> Tensor:
        """Images [B, C, H, W] to [B, O, H', W']."""
        stride, padding, kernel = cast(Pair, self.stride), cast(Pair, self.padding), cast(Pair, self.kernel_size)
        rows, columns = output_size((input.shape[2], input.shape[3]), kernel, stride, padding)
        held = 4 * input.shape[0] * input.shape[1] * math.prod(kernel) * rows * columns
        if held > self.most_bytes:
            return super().forward(input)
        found, _ = _Im2colConvolution.apply(input, self.weight, kernel, stride, padding)
        return found if self.bias is None else found + self.bias.reshape(-1, 1, 1)


def use_im2col(module: nn.Module, device: str = "cpu") -> nn.Module:
    """Have every plain convolution of a module, in place, computed by columns where these are small for the device."""
    for layer in module.modules():
        plain = type(layer) is nn.Conv2d and layer.groups == 1 and layer.dilation == (1, 1)
        if plain and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            layer.__class__ = _Im2colLayer
            cast(_Im2colLayer, layer).most_bytes = MAX_COLUMN_BYTES[device]
    return module


def output_size(size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Rows and columns that a convolution yields."""
    rows, columns = (
        (length + 2 * pad - width) // step + 1
        for length, width, step, pad in zip(size, kernel, stride, padding, strict=True)
    )
    return rows, columns


class _Im2colConvolution(torch.autograd.Function):
    """Convolution of [B, C, H, W] with weights [O, C, h, w]; the second result, the columns, is for the way back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        columns = im2col(images.transpose(0, 1), kernel, stride, padding)
        size = output_size((images.shape[2], images.shape[3]), kernel, stride, padding)
        product = weight.reshape(weight.shape[0], -1) @ columns
        return product.reshape(weight.shape[0], images.shape[0], *size).transpose(0, 1), columns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        images, weight, *ctx.geometry = inputs
        ctx.shape = tuple(images.shape)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(weight, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        weight, columns = ctx.saved_tensors
        gradient = gradients[0].transpose(0, 1).reshape(weight.shape[0], -1)
        of_weight = (gradient @ columns.t()).reshape(weight.shape)
        of_images = None
        if ctx.needs_input_grad[0]:
            batch, channels, *size = ctx.shape
            spread = weight.reshape(weight.shape[0], -1).t() @ gradient
            of_images = col2im(spread, (channels, batch, *size), *ctx.geometry).transpose(0, 1)
        return of_images, of_weight, None, None, None


def im2col(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Columns [C·h·w, B·H'·W'] of images [C, B, H, W]: what each weight is multiplied with at each place."""
    channels, batch, *size = images.shape
    rows, columns = output_size((size[0], size[1]), kernel, stride, padding)
    padded = F.pad(images, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else images
    taps = [
        padded[:, :, i : i + stride[0] * (rows - 1) + 1 : stride[0], j : j + stride[1] * (columns - 1) + 1 : stride[1]]
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    # A stack of one is compiled to a view, and one of every second pixel cannot be flattened as the copy could.
    merge_terms = torch.stack(taps, dim=1) if len(taps) > 1 else taps[0].clone(memory_format=torch.contiguous_format)
    return merge_terms.reshape(channels * math.prod(kernel), batch * rows * columns)


def col2im(spread: Tensor, shape: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The adjoint of :func:`im2col`: maps gradients by column to image gradients [C, B, H, W].

    Pixels form stride·stride lattices, and only some weights reach each; their shifted sums are one fused pass.
    """
    channels, batch, height, width = shape
    rows, columns = output_size((height, width), kernel, stride, padding)
    taps = spread.reshape(channels, *kernel, batch, rows, columns)
    # Rows and columns of a lattice, padding included.
    high, wide = (
        -(-(length + 2 * pad) // step) for length, pad, step in zip((height, width), padding, stride, strict=True)
    )

    def lattice(first: int, second: int) -> Tensor:
        parts = [
            F.pad(
                taps[:, i, j],
                (j // stride[1], wide - columns - j // stride[1], i // stride[0], high - rows - i // stride[0]),
            )
            for i in range(first, kernel[0], stride[0])
            for j in range(second, kernel[1], stride[1])
        ]
        if not parts:
            return taps.new_zeros(channels, batch, high, wide)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    lines = [_interleaved([lattice(first, second) for second in range(stride[1])], dim=4) for first in range(stride[0])]
    whole = _interleaved(lines, dim=3)
    return whole[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width]


def _interleaved(parts: list[Tensor], dim: int) -> Tensor:
    """Tensors one between the other: along the dimension in front of ``dim``, element by element."""
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[dim - 1] *= len(parts)
    return torch.stack(parts, dim=dim).reshape(shape)
