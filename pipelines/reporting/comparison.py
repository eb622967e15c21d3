"""Compare finished runs: means over seeds, paired differences, rounds and bytes to a target accuracy.

Every figure is computed here from the records of runs (:mod:`pipelines.runs.record`), so a new summary needs no new
run; :mod:`pipelines.reporting.comparison_tables` prints and writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from flcore.core.errors import ConfigError, ProtoflError
from pipelines.reporting.claims import JudgedRow, RowClaim, judge
from pipelines.reporting.formats import listed, plural
from pipelines.reporting.statistics import (
    PairedDifference,
    Summary,
    paired_differences,
    summarise_runs,
    with_adjusted_p,
)
from pipelines.reporting.targets import Targets, TargetSummary, run_target, target_summaries
from pipelines.runs.record import (
    COMMUNICATION,
    SCORES,
    TASK_SCORES,
    Pair,
    RunRecord,
    check_metric,
    group_by_method,
    in_order,
    pair_name,
)

PAIRED_METRICS = ("top1_global", "mean_local")
PAIRED_TASK_SCORES = ("a_glo", "a_loc", "a_sel")
COMMON_METRIC = "mean_local"
"""The accuracy that every method has."""
STRICT_FRACTION = 0.99
"""Of the baseline's final accuracy, shown beside the configured target (evaluation.md, section 2.3)."""


@dataclass(frozen=True)
class MethodSummary:
    """One row of the comparison: everything about one method over its seeds; ``targets`` are by metric.

    ``strict_targets`` are for :data:`STRICT_FRACTION`; empty where the configured fraction is as high.
    """

    method: str
    seeds: tuple[int, ...]
    num_runs: int
    rounds: tuple[int, ...]
    scores: Mapping[str, Summary]
    differences: Mapping[str, PairedDifference]
    targets: Mapping[str, TargetSummary]
    strict_targets: Mapping[str, TargetSummary]
    communication: Mapping[str, Summary]
    bytes_up_by_kind: Mapping[str, float]
    bytes_down_by_kind: Mapping[str, float]

    @property
    def target(self) -> TargetSummary:
        """The target on the first metric that the histories of this method and the baseline have."""
        return next((target for target in self.targets.values() if target.n), self.targets[COMMON_METRIC])


@dataclass(frozen=True)
class Tuned:
    """Result of a study for one method of a comparison.

    Attributes:
        method: its name.
        trials: that ended. failed: of them.
        metric: what was maximised, on validation data. given: with the values as given. best: with those found.
        values: those found that differ from the given ones, by dotted key.
        error: why there are none, where no trial has finished.
    """

    method: str
    trials: int
    failed: int
    metric: str
    given: float | None
    best: float | None
    values: Mapping[str, Any]
    error: str | None = None


def tuned_name(method: str) -> str:
    """Return the row name of a method with tuned values."""
    return f"{method} (tuned)"


@dataclass(frozen=True)
class Comparison:
    """Methods in the order in which they were given, with the runs (by method, then seed) they summarise.

    ``smooth`` is how many evaluated rounds its curves average. ``run_targets`` are by metric, method and pair;
    ``failed`` says which other runs ended without a result, and why.
    """

    dataset: str
    partition: str | None
    baseline: str
    metric: str
    target_fraction: float
    seeds: tuple[int, ...]
    methods: tuple[MethodSummary, ...]
    runs: tuple[RunRecord, ...]
    run_targets: Mapping[str, Targets]
    notes: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    tuning: tuple[Tuned, ...] = ()
    budget: str | None = None
    claims: tuple[JudgedRow, ...] = ()
    smooth: int = 1

    @property
    def draws(self) -> tuple[int, ...]:
        """Seeds of the divisions that each seed was run on; empty where each has one."""
        return tuple(sorted({run.draw for run in self.runs if run.draw is not None}))

    @property
    def count(self) -> int:
        """Return the number of methods; a tuned one has two rows."""
        return len(self.tuning or self.methods)

    @property
    def has_tasks(self) -> bool:
        """Return whether these are runs on a stream of tasks."""
        return any(run.tasks for run in self.runs)


