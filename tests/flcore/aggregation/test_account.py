"""ε of noisy averages: by the formula for one round, between what is exact and what is known to be loose."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from flcore.aggregation.account import account, client_epsilon
from flcore.aggregation.settings import Aggregation

DELTA = 1e-5


def exact(multiplier: float, delta: float) -> float:
    """ε of one Gaussian mechanism (Balle and Wang, ICML 2018, theorem 8), by bisection.

    δ(ε) = Φ(1/2s - εs) - exp(ε)·Φ(-1/2s - εs) for noise of s times the sensitivity; it falls in ε.
    """
    low, high = 0.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        second = math.exp(middle + norm.logcdf(-1 / (2 * multiplier) - middle * multiplier))
        found = norm.cdf(1 / (2 * multiplier) - middle * multiplier) - second
        low, high = (middle, high) if found > delta else (low, middle)
    return high


@pytest.mark.parametrize("noise", [2.0, 5.0, 10.0])
def test_one_round_of_everybody_is_one_gaussian_mechanism(noise: float) -> None:
    """Replacing a client moves the sum by 2C: noise of z·C is s = z/2 times that. RDP of order α is α/2s².

    ε is then the smallest α/2s² + log((α - 1)/α) - (log δ + log α)/(α - 1) (Canonne, Kamath, Steinke 2020, proposition
    12) over α > 1, here over a finer grid than the account's; it lies above the exact value and below Mironov's
    1/2s² + √(2 log(1/δ))/s.
    """
    s = noise / 2
    orders = np.arange(1.02, 2000, 0.01)
    bounds = orders / (2 * s**2) + np.log1p(-1 / orders) - (math.log(DELTA) + np.log(orders)) / (orders - 1)
    found = client_epsilon(noise, 1, DELTA, cohort=10, clients=10)
    assert found == pytest.approx(float(bounds.min()), rel=0.01)
    assert exact(s, DELTA) < found < 1 / (2 * s**2) + math.sqrt(2 * math.log(1 / DELTA)) / s


def test_a_known_value() -> None:
    """s = 1, δ = 10⁻⁵: exactly 4.377 (Balle and Wang's analytic mechanism); the account says at most 10 % more."""
    assert exact(1.0, DELTA) == pytest.approx(4.377, abs=0.001)
    assert 4.377 < client_epsilon(2.0, 1, DELTA, cohort=5, clients=5) < 4.377 * 1.1


def test_rounds_compose_as_less_noise() -> None:
    """R rounds of s are one of s/√R, since their Rényi divergences add up."""
    many = client_epsilon(20.0, 16, DELTA, cohort=10, clients=10)
    assert many == pytest.approx(client_epsilon(20.0 / 4, 1, DELTA, cohort=10, clients=10), rel=1e-9)


def test_sampling_amplifies_and_never_costs() -> None:
    """A tenth of the clients a round: far less than all; nine tenths: no more, though that bound alone is looser."""
    everybody = client_epsilon(4.0, 20, DELTA, cohort=100, clients=100)
    assert client_epsilon(4.0, 20, DELTA, cohort=10, clients=100) < 0.5 * everybody
    assert client_epsilon(4.0, 20, DELTA, cohort=90, clients=100) <= everybody


def test_no_rounds_and_no_noise() -> None:
    assert client_epsilon(1.0, 0, DELTA, cohort=1, clients=1) == 0
    assert client_epsilon(0.0, 1, DELTA, cohort=1, clients=1) == math.inf
    for wrong in ({"cohort": 0, "clients": 1}, {"cohort": 2, "clients": 1}):
        with pytest.raises(ValueError, match="an account needs"):
            client_epsilon(1.0, 1, DELTA, **wrong)


def test_what_metrics_say() -> None:
    assert account(Aggregation(clip=1.0), 10, cohort=5, clients=10) is None
    told = account(Aggregation(clip=0.5, noise=4.0, delta=1e-3), 10, cohort=10, clients=10)
    assert told is not None
    assert told["epsilon"] == client_epsilon(4.0, 10, 1e-3, cohort=10, clients=10)
    assert {key: told[key] for key in ("delta", "unit", "releases", "noise_multiplier", "clip", "sampling")} == {
        "delta": 1e-3, "unit": "client", "releases": 10, "noise_multiplier": 4.0, "clip": 0.5,
        "sampling": "10 of 10 clients a round, without replacement",
    }  # fmt: skip
