"""Class means of a few samples (fedpg.md section 4, step 5)."""

from __future__ import annotations

import pytest
import torch

from flcore.math.prototypes.class_means import support_means


def test_supports() -> None:
    """Classes of 3, 4 and 9 samples, m = 4: all of the first two; of the third 4 draws with replacement.

    Features are one-hot, so that a mean shows who was drawn: multiples of 1/4 that sum to 1.
    """
    labels = torch.tensor([0] * 3 + [1] * 4 + [2] * 9)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    found = support_means(torch.eye(16)[order], labels[order], 4, 4, torch.Generator().manual_seed(1))
    assert found.present.tolist() == [True, True, True, False]
    assert found.means[0].tolist() == pytest.approx([1 / 3] * 3 + [0] * 13)
    assert found.means[1].tolist() == [0] * 3 + [1 / 4] * 4 + [0] * 9
    drawn = found.means[2] * 4
    assert drawn[7:].sum().item() == 4
    assert torch.equal(drawn, drawn.round())
    assert 1 < int((drawn > 0).sum()) <= 4


def test_supports_are_drawn_with_replacement() -> None:
    """Among 40 draws of 4 out of 9 one without any repetition every time has a chance of 10^-12."""
    draws = [
        support_means(torch.eye(9), torch.zeros(9, dtype=torch.int64), 1, 4, torch.Generator().manual_seed(seed)).means
        for seed in range(40)
    ]
    assert max(float(draw.max()) for draw in draws) > 1 / 4
