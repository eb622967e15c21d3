"""Compare finished runs: means over seeds, paired differences, rounds and bytes to a target accuracy.

Every figure is computed here from the records of runs (:mod:`pipelines.runs.record`), so a new summary needs no new
run; :mod:`pipelines.reporting.comparison_tables` prints and writes it. Accuracies are fractions in [0, 1]. A missing
value is None, never 0.

Two spreads exist and are never mixed: `std` is the sample standard deviation over seeds (n - 1), `client_std` is the
population standard deviation over the clients of one run, averaged over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

from flcore.errors import ConfigError, ProtoflError
from pipelines.reporting.formats import listed, plural
from pipelines.runs.record import (
    COMMUNICATION,
    SCORES,
    TASK_SCORES,
    RoundRecord,
    RunRecord,
    check_metric,
    group_by_method,
    score,
)

PAIRED_METRICS = ("top1_global", "mean_local")
PAIRED_TASK_SCORES = ("a_glo", "a_loc", "a_sel")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over the n seeds that have a value; std is None for n < 2."""

    mean: float | None
    std: float | None
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """Method minus baseline over the n common seeds; `low` and `high` bound the 95 % interval, None for n < 2."""

    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class RunTarget:
    """One run on its way to the target: `rounds` and `bytes` are None where it never got there."""

    metric: str
    target: float | None
    rounds: int | None
    bytes: float | None


@dataclass(frozen=True)
class TargetSummary:
    """Rounds and bytes to target over the n seeds that have a target; the means are None unless all reached it."""

    metric: str
    reached: int
    n: int
    rounds: Summary
    bytes: Summary
    speedup: float | None


@dataclass(frozen=True)
class MethodSummary:
    """One row of the comparison: everything about one method over its seeds."""

    method: str
    seeds: tuple[int, ...]
    rounds: tuple[int, ...]
    scores: Mapping[str, Summary]
    differences: Mapping[str, PairedDifference]
    target: TargetSummary
    communication: Mapping[str, float | None]
    bytes_up_by_kind: Mapping[str, float]
    bytes_down_by_kind: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """Methods in the order in which they were given, with the runs (by method, then seed) they summarise."""

    dataset: str
    partition: str | None
    baseline: str
    metric: str
    target_fraction: float
    seeds: tuple[int, ...]
    methods: tuple[MethodSummary, ...]
    runs: tuple[RunRecord, ...]
    run_targets: tuple[RunTarget, ...]
    notes: tuple[str, ...]

    @property
    def has_baseline(self) -> bool:
        """Whether there is a run to take differences from."""
        return any(row.method == self.baseline for row in self.methods)

    @property
    def has_tasks(self) -> bool:
        """Whether these are runs on a stream of tasks."""
        return any(run.tasks for run in self.runs)


def compare(
    runs: Iterable[RunRecord],
    baseline: str = "fedavg",
    metric: str = "top1_global",
    target_fraction: float = 0.95,
) -> Comparison:
    """Summarise runs per method and set every method against the baseline.

    Args:
        runs: in the order in which methods shall appear; seeds are sorted. Methods may lack seeds.
        baseline: method that differences and targets refer to. Without a run of it both are None, and a note says so.
        metric: headline metric for the target: `top1_global`, `mean_local` or `pooled_local`. A method (or baseline)
            that has no such value is compared on `mean_local`.
        target_fraction: target of a seed = this fraction of the baseline's final accuracy with that seed.

    Returns:
        The comparison; its notes name everything that is missing or uneven.

    Raises:
        ConfigError: unknown metric, or a fraction outside (0, 1].
        ProtoflError: no runs, a (method, seed) given twice, or runs that do not belong together: different dataset,
            data fingerprint or partition name, or, for one seed, different partition fingerprints.
    """
    check_metric(metric)
    if not 0 < target_fraction <= 1:
        raise ConfigError(f"target_fraction: {target_fraction} is outside (0, 1].")
    by_method = group_by_method(runs)
    ordered = [run for method_runs in by_method.values() for run in method_runs]
    if not ordered:
        raise ProtoflError("Nothing to compare: no finished run was given; start `protofl compare` with methods.")
    _refuse_mixtures(ordered)

    baseline_runs = {run.seed: run for run in by_method.get(baseline, ())}
    targets = {
        method: [
            _run_target(
                run, baseline_runs.get(run.seed), _target_metric(method_runs, baseline_runs, metric), target_fraction
            )
            for run in method_runs
        ]
        for method, method_runs in by_method.items()
    }
    baseline_rounds = _target_summary(targets[baseline]).rounds.mean if baseline in targets else None
    return Comparison(
        dataset=ordered[0].dataset,
        partition=next((run.partition for run in ordered if run.partition is not None), None),
        baseline=baseline,
        metric=metric,
        target_fraction=target_fraction,
        seeds=tuple(sorted({run.seed for run in ordered})),
        methods=tuple(
            _method_summary(
                method_runs,
                baseline,
                baseline_runs,
                targets[method],
                baseline_rounds,
                tuple(TASK_SCORES) if any(run.tasks for run in ordered) else (),
            )
            for method, method_runs in by_method.items()
        ),
        runs=tuple(ordered),
        run_targets=tuple(target for method_targets in targets.values() for target in method_targets),
        notes=tuple(_notes(by_method, baseline, metric)),
    )


