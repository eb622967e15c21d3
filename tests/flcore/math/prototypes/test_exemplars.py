"""Exemplars, and answers of head and exemplars together (fedcspc.md, sections 5.5, 6 and 8, fact 9)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flcore.math.prototypes.class_means import fuse, to_unit_range


def close(values: Tensor, *expected: float) -> bool:
    return bool(torch.allclose(values.flatten(), torch.tensor(expected, dtype=torch.float32), atol=2e-6))


LOGITS, COSINES = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.2, 0.9, 0.1]])


@pytest.mark.parametrize(
    ("share", "expected", "winner"),
    [
        (0.0, (0.665241, 0.244728, 0.090031), 0),
        (0.1, (0.615741, 0.289293, 0.094966), 0),
        (0.3, (0.516742, 0.378422, 0.104837), 0),
        (0.5, (0.417742, 0.467550, 0.114707), 1),
        (1.0, (0.170244, 0.690372, 0.139384), 1),
    ],
)
def test_fusion_of_probabilities(share: float, expected: tuple[float, ...], winner: int) -> None:
    """Section 8, 9."""
    fused = fuse(LOGITS, COSINES, share, 0.5, "softmax")
    assert close(fused, *expected)
    assert fused.argmax().item() == winner


def test_other_fusions() -> None:
    """Authors: section 8, 9, whose network has weight 0.1. Min-max: (1, 1/2, 0) and (1/8, 1, 0), half of each."""
    assert close(fuse(LOGITS, COSINES, 0.9, 0.5, "authors"), 1.542642, 5.544683, 1.099262)
    assert close(fuse(LOGITS, COSINES, 0.5, 0.5, "minmax"), 0.5625, 0.75, 0)


def test_a_class_without_exemplar() -> None:
    """Its knowledge probability is 0: softmax over the others, 1/(1 + e^1.6) = 0.167982 for cosines 0.9 and 0.1."""
    missing = torch.tensor([[-torch.inf, 0.9, 0.1]])
    assert close(fuse(LOGITS, missing, 1.0, 0.5, "softmax"), 0, 1 - 0.167982, 0.167982)
    assert close(fuse(LOGITS, missing, 0.9, 0.5, "authors"), 0.2, 0.1 + 0.9 * math.exp(1.8), 0.9 * math.exp(0.2))
    assert close(fuse(LOGITS, missing, 0.5, 0.5, "minmax"), 0.5, 0.75, 0)
    assert close(to_unit_range(torch.tensor([[-torch.inf, 3.0, -torch.inf]])), 0, 0, 0)
