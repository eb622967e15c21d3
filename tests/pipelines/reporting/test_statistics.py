"""Arithmetic over seeds; every expected number is derived in the docstring of its test."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scipy.stats import ttest_rel

from flcore.core.errors import ConfigError
from flcore.evaluation.continual import ACCURACIES
from pipelines.reporting.claims import claims_of, judge
from pipelines.reporting.formats import format_bytes, format_difference, format_percent, format_summary
from pipelines.reporting.statistics import (
    PairedDifference,
    Summary,
    marks,
    paired_difference,
    summarise,
    verdict,
    with_adjusted_p,
)
from pipelines.runs.derived import DERIVED
from pipelines.runs.metrics import direction, lower_is_better, unit
from pipelines.runs.record import HEADLINE_METRICS, TASK_SCORES
from pipelines.tuning.metrics import FIGURES


def seeds(*values: float | None) -> dict[int, float | None]:
    """Values of seeds 0, 1, ..."""
    return dict(enumerate(values))


def test_mean_and_sample_deviation() -> None:
    """70, 71, 73: mean 214/3 = 71.33; deviations -4/3, -1/3, 5/3; (16 + 1 + 25)/9 / 2 = 7/3, root 1.53."""
    summary = summarise(seeds(0.70, 0.71, 0.73))
    assert (summary.mean, summary.std, summary.n) == pytest.approx((2.14 / 3, math.sqrt(7 / 3) / 100, 3))
    assert format_summary(summary) == "71.33 ± 1.53"


def test_missing_values_are_not_zero() -> None:
    """None does not count, and is said; one value has no spread; no value is a dash."""
    assert summarise(seeds(None, 0.7)) == Summary(0.7, None, 1)
    assert format_summary(summarise(seeds(None, 0.7))) == "70.00 (n = 1)"
    assert format_summary(summarise(seeds(0.7))) == "70.00"
    assert summarise(seeds(None, None)) == Summary(None, None, 0)
    assert format_summary(Summary(None, None, 0)) == format_percent(None) == format_bytes(None) == "\u2013"
    assert format_percent(0.0) == "0.00"


def test_paired_difference() -> None:
    """Differences 1, 2, 3: mean 2, std 1, t(0.975, 2) = 4.302653, half-width 4.302653/√3 = 2.484138."""
    result = paired_difference({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert (result.mean, result.std, result.n) == (2, 1, 3)
    assert result.low == pytest.approx(2 - 2.484138, abs=1e-6)
    assert result.high == pytest.approx(2 + 2.484138, abs=1e-6)


def test_paired_difference_uses_common_seeds_only() -> None:
    """Seeds 1 and 2 are common, seed 3 has no score: differences 2, 4; mean 3, std √2, t(0.975, 1) = 12.706205.

    Half-width 12.706205 * √2 / √2 = 12.706205.
    """
    result = paired_difference({0: 9.0, 1: 3.0, 2: 5.0, 3: None}, {1: 1.0, 2: 1.0, 3: 1.0})
    assert (result.mean, result.n) == (3, 2)
    assert result.low == pytest.approx(3 - 12.706205, abs=1e-5)


def test_one_common_seed_has_no_interval() -> None:
    """One difference has a mean but no spread, so no interval; none has neither."""
    one = paired_difference({0: 0.72, 1: 0.7}, {0: 0.70})
    assert (one.low, one.high, one.std, one.n, one.df) == (None, None, None, 1, None)
    assert format_difference(one) == "+2.00 (n = 1, no interval)"
    assert format_difference(paired_difference({1: 0.7}, {0: 0.70})) == "\u2013"
    assert format_difference(PairedDifference(-0.02, 0.01, -0.03, -0.01, 3)) == "\u22122.00 [\u22123.00, \u22121.00]"


def test_the_interval_is_that_of_the_paired_t_test() -> None:
    """Of scipy, which is another way to the same numbers."""
    ours, theirs = [0.71, 0.78, 0.80, 0.69], [0.70, 0.71, 0.73, 0.74]
    interval = ttest_rel(ours, theirs).confidence_interval(0.95)
    found = paired_difference(seeds(*ours), seeds(*theirs))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_what_an_interval_says() -> None:
    """Above or below 0 where it lies there as a whole; open where it holds 0, touches it, or does not exist."""

    def of(low: float | None, high: float | None) -> str:
        return verdict(PairedDifference(0.01, 0.01, low, high, 3))

    assert [of(0.01, 0.03), of(-0.03, -0.01)] == ["above", "below"]
    assert [of(-0.01, 0.03), of(0.0, 0.03), of(-0.03, 0.0), of(None, None)] == ["open"] * 4


def test_marks_follow_the_pairs_not_the_spreads() -> None:
    """Two lie 2 points below the best. One does with every seed: no tie, though its seeds spread by 10 points.

    The other is 12 and 2 below and 8 above, mean 2 and spread 10: 4.303 · 10 / √3 = 24.8, so 0 is within the interval.
    """
    best = summarise(seeds(0.60, 0.70, 0.80))
    lower, other = summarise(seeds(0.58, 0.68, 0.78)), summarise(seeds(0.48, 0.68, 0.88))
    assert marks([lower, best, other]) == ["", "best", "tied"]


def test_only_rows_with_the_same_seeds_are_ranked() -> None:
    """A method that lacks the hardest seed is not better for it; alone, nothing is best; a missing value is nothing."""
    whole, part = summarise(seeds(0.9, 0.5)), summarise({0: 0.95})
    assert marks([whole, summarise(seeds(0.8, 0.4)), part, summarise(seeds(None, None))]) == ["best", "", "", ""]
    assert marks([whole]) == [""]
    assert marks([whole, part]) == ["", ""]
    assert marks([summarise({0: 5.0}), summarise({0: 6.0})], lower_is_better=True) == ["best", ""]


def test_divisions_are_what_is_independent() -> None:
    """Divisions 7 and 8, seeds 0 and 1: differences 1, 3 and 5, 7, whose means by division are 2 and 6.

    Mean 4, std of (2, 6) is 2√2, t(0.975, 1) = 12.706205: half-width 12.706205 · 2√2 / √2 = 25.41241. Taken for four
    independent runs they would be told apart from 0: std of (1, 3, 5, 7) is √(20/3), t(0.975, 3) = 3.182446,
    half-width 3.182446 · √(20/3) / 2 = 4.1085, close to it.
    """
    baseline = {(draw, seed): 10.0 for draw in (7, 8) for seed in (0, 1)}
    values = {(7, 0): 11.0, (7, 1): 13.0, (8, 0): 15.0, (8, 1): 17.0}
    result = paired_difference(values, baseline)
    assert (result.mean, result.n) == (4, 4)
    assert result.high == pytest.approx(4 + 25.41241, abs=1e-4)
    assert list(result.by_seed) == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert (result.divisions, result.df) == (2, 1)


def test_on_one_division_the_interval_is_over_its_seeds() -> None:
    """Differences 1 and 3 of seeds 0 and 1: mean 2, std √2, half-width 12.706205 · √2 / √2 = 12.706205.

    The same runs have the same interval whether their division is told or not; how many there are, only if it is.
    """
    values, baseline = {0: 11.0, 1: 13.0}, {0: 10.0, 1: 10.0}
    asked = paired_difference({(7, s): v for s, v in values.items()}, {(7, s): v for s, v in baseline.items()})
    plain = paired_difference(values, baseline)
    assert (asked.mean, asked.n, asked.low) == (2, 2, pytest.approx(2 - 12.706205, abs=1e-5))
    assert (plain.low, plain.high) == (asked.low, asked.high)
    assert (asked.divisions, plain.divisions) == (1, None)


def test_a_division_with_fewer_seeds_counts_as_much_as_another() -> None:
    """Division 7 has differences 1 and 3, division 8 a single 6: the mean over divisions is (2 + 6) / 2 = 4."""
    values = {(7, 0): 1.0, (7, 1): 3.0, (8, 0): 6.0}
    assert paired_difference(values, dict.fromkeys(values, 0.0)).mean == 4


@pytest.mark.parametrize(
    ("name", "less", "percent"),
    [
        ("top1_global", False, True),
        ("tasks.a_glo", False, True),
        ("tasks.forgetting", True, True),
        ("tasks.forgetting_global", True, True),
        ("tasks.backward_transfer", False, True),
        ("client_std", True, True),
        ("loss_global", True, False),
        ("bytes_up_by_kind.model", True, False),
        ("num_parameters", True, False),
        ("privacy.epsilon", True, False),
        ("steps_per_second", False, False),
        ("simulated_seconds", True, False),
        ("best_round", False, False),
        ("clients_without_test", False, False),
        ("privacy.noise_multiplier", False, False),
        ("error_rate", False, False),
        ("ece", False, False),
        ("distance", False, False),
        ("server.kl", False, False),
        ("server.forgetting", False, False),
        ("alternatives.forgetting.top1_global", False, True),
        ("rounds_to_target.top1_global", True, False),
    ],
)
def test_of_which_figures_less_is_better_and_which_are_read_in_percent(name: str, less: bool, percent: bool) -> None:
    assert (lower_is_better(name), unit(name) == "share") == (less, percent)


@pytest.mark.parametrize("name", ["error_rate", "ece", "distance", "server.kl", "best_round", "privacy.clip"])
def test_a_figure_whose_direction_nobody_declared_has_none(name: str) -> None:
    assert direction(name) is None


def test_every_figure_that_may_be_asked_for_has_a_direction() -> None:
    names = (*FIGURES, *DERIVED, *TASK_SCORES, *HEADLINE_METRICS, *(f"tasks.{name}" for name in ACCURACIES))
    assert [name for name in names if direction(name) is None] == []


def test_a_claim_of_a_figure_without_a_direction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^compare\.claims\.ours: metric server\.kl: .* not declared; choose from "):
        judge(claims_of({"ours": {"better": "a", "than": "b", "metric": "server.kl"}}), [])


def test_p_values_are_adjusted_for_a_whole_table() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 2 sqrt(3).

    With two degrees of freedom p = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12 / 14) = 0.0742. By Holm 0.01, 0.04, 0.03 become
    3 * 0.01, 2 * 0.03 for the second smallest, and no less for the largest; what has no p is not counted. By
    Benjamini-Hochberg the largest stays 0.04, which 3 / 2 * 0.03 = 0.045 may not exceed, and 0.01 becomes 3 * 0.01.
    """
    found = paired_difference({0: 0.01, 1: 0.02, 2: 0.03}, dict.fromkeys(range(3), 0.0))
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14)) and found.p_holm is None
    assert paired_difference({0: 0.25, 1: 0.25}, {0: 0.0, 1: 0.0}, null=0.25).p == 1
    assert paired_difference({0: 0.25, 1: 0.25}, {0: 0.0, 1: 0.0}).p == 0
    assert paired_difference({0: 0.25}, {0: 0.0}).p is None
    table = {name: replace(found, p=p) for name, p in zip("abcd", (0.01, 0.04, None, 0.03), strict=True)}
    adjusted = {name: (one.p_holm, one.p_bh) for name, one in with_adjusted_p(table).items()}
    assert adjusted["c"] == (None, None)
    assert adjusted["a"] == pytest.approx((0.03, 0.03))
    assert adjusted["d"] == pytest.approx((0.06, 0.04)) and adjusted["b"] == pytest.approx((0.06, 0.04))
    assert with_adjusted_p({"a": replace(found, p=0.8), "b": replace(found, p=0.9)})["a"].p_holm == 1
