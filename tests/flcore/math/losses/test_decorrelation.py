"""FedDecorr's penalty by hand, in both scalings; what it does not depend on (baselines.md section 12)."""

from __future__ import annotations

import pytest
import torch

from flcore.math.losses.basic import correlation_penalty

# Deviations from the means 4 and 5: (-3, -3), (-1, 0), (1, 0), (3, 3). Squares add up to 20 and 18, products to 18: the
# correlation is 18/√360 = 0.948683, and (ZᵀZ)_12 is 3 times that, √8.1.
FEATURES = torch.tensor([[1.0, 2.0], [3.0, 5.0], [5.0, 5.0], [7.0, 8.0]])


def test_by_hand() -> None:
    """Fact a. Code: 8.1/4 = 2.025. Paper: (1 + 1 + 2·0.9)/4 = 0.95."""
    assert correlation_penalty(FEATURES).item() == pytest.approx(2.025, abs=1e-6)
    assert correlation_penalty(FEATURES, scaling="paper").item() == pytest.approx(0.95, abs=1e-6)


def test_perfectly_correlated_columns() -> None:
    """Fact b, B = 3: (ZᵀZ)_12 = 2, so the code's is 4/3 and the paper's 4·1/4 = 1."""
    column = torch.tensor([1.0, 2.0, 6.0])
    features = torch.stack([column, 2 * column - 5], dim=1)
    assert correlation_penalty(features).item() == pytest.approx(4 / 3, abs=1e-6)
    assert correlation_penalty(features, scaling="paper").item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("scaling", ["code", "paper"])
def test_shifting_and_scaling_a_column_changes_nothing(scaling: str) -> None:
    """Fact c; a negative factor turns signs of correlations, which are squared."""
    changed = FEATURES * torch.tensor([3.0, -0.5]) + torch.tensor([-7.0, 2.0])
    first, second = (correlation_penalty(values, scaling=scaling) for values in (FEATURES, changed))  # type: ignore[arg-type]
    assert first.item() == pytest.approx(second.item(), abs=1e-5)


@pytest.mark.parametrize("scaling", ["code", "paper"])
def test_one_sample_and_dead_dimensions(scaling: str) -> None:
    """One sample: 0. A dimension that is always 0 is correlated with nothing; nothing of it is NaN."""
    assert correlation_penalty(FEATURES[:1], scaling=scaling).item() == 0  # type: ignore[arg-type]
    assert correlation_penalty(FEATURES, scaling=scaling, weight=torch.tensor([1.0, 0, 0, 0])).item() == 0  # type: ignore[arg-type]
    with_dead = torch.cat([FEATURES, torch.zeros(4, 1)], dim=1).requires_grad_()
    penalty = correlation_penalty(with_dead, scaling=scaling)  # type: ignore[arg-type]
    # Of 6 entries beside the diagonal 2 are 8.1; of 9 entries 2 are 1 and 2 are 0.9.
    assert penalty.item() == pytest.approx(8.1 / 3 / 4 if scaling == "code" else 3.8 / 9, abs=1e-6)
    (gradient,) = torch.autograd.grad(penalty, with_dead)
    assert bool(torch.isfinite(gradient).all())
