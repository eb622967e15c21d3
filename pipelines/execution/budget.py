"""Budgets of a comparison: equal rounds, or the bytes of the baseline.

With ``compare --budget bytes``, every method sends as much as the baseline sends in ``federation.rounds``. The number
of rounds is determined before a run starts and is in its configuration, so it is an ordinary run: methods that act in
their last round know it, and its parameter file reproduces it. Bytes are measured: by the given run, with the
comparison's first seed. A method that sends little gets at most :data:`MOST` times the rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flcore.core.errors import ConfigError, RunError
from flcore.experiment.experiment import Experiment
from pipelines.execution.bodies import carry_out_all
from pipelines.execution.operation import Operation
from pipelines.plan.spec import ExperimentPlan, with_rounds
from pipelines.reporting.formats import format_bytes
from pipelines.runs.cache import Cache
from pipelines.runs.folder import RunFolder

BUDGETS = ("rounds", "bytes")
MOST = 10
"""Maximum multiple of the configured rounds."""
SLACK = 1.02
"""A run may send this multiple of its planned bytes, as later rounds are extrapolated from measured ones."""


@dataclass(frozen=True)
class Budget:
    """The budget of each run of a comparison.

    Attributes:
        baseline: the method that sets it.
        bytes: of a run; None if rounds are equal.
    """

    baseline: str = ""
    bytes: int | None = None

    @property
    def words(self) -> str | None:
        """Return the budget in a sentence; None if all have the same rounds."""
        if self.bytes is None:
            return None
        return (
            f"Every run may send {format_bytes(self.bytes)}, as {self.baseline} does as given, and has so many rounds, "
            f"{MOST} times as many as given at most."
        )

    @property
    def max_bytes(self) -> int | None:
        """Return the most bytes that a run within the budget may have sent."""
        return None if self.bytes is None else int(self.bytes * SLACK)


def within_budget(kind: str, plan: ExperimentPlan, out: Path, operation: Operation) -> tuple[Budget, ExperimentPlan]:
    """Return the plan of a comparison with the rounds of each run that its budget allows, one of :data:`BUDGETS`.

    Bytes are measured in the comparison's folder ``budget/``.

    Raises:
        ConfigError: no such kind, or clients have a stream of tasks. RunError: a measured run failed.
    """
    if kind not in BUDGETS:
        raise ConfigError(f"--budget {kind}: must be one of {', '.join(BUDGETS)}")
    if kind == "rounds":
        return Budget(), plan
    first, baseline, cache = plan.runs[0], plan.base.compare.baseline, Cache.here()
    measured = [run for run in plan.runs if (run.config.seed, run.draw) == (first.config.seed, first.draw)]
    reference = plan.of_row(baseline, first.config.seed, first.draw)
    measured = [replace(first, config=reference, row=baseline, label="budget"), *measured]
    for run in measured:
        prepared = cache.prepared(run.config)
        if Experiment.open(run.config, prepared, cache.partition(run.config, prepared)).task(1) is not None:
            raise ConfigError("--budget: a stream of tasks is as long as its rounds; leave it out")
    runs, failed = carry_out_all(measured, out / "budget", operation)
    if failed:
        raise RunError(f"--budget bytes: what a run sends could not be measured: {next(iter(failed.values()))}")
    sent = {one.name: _sent(run.directory) for one, run in zip(measured, runs, strict=True)}
    budget = Budget(baseline, sum(sent[baseline]))
    rounds = {row: rounds_for_bytes(sum(sent[baseline]), by_round) for row, by_round in sent.items()}
    for row, count in rounds.items():
        operation.watcher.say(f"--budget bytes: {row} has {count} rounds")
    return budget, plan.with_runs(replace(run, config=with_rounds(run.config, rounds[run.name])) for run in plan.runs)


def rounds_for_bytes(budget: int, sent: Sequence[int]) -> int:
    """Return the rounds that fit into a number of bytes; at least one, at most :data:`MOST` times the measured ones.

    Later rounds are assumed to send the average of the later half of the measured ones.

    Args:
        budget: bytes in total. sent: measured bytes by round, from the first one.
    """
    later = sent[len(sent) // 2 :]
    average = sum(later) / len(later)
    totals = itertools.accumulate([*map(float, sent), *[average] * (len(sent) * (MOST - 1))])
    # Half a byte of tolerance: sums of fractions are inexact, and a whole multiple must fit.
    return max(1, sum(1 for _ in itertools.takewhile(lambda total: total <= budget + 0.5, totals)))


def _sent(run: Path) -> list[int]:
    """Return bytes by round; rounds without an evaluation share what the next evaluated round reports."""
    sent: list[int] = []
    for record in RunFolder(run).history:
        more = sum(record["bytes_up"].values()) + sum(record["bytes_down"].values()) - sum(sent)
        rounds = record["round"] - len(sent)
        sent += [
            more * (at + 1) // rounds - more * at // rounds for at in range(rounds)
        ]  # whole bytes, `more` in total
    return sent