def summarise(values: Iterable[float | None]) -> Summary:
    """Mean and sample standard deviation of the values that are not None."""
    present = [value for value in values if value is not None]
    if not present:
        return Summary(None, None, 0)
    return Summary(fmean(present), stdev(present) if len(present) > 1 else None, len(present))


def paired_difference(values: Mapping[int, float | None], baseline: Mapping[int, float | None]) -> PairedDifference:
    """Mean of value - baseline over common seeds with its two-sided 95 % Student-t interval.

    Args:
        values: score by seed; seeds whose score is None do not count.
        baseline: the same for the baseline.

    Returns:
        mean ± t(0.975, n - 1) * std / sqrt(n) over the n common seeds; no interval for n < 2.
    """
    differences = []
    for seed in sorted(values.keys() & baseline.keys()):
        value, reference = values[seed], baseline[seed]
        if value is not None and reference is not None:
            differences.append(value - reference)
    summary = summarise(differences)
    if summary.mean is None or summary.std is None:
        return PairedDifference(summary.mean, None, None, None, summary.n)
    half_width = float(stdtrit(summary.n - 1, 0.5 + CONFIDENCE / 2)) * summary.std / math.sqrt(summary.n)
    return PairedDifference(summary.mean, summary.std, summary.mean - half_width, summary.mean + half_width, summary.n)


def summarise_runs(runs: Sequence[RunRecord], keys: Iterable[str]) -> dict[str, Summary]:
    """Mean and spread over runs of each of these fields."""
    return {key: summarise(score(run, key) for run in runs) for key in keys}


def paired_differences(
    runs: Sequence[RunRecord], reference: Sequence[RunRecord], keys: Iterable[str]
) -> dict[str, PairedDifference]:
    """Runs minus reference runs of the same seed, for each of these fields."""
    return {
        key: paired_difference(
            {run.seed: score(run, key) for run in runs}, {run.seed: score(run, key) for run in reference}
        )
        for key in keys
    }


def pooled_standard_error(first: Summary, second: Summary) -> float | None:
    """Standard error of the difference of two means from the pooled variance.

    s_p² = sum (n_i - 1) s_i² / (n_1 + n_2 - 2), result s_p * sqrt(1/n_1 + 1/n_2). None where no seed tells of a spread.
    """
    freedom = first.n + second.n - 2
    if min(first.n, second.n) == 0 or freedom < 1:
        return None
    variance = sum((item.n - 1) * item.std**2 for item in (first, second) if item.std is not None) / freedom
    return math.sqrt(variance * (1 / first.n + 1 / second.n))


def marks(summaries: Sequence[Summary], lower_is_better: bool = False) -> list[str]:
    """Say for each cell of a column whether its mean is "best", "tied" with the best, or "" (neither).

    A column with fewer than two values marks nothing: there is nothing to be better than.
    """
    means = [summary.mean for summary in summaries if summary.mean is not None]
    if len(means) < 2:
        return [""] * len(summaries)
    best_mean = min(means) if lower_is_better else max(means)
    best = next(summary for summary in summaries if summary.mean == best_mean)
    result = []
    for summary in summaries:
        error = pooled_standard_error(summary, best)
        if summary.mean == best_mean:
            result.append("best")
        elif summary.mean is not None and error is not None and abs(summary.mean - best_mean) < error:
            result.append("tied")
        else:
            result.append("")
    return result


def rounds_to_target(history: Iterable[RoundRecord], metric: str, target: float) -> RoundRecord | None:
    """First evaluated round from 1 on whose `metric` is at least the target, or None if there is none."""
    for record in sorted(history, key=lambda record: record.round):
        value = getattr(record, metric)
        # The tolerance keeps 0.95 * 0.8 reachable by 0.76: the product of two fractions is off by a rounding step.
        if record.round >= 1 and value is not None and value >= target - 1e-12:
            return record
    return None


def _refuse_mixtures(runs: Sequence[RunRecord]) -> None:
    first = runs[0]
    partitions: dict[int, RunRecord] = {}
    # A method without a partition (central) has no fingerprint of one; it is no contradiction.
    named = next((run for run in runs if run.partition is not None), first)
    seen: set[tuple[str, int]] = set()
    for run in runs:
        if (run.method, run.seed) in seen:
            raise ProtoflError(
                f"Two runs of {run.label}, fields 'method' and 'seed': give one run per method and seed."
            )
        seen.add((run.method, run.seed))
        for key in ("dataset", "data_fingerprint"):
            _refuse_difference(first, run, key)
        if run.partition is not None:
            _refuse_difference(named, run, "partition")
        if run.partition_fingerprint is not None:
            _refuse_difference(partitions.setdefault(run.seed, run), run, "partition_fingerprint")


