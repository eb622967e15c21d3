"""What generators are asked with: noise and labels, from a stream that is handed in."""

from __future__ import annotations

import pytest
import torch

from flcore.math.generators.networks import draw_labels, draw_noise

T = torch.tensor


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_noise_forms() -> None:
    """20,000 draws: uniform mean 0.5 ± 5·0.2887/√20000 = 0.0102; normal mean 0 ± 0.0354, variance 1 ± 5·√(2/20000)."""
    uniform = draw_noise(2_000, 10, stream())
    normal = draw_noise(2_000, 10, stream(), "normal")
    assert uniform.shape == normal.shape == (2_000, 10)
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean().item() - 0.5) < 0.0102
    assert abs(normal.mean().item()) < 0.0354
    assert abs(normal.var().item() - 1) < 0.05
    assert torch.equal(uniform, draw_noise(2_000, 10, stream()))
    assert not torch.equal(uniform, draw_noise(2_000, 10, stream(1)))


def test_labels_by_mask_and_by_frequency() -> None:
    """8,000 draws; frequencies within 5·√(p(1-p)/8000) < 0.028."""
    for weights, shares in (
        (T([True, False, True, False]), [0.5, 0, 0.5, 0]),
        (T([30, 0, 10, 0]), [0.75, 0, 0.25, 0]),
        (T([0.1, 0.2, 0.3, 0.4]), [0.1, 0.2, 0.3, 0.4]),
    ):
        labels = draw_labels(8_000, weights, stream())
        assert labels.dtype == torch.int64
        found = torch.bincount(labels, minlength=4) / 8_000
        for share, expected in zip(found.tolist(), shares, strict=True):
            assert abs(share - expected) < 0.028 * (expected > 0) + 1e-9
        assert torch.equal(labels, draw_labels(8_000, weights, stream()))


def test_labels_of_nobody() -> None:
    with pytest.raises(ValueError, match="no class"):
        draw_labels(3, torch.zeros(4), stream())
