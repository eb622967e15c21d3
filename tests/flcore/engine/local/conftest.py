"""Steps by hand, for whatever compiles or records them; a fixture, since test modules cannot import each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


def _halving(tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Halve the first tensor in place; the losses are its sum before and the second's largest value."""
    before = tensors[0].sum()
    tensors[0].mul_(0.5)
    return {"sum": before, "most": tensors[1].max()}, [tensors[1] * 2]


def _doubling(tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Another number than :func:`_halving`, and so another graph."""
    return {"sum": tensors[0].mul_(2).sum(), "most": tensors[1].max()}, []


def _tripling(tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    return {"sum": tensors[0].mul_(3).sum(), "most": tensors[1].max()}, []


def _asking(tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Ask a tensor for its value, which has no graph."""
    return {"loss": tensors[0].sum() if tensors[0][0] > 0 else tensors[0].mean()}, []


@dataclass(frozen=True)
class Steps:
    """Functions of tensors, and what they are called with first."""

    example: list[Tensor]
    halving = staticmethod(_halving)
    doubling = staticmethod(_doubling)
    tripling = staticmethod(_tripling)
    asking = staticmethod(_asking)


@pytest.fixture
def steps() -> Steps:
    return Steps([torch.ones(4), torch.arange(3.0)])
