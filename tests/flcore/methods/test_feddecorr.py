"""FedDecorr: a step by hand, and what it is for (baselines.md 12)."""

from __future__ import annotations

from typing import Any

import pytest


def test_one_step_by_hand(lab: Any) -> None:
    """z = E·x at E = I for the four samples of fact a: r² = 0.9, variances 20/3 and 18/3; the penalty 9/4·r² = 2.025.

    With z_1 = x_1 + e·x_2 dr/de = (σ_2/σ_1)·(1 - r²) at e = 0, so the penalty rises with E_01 by 9/4·2r·0.1·√0.9 =
    0.405 and with E_10 by 9/4·2r·0.1/√0.9 = 0.45; scaling a dimension changes nothing. The cross-entropy gives E
    nothing through a head of zeros. Learning rate 0.1, β = 2.
    """
    samples = [[1, 2], [3, 5], [5, 5], [7, 8]], [0, 1, 0, 1], [range(4)]
    reply, _ = lab.train(lab.linear(*samples, encoder=True, method={"name": "feddecorr", "beta": 2.0}))
    assert reply.losses["decorrelation"] == pytest.approx(2 * 2.025, abs=1e-5)
    encoder = reply.message["model"].params["encoder.1.weight"]
    assert encoder.flatten().tolist() == pytest.approx([1, -0.2 * 0.405, -0.2 * 0.45, 1], abs=1e-5)
