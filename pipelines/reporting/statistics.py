"""Statistics over seeds: means, paired differences with their intervals, ranking, rounds to a target.

Accuracies are fractions in [0, 1]. A missing value is None, never 0. `std` is the sample standard deviation over seeds
(n - 1); `client_std` is the population standard deviation over the clients of one run, averaged over seeds.

Methods are compared seed by seed, because runs with one seed share data, partition and initial weights. The interval is
Student's t: of three to ten differences a bootstrap covers less than it says, and Wilcoxon's test cannot reach 5 %
below six.

With several divisions of the data per seed, runs are paired by division and seed. Runs on one division are not
independent, so the interval is over divisions, each with the mean over its seeds. With a single division it is over
seeds and says nothing about others (`divisions` is 1).

p-values are of the same t-test. :func:`with_adjusted_p` adjusts them for one table: by Holm's method the chance of any
false difference in the table stays below 5 %, by Benjamini's and Hochberg's the expected share of false ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Literal, TypeVar

from scipy.special import stdtr, stdtrit

from pipelines.runs.record import Pair, RunRecord, in_order, score

CONFIDENCE = 0.95
BEST, TIED = "best", "tied"
Verdict = Literal["above", "below", "open"]


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over the n seeds that have a value; std is None for n < 2.

    ``by_seed`` holds the values themselves, None for a run without one.
    """

    mean: float | None
    std: float | None
    n: int
    by_seed: Mapping[Pair, float | None] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class PairedDifference:
    """Method minus baseline over the n common seeds; `low` and `high` bound the 95 % interval, None for n < 2.

    Of runs on several divisions n counts runs, and the interval is over divisions; on one it is over its seeds.
    ``divisions`` is their number; None where pairs are seeds alone, which do not say how the data were divided.
    ``p`` is two-sided, of the t-test of the interval; ``p_holm`` and ``p_bh`` are adjusted for a whole table.
    """

    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    n: int
    p: float | None = None
    p_holm: float | None = None
    p_bh: float | None = None
    by_seed: Mapping[Pair, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def divisions(self) -> int | None:
        """Number of divisions of the pairs."""
        return len({pair[0] for pair in self.by_seed if isinstance(pair, tuple)}) or None

    @property
    def df(self) -> int | None:
        """Degrees of freedom of the interval and of p; None where there is no interval."""
        return None if self.low is None else len(_independent(self.by_seed)) - 1


def summarise(by_seed: Mapping[Pair, float | None]) -> Summary:
    """Return mean and sample standard deviation of the values that are not None."""
    present = [value for value in by_seed.values() if value is not None]
    if not present:
        return Summary(None, None, 0, by_seed)
    return Summary(fmean(present), stdev(present) if len(present) > 1 else None, len(present), by_seed)


def paired_difference(
    values: Mapping[Pair, float | None], baseline: Mapping[Pair, float | None], null: float = 0.0
) -> PairedDifference:
    """Return the mean of value - baseline over common seeds with its two-sided 95 % Student-t interval.

    Args:
        values: score by seed, or by division and seed; those whose score is None do not count.
        baseline: the same for the baseline.
        null: the difference that the p-value is of.

    Returns:
        mean ± t(0.975, n - 1) * std / sqrt(n) over the n common seeds, or over n divisions, of each the mean over its
        seeds, or over the n seeds of the only division; no interval for n < 2.
    """
    differences: dict[Pair, float] = {}
    for seed in in_order(values.keys() & baseline.keys()):
        value, reference = values[seed], baseline[seed]
        if value is not None and reference is not None:
            differences[seed] = value - reference
    summary = summarise(dict(differences))
    independent = _independent(differences)
    if summary.mean is None or len(independent) < 2:
        return PairedDifference(summary.mean, summary.std, None, None, summary.n, by_seed=differences)
    n = len(independent)
    standard_error = stdev(independent) / math.sqrt(n)
    half_width = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * standard_error
    # Of divisions with other numbers of seeds each counts alike, as it does in the interval.
    mean = fmean(independent)
    t = abs(mean - null) / standard_error if standard_error > 0 else math.inf if mean != null else 0.0
    p = float(2 * stdtr(n - 1, -t))
    interval = (mean - half_width, mean + half_width)
    return PairedDifference(mean, summary.std, *interval, summary.n, p, by_seed=differences)


_Key = TypeVar("_Key")


def with_adjusted_p(differences: Mapping[_Key, PairedDifference]) -> dict[_Key, PairedDifference]:
    """Return the differences of one table with p-values adjusted for their number m.

    Holm: the k-th smallest p is multiplied by m - k + 1; none is below a smaller one's, or above 1. Benjamini-Hochberg:
    it is multiplied by m / k; none is above a larger one's.
    """
    tested = sorted(((one.p, key) for key, one in differences.items() if one.p is not None), key=lambda entry: entry[0])
    adjusted, holm, bh = dict(differences), 0.0, 1.0
    for rank, (p, key) in enumerate(tested):
        holm = max(holm, min(1.0, (len(tested) - rank) * p))
        adjusted[key] = replace(differences[key], p_holm=holm)
    for rank, (p, key) in reversed([*enumerate(tested, 1)]):
        bh = min(bh, len(tested) / rank * p)
        adjusted[key] = replace(adjusted[key], p_bh=bh)
    return adjusted


def _independent(differences: Mapping[Pair, float]) -> list[float]:
    """Return the independent values: of seeds, or the means over the seeds of each of several divisions."""
    groups: dict[Pair, list[float]] = {}
    for pair, difference in differences.items():
        groups.setdefault(pair[0] if isinstance(pair, tuple) else pair, []).append(difference)
    if len(groups) == 1:
        return list(differences.values())
    return [fmean(members) for members in groups.values()]


def verdict(difference: PairedDifference, lead: float = 0.0) -> Verdict:
    """Return whether an interval lies above a lead, below it, or contains it; without an interval it is open."""
    if difference.low is not None and difference.low > lead:
        return "above"
    return "below" if difference.high is not None and difference.high < lead else "open"


def summarise_runs(runs: Sequence[RunRecord], keys: Iterable[str]) -> dict[str, Summary]:
    """Return mean and spread over runs, one per seed, of each of these fields."""
    return {key: summarise({run.pair: score(run, key) for run in runs}) for key in keys}


def paired_differences(
    runs: Sequence[RunRecord], reference: Sequence[RunRecord], keys: Iterable[str]
) -> dict[str, PairedDifference]:
    """Return runs minus reference runs of the same seed, for each of these fields."""
    return {
        key: paired_difference(
            {run.pair: score(run, key) for run in runs}, {run.pair: score(run, key) for run in reference}
        )
        for key in keys
    }


def marks(summaries: Sequence[Summary], lower_is_better: bool = False) -> list[str]:
    """Say for each cell of a column whether its mean is "best", "tied" with the best, or "" (neither).

    Tied is what the table of differences would call undecided, were the best row its baseline: the 95 % interval of the
    differences, seed by seed, contains 0. Means over other seeds cannot be ranked, so only rows with the seeds that
    most rows have (of equally many the larger set) take part. Fewer than two of them mark nothing.
    """
    seeds_of = [frozenset(seed for seed, value in row.by_seed.items() if value is not None) for row in summaries]
    sets = Counter(seeds for seeds in seeds_of if seeds)
    if max(sets.values(), default=0) < 2:
        return [""] * len(summaries)
    common = max(sets, key=lambda seeds: (sets[seeds], len(seeds)))
    ranked = [row for row, seeds in zip(summaries, seeds_of, strict=True) if seeds == common]
    sign = -1 if lower_is_better else 1
    best = max(ranked, key=lambda row: sign * (row.mean or 0.0))

    def mark(row: Summary) -> str:
        if row.mean == best.mean:
            return BEST
        difference = paired_difference(row.by_seed, best.by_seed)
        return TIED if difference.n > 1 and verdict(difference) == "open" else ""

    return [mark(row) if seeds == common else "" for row, seeds in zip(summaries, seeds_of, strict=True)]


def first_round_reaching(curve: Iterable[tuple[int, float | None]], target: float) -> int | None:
    """Return the first evaluated round from 1 on with at least the target, from rounds and values in order."""
    # The tolerance keeps 0.95 * 0.8 reachable by 0.76: the product of two fractions is off by a rounding step.
    reached = (number for number, value in curve if number >= 1 and value is not None and value >= target - 1e-12)
    return next(reached, None)
