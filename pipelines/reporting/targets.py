"""Rounds and bytes until a run reached a fraction of the baseline's final accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.reporting.statistics import Summary, first_round_reaching, summarise
from pipelines.runs.record import Pair, RunRecord, is_measured


@dataclass(frozen=True)
class RunTarget:
    """One run on its way to the target.

    `target` is None where there is none or the run's history lacks the metric; `rounds` and `bytes` are None where the
    run never reached it.
    """

    target: float | None = None
    rounds: int | None = None
    bytes: float | None = None


Targets = Mapping[str, Mapping[Pair, RunTarget]]
"""By method and pair."""


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
    """Return a run's way to a fraction of the final figure of the baseline's run with the same seed."""
    final = None if baseline is None else getattr(baseline, metric)
    if baseline is None or final is None or not (is_measured(run, metric) and is_measured(baseline, metric)):
        return RunTarget()
    reached = first_round_reaching(
        ((record.round, getattr(record, metric)) for record in run.history), fraction * final
    )
    bytes_sent = next((record.total_bytes for record in run.history if record.round == reached), None)
    return RunTarget(fraction * final, reached, bytes_sent)


def target_summaries(by_metric: Mapping[str, Targets], method: str, baseline: str) -> dict[str, TargetSummary]:
    """Summarise a method's targets on each metric."""

    def means(targets: Mapping[Pair, RunTarget]) -> tuple[Summary, Summary]:
        # The mean over only those seeds that reached it would flatter a method that often does not.
        everyone = targets if all(target.rounds is not None for target in targets.values()) else {}
        rounds = summarise({pair: target.rounds for pair, target in everyone.items()})
        return rounds, summarise({pair: target.bytes for pair, target in everyone.items()})

    def known(targets: Targets, name: str) -> dict[Pair, RunTarget]:
        return {pair: target for pair, target in targets.get(name, {}).items() if target.target is not None}

    summaries = {}
    for metric, targets in by_metric.items():
        reached_by, reference = known(targets, method), means(known(targets, baseline))[0].mean
        rounds, volume = means(reached_by)
        reached = sum(target.rounds is not None for target in reached_by.values())
        speedup = reference / rounds.mean if reference is not None and rounds.mean is not None else None
        summaries[metric] = TargetSummary(metric, reached, len(reached_by), rounds, volume, speedup)
    return summaries
