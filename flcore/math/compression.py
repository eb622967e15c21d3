"""Uniform quantisation of tensors, packed into bytes (QSGD, Alistarh et al., NeurIPS 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def quantised(values: Tensor, bits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Round values to 2^bits − 1 even levels between ∓ their largest size, at random and without bias.

    Returns:
        Codes uint8, packed into ``ceil(n·bits/8)`` bytes (``bits`` is 2, 4 or 8), and the largest size, float32 [1].
    """
    levels = 2 ** (bits - 1) - 1
    largest = values.abs().max().reshape(1).float() if values.numel() else torch.zeros(1, device=values.device)
    step = (largest / levels).clamp_min(torch.finfo(torch.float32).tiny)
    noise = torch.rand(values.shape, generator=generator).to(values.device)
    codes = (values / step + noise).floor().clamp(-levels, levels) + levels
    return _packed(codes.flatten().to(torch.uint8), bits), largest


def restored(codes: Tensor, largest: Tensor, bits: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the inverse of :func:`quantised`, up to one step: float32 of ``shape``."""
    levels = 2 ** (bits - 1) - 1
    count = math.prod(shape)
    steps = _unpacked(codes, bits)[:count].float() - levels
    return (steps * (largest / levels)).reshape(shape)


def quantised_all(values: Mapping[str, Tensor], bits: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return ``<name>/codes`` and ``<name>/largest`` of tensors by name, each with its own scale."""
    found = {}
    for name, value in values.items():
        found[f"{name}/codes"], found[f"{name}/largest"] = quantised(value, bits, generator)
    return found


def restored_all(sent: Mapping[str, Tensor], like: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Return the inverse of :func:`quantised_all` for tensors of known names and shapes."""
    return {
        name: restored(sent[f"{name}/codes"], sent[f"{name}/largest"], bits, value.shape)
        for name, value in like.items()
    }


def _packed(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    padded = torch.cat([codes, codes.new_zeros(-len(codes) % per_byte)]).reshape(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (bits * place)
    return packed


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    mask, per_byte = 2**bits - 1, 8 // bits
    return torch.stack([(packed >> (bits * place)) & mask for place in range(per_byte)], 1).flatten()
