"""Schedules against the numbers of fedpa.md 8, fedpg.md 8, baselines.md 6 and 11, counted from 0."""

from __future__ import annotations

import pytest

from flcore.core.schedules import exponential


def test_a_floor_is_reached_and_kept() -> None:
    """fedpa.md fact 2: 5·0.98^173 = 0.151733, then 0.15. FedGen, baselines.md 6: 1e-4 when 0.98^r < 1e-5: r > 569.9."""
    pull, fedgen = exponential(5, 0.98, 0.15), exponential(10, 0.98, 1e-4)
    assert pull(173) == pytest.approx(0.151733, abs=1e-6)
    assert pull(174) == pull(10_000) == 0.15
    assert fedgen(1) == pytest.approx(9.8)
    assert fedgen(569) > 1e-4 == fedgen(570)


def test_a_floor_does_not_revive_a_weight_of_zero() -> None:
    assert all(exponential(0, 0.98, 0.15)(t) == 0 for t in (0, 1, 500))


def test_generator_learning_rate_of_fedpg() -> None:
    """fedpg.md fact 8: the 300th step uses 2e-5·0.95^14, afterwards 0.95^15; the sum of 300 steps is 0.00429367.

    Sum by hand: 20·2e-5·(1 - 0.95^15)/0.05 = 0.008·(1 - 0.463291) = 0.004293672.
    """
    schedule = exponential(2e-5, 0.95, every=20)
    rates = [schedule(step) for step in range(300)]
    assert rates[0] == rates[19] == 2e-5
    assert rates[20] == pytest.approx(1.9e-5)
    assert rates[-1] == pytest.approx(2e-5 * 0.95**14)
    assert schedule(300) == pytest.approx(2e-5 * 0.95**15)
    assert sum(rates) == pytest.approx(0.00429367, abs=1e-8)