def compare(
    runs: Iterable[RunRecord],
    baseline: str = "fedavg",
    metric: str = "top1_global",
    target_fraction: float = 0.95,
    failed: Mapping[str, str] | None = None,
    tuning: Sequence[Tuned] = (),
    budget: str | None = None,
    claims: Sequence[RowClaim] = (),
) -> Comparison:
    """Summarise runs per method and compare every method with the baseline.

    Args:
        runs: in the order in which methods shall appear; seeds are sorted. Methods may lack seeds.
        baseline: method that differences and targets refer to. Without a run of it both are None, and a note says so.
        metric: headline metric for the target: `top1_global`, `mean_local` or `pooled_local`; there is always one on
            `mean_local` beside it, which every method has.
        target_fraction: target of a seed = this fraction of the baseline's final accuracy with that seed.
        failed: why other runs have no result, by what they are called.
        tuning: what the methods' studies found.
        budget: in a sentence, what every run may spend, where that is not a number of rounds.
        claims: to be judged by these runs.

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
    reference = {run.pair: run for run in by_method.get(baseline, ())}

    def run_targets(fraction: float) -> dict[str, Targets]:
        return {
            name: {
                method: {run.pair: run_target(run, reference.get(run.pair), name, fraction) for run in method_runs}
                for method, method_runs in by_method.items()
            }
            for name in dict.fromkeys((metric, COMMON_METRIC))
        }

    targets = run_targets(target_fraction)
    strict = run_targets(STRICT_FRACTION) if target_fraction < STRICT_FRACTION else {}
    task_scores = TASK_SCORES if any(run.tasks for run in ordered) else ()
    paired = (*PAIRED_METRICS, *(key for key in PAIRED_TASK_SCORES if key in task_scores))
    rows = [
        MethodSummary(
            method=method,
            seeds=tuple(sorted({run.seed for run in method_runs})),
            num_runs=len(method_runs),
            rounds=tuple(sorted({run.rounds for run in method_runs})),
            scores=summarise_runs(method_runs, (*SCORES, "macro_acc", *task_scores)),
            differences=paired_differences(method_runs, [] if method == baseline else [*reference.values()], paired),
            targets=target_summaries(targets, method, baseline),
            strict_targets=target_summaries(strict, method, baseline),
            communication=summarise_runs(method_runs, COMMUNICATION),
            bytes_up_by_kind=_mean_by_kind([run.bytes_up_by_kind for run in method_runs]),
            bytes_down_by_kind=_mean_by_kind([run.bytes_down_by_kind for run in method_runs]),
        )
        for method, method_runs in by_method.items()
    ]
    # All differences of all methods are one table.
    adjusted = with_adjusted_p(
        {(row.method, key): difference for row in rows for key, difference in row.differences.items()}
    )
    return Comparison(
        dataset=ordered[0].dataset,
        partition=next((run.partition for run in ordered if run.partition is not None), None),
        baseline=baseline,
        metric=metric,
        target_fraction=target_fraction,
        seeds=tuple(sorted({run.seed for run in ordered})),
        methods=tuple(
            replace(row, differences={key: adjusted[row.method, key] for key in row.differences}) for row in rows
        ),
        runs=tuple(ordered),
        run_targets=targets,
        notes=((budget,) if budget else ()) + tuple(_notes(by_method, baseline)),
        failed=dict(failed or {}),
        tuning=tuple(tuning),
        budget=budget,
        claims=judge(claims, ordered),
    )


def _refuse_mixtures(runs: Sequence[RunRecord]) -> None:
    first = runs[0]
    partitions: dict[Pair, RunRecord] = {}
    # A method without a partition (central) has no fingerprint of one; it is no contradiction.
    named = next((run for run in runs if run.partition is not None), first)
    seen: set[tuple[str, Pair]] = set()
    for run in runs:
        if (run.method, run.pair) in seen:
            raise ProtoflError(
                f"Two runs of {run.label}, fields 'method' and 'seed': give one run per method and seed."
            )
        seen.add((run.method, run.pair))
        for key in ("dataset", "data_fingerprint"):
            _refuse_difference(first, run, key)
        if run.partition is not None:
            _refuse_difference(named, run, "partition")
        if run.partition_fingerprint is not None:
            _refuse_difference(partitions.setdefault(run.pair, run), run, "partition_fingerprint")


def _refuse_difference(first: RunRecord, second: RunRecord, key: str) -> None:
    ours, theirs = getattr(first, key), getattr(second, key)
    if ours != theirs:
        raise ProtoflError(
            f"Cannot compare {first.label} with {second.label}: '{key}' differs ({ours} and {theirs}); "
            "compare only runs made from the same data and, per seed, the same partition."
        )


def _mean_by_kind(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    # A run that never sent a kind sent 0 bytes of it: this zero is measured, not missing.
    kinds = sorted({kind for count in counts for kind in count})
    return {kind: fmean(count.get(kind, 0) for count in counts) for kind in kinds}


_ALONE = ("local", "central")
"""Methods that are meant to send nothing."""


def _notes(by_method: Mapping[str, Sequence[RunRecord]], baseline: str) -> Iterable[str]:
    pairs = {run.pair for runs in by_method.values() for run in runs}
    baseline_runs = {run.pair: run for run in by_method.get(baseline, ())}
    by_common: dict[int, list[str]] = {}
    if not baseline_runs:
        yield f"No run of the baseline {baseline}: no differences, no rounds or bytes to target."
    for method, runs in by_method.items():
        missing = in_order(pairs - {run.pair for run in runs})
        if missing:
            present = listed(pair_name(run.pair) for run in runs)
            yield f"{method} has no run for seed {listed(map(pair_name, missing))}; its means are over seed {present}."
        if baseline_runs and method != baseline:
            by_common.setdefault(sum(run.pair in baseline_runs for run in runs), []).append(method)
        # A tuning found that the method's exchange is best put off beyond the last round: that must not pass for it.
        silent = [run for run in runs if run.bytes_up == 0 and run.bytes_down == 0 and run.registered not in _ALONE]
        if silent:
            seeds = "" if len(silent) == len(runs) else f" with seed {listed(pair_name(run.pair) for run in silent)}"
            yield f"{method} sent nothing{seeds}: clients trained by themselves, as those of local do."
    for common in (0, 1):
        if common in by_common:
            shared = f"{plural(common, 'seed')} in common with {baseline}: no interval, two seeds are needed"
            yield f"{shared} ({listed(by_common[common])})."
    rounds = sorted({run.rounds for runs in by_method.values() for run in runs})
    if len(rounds) > 1:
        yield f"The runs differ in length ({listed(rounds)} rounds)."


def describe(comparison: Comparison) -> str:
    """Return a sentence on methods, data, seeds and rounds."""
    methods = plural(comparison.count, "method")
    partition = f", partition {comparison.partition}" if comparison.partition else ""
    return f"{methods} on {comparison.dataset}{partition}, {lengths_and_seeds(comparison.runs)}."


def lengths_and_seeds(runs: Iterable[RunRecord]) -> str:
    """Return length and seeds of runs: `20 rounds, seeds 0, 1`."""
    runs = list(runs)
    rounds, seeds = sorted({run.rounds for run in runs}), sorted({run.seed for run in runs})
    draws = sorted({run.draw for run in runs if run.draw is not None})
    divisions = f", division{'' if len(draws) == 1 else 's'} {listed(draws)}" if draws else ""
    return (
        f"{listed(rounds)} round{'' if rounds == [1] else 's'}, seed{'' if len(seeds) == 1 else 's'} "
        f"{listed(seeds)}{divisions}"
    )
