"""Rounds and bytes until a run reached a fraction of what the baseline reached in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.reporting.statistics import Summary, rounds_to_target, summarise
from pipelines.runs.record import RunRecord, is_measured


@dataclass(frozen=True)
class RunTarget:
    """One run on its way to the target.

    `target` is None where there is none or the run's history does not tell; `rounds` and `bytes` are None where the
    run never got there.
    """

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


def run_target(run: RunRecord, baseline: RunRecord | None, metric: str, fraction: float) -> RunTarget:
    """A run's way to a fraction of what the baseline's run of the same seed reached in the end."""
    final = None if baseline is None else getattr(baseline, metric)
    if baseline is None or final is None or not (is_measured(run, metric) and is_measured(baseline, metric)):
        return RunTarget(metric, None, None, None)
    reached = rounds_to_target(run.history, metric, fraction * final)
    if reached is None:
        return RunTarget(metric, fraction * final, None, None)
    return RunTarget(metric, fraction * final, reached.round, reached.total_bytes)


def target_summary(
    runs: Sequence[RunRecord], targets: Sequence[RunTarget], baseline_rounds: float | None = None
) -> TargetSummary:
    """Of one method's runs; ``baseline_rounds`` are the mean of the baseline's, for the speed-up."""
    with_target = {run.pair: target for run, target in zip(runs, targets, strict=True) if target.target is not None}
    reached = sum(target.rounds is not None for target in with_target.values())
    # The mean over only those seeds that got there would flatter a method that often does not.
    everyone = with_target if reached == len(with_target) else {}
    rounds = summarise({seed: target.rounds for seed, target in everyone.items()})
    return TargetSummary(
        metric=targets[0].metric,
        reached=reached,
        n=len(with_target),
        rounds=rounds,
        bytes=summarise({seed: target.bytes for seed, target in everyone.items()}),
        speedup=baseline_rounds / rounds.mean if baseline_rounds is not None and rounds.mean is not None else None,
    )


def mean_rounds(
    by_method: Mapping[str, Sequence[RunRecord]], targets: Mapping[str, Sequence[RunTarget]], method: str
) -> float | None:
    """Rounds to target of a method, by what :func:`run_target` gave for each of its runs; None without runs."""
    return target_summary(by_method[method], targets[method]).rounds.mean if method in by_method else None