def _refuse_difference(first: RunRecord, second: RunRecord, key: str) -> None:
    ours, theirs = getattr(first, key), getattr(second, key)
    if ours != theirs:
        raise ProtoflError(
            f"Cannot compare {first.label} with {second.label}: '{key}' differs ({ours} and {theirs}); "
            "compare only runs made from the same data and, per seed, the same partition."
        )


def _target_metric(runs: Sequence[RunRecord], baseline_runs: Mapping[int, RunRecord], metric: str) -> str:
    has_metric = all(getattr(run, metric) is not None for run in (*runs, *baseline_runs.values()))
    return metric if has_metric else "mean_local"


def _run_target(run: RunRecord, baseline: RunRecord | None, metric: str, fraction: float) -> RunTarget:
    final = None if baseline is None else getattr(baseline, metric)
    if final is None:
        return RunTarget(metric, None, None, None)
    reached = rounds_to_target(run.history, metric, fraction * final)
    if reached is None:
        return RunTarget(metric, fraction * final, None, None)
    return RunTarget(metric, fraction * final, reached.round, reached.total_bytes)


def _target_summary(targets: Sequence[RunTarget], baseline_rounds: float | None = None) -> TargetSummary:
    with_target = [target for target in targets if target.target is not None]
    reached = [target for target in with_target if target.rounds is not None]
    # The mean over only those seeds that got there would flatter a method that often does not.
    everyone = with_target if len(reached) == len(with_target) else []
    rounds = summarise(target.rounds for target in everyone)
    speedup = baseline_rounds / rounds.mean if baseline_rounds is not None and rounds.mean is not None else None
    return TargetSummary(
        metric=targets[0].metric,
        reached=len(reached),
        n=len(with_target),
        rounds=rounds,
        bytes=summarise(target.bytes for target in everyone),
        speedup=speedup,
    )


def _method_summary(
    runs: Sequence[RunRecord],
    baseline: str,
    baseline_runs: Mapping[int, RunRecord],
    targets: Sequence[RunTarget],
    baseline_rounds: float | None,
    task_scores: Sequence[str],
) -> MethodSummary:
    method = runs[0].method
    reference = () if method == baseline else tuple(baseline_runs.values())
    return MethodSummary(
        method=method,
        seeds=tuple(run.seed for run in runs),
        rounds=tuple(sorted({run.rounds for run in runs})),
        scores=summarise_runs(runs, (*SCORES, *task_scores)),
        differences=paired_differences(
            runs, reference, (*PAIRED_METRICS, *(key for key in PAIRED_TASK_SCORES if key in task_scores))
        ),
        target=_target_summary(targets, baseline_rounds),
        communication={key: summary.mean for key, summary in summarise_runs(runs, COMMUNICATION).items()},
        bytes_up_by_kind=_mean_by_kind([run.bytes_up_by_kind for run in runs]),
        bytes_down_by_kind=_mean_by_kind([run.bytes_down_by_kind for run in runs]),
    )


def _mean_by_kind(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    # A run that never sent a kind sent 0 bytes of it: this zero is measured, not missing.
    kinds = sorted({kind for count in counts for kind in count})
    return {kind: fmean(count.get(kind, 0) for count in counts) for kind in kinds}


def _notes(by_method: Mapping[str, Sequence[RunRecord]], baseline: str, metric: str) -> Iterable[str]:
    seeds = {run.seed for runs in by_method.values() for run in runs}
    baseline_runs = {run.seed: run for run in by_method.get(baseline, ())}
    if not baseline_runs:
        yield f"No run of the baseline {baseline}: no differences, no rounds or bytes to target."
    for method, runs in by_method.items():
        missing = sorted(seeds - {run.seed for run in runs})
        if missing:
            present = listed(run.seed for run in runs)
            yield f"{method} has no run for seed {listed(missing)}; its means are over seed {present}."
        if baseline_runs and method != baseline:
            common = sum(run.seed in baseline_runs for run in runs)
            if common < 2:
                yield f"{method} shares {plural(common, 'seed')} with {baseline}: no interval, two seeds are needed."
        target_metric = _target_metric(runs, baseline_runs, metric)
        if baseline_runs and target_metric != metric:
            lacking = method if any(getattr(run, metric) is None for run in runs) else baseline
            yield f"{lacking} has no {metric}, so the target of {method} is on {target_metric}."
    rounds = sorted({run.rounds for runs in by_method.values() for run in runs})
    if len(rounds) > 1:
        yield f"The runs differ in length ({listed(rounds)} rounds)."
