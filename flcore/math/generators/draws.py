"""Inputs of generators: noise and labels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NoiseForm = Literal["uniform", "normal"]


def draw_noise(count: int, noise_dim: int, generator: torch.Generator, form: NoiseForm = "uniform") -> Tensor:
    """Noise float32 ``[count, noise_dim]``: uniform on [0, 1) or standard normal."""
    if form == "uniform":
        return torch.rand(count, noise_dim, generator=generator)
    return torch.randn(count, noise_dim, generator=generator)


def draw_labels(count: int, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return labels int64 ``[count]``, drawn with replacement in proportion to ``weights`` [K], not negative.

    A mask gives uniform labels, label counts give labels by frequency. A class of weight 0 is never drawn.

    Raises:
        ValueError: no class has a positive weight.
    """
    classes = (weights.cpu() > 0).nonzero().flatten()
    if not len(classes):
        raise ValueError("no label can be drawn: no class has a positive weight")
    if not count:
        return classes[:0]  # PyTorch's sampler refuses to draw nothing
    return classes[torch.multinomial(weights.cpu()[classes].double(), count, replacement=True, generator=generator)]
