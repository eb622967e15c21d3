"""Budgets of a comparison: equal rounds, or the bytes or steps of the baseline.

With ``compare --budget bytes``, every method sends as much as the baseline sends in ``federation.rounds``; with
``--budget steps``, its clients train on as many mini-batches of their own images. The number of rounds is determined
before a run starts and is in its configuration, so it is an ordinary run: methods that act in their last round know
it, and its parameter file reproduces it. Steps follow from configuration and partition. Bytes are measured: by the
given run, with the comparison's first seed. A method that sends little gets at most :data:`MOST` times the rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, RunError
from flcore.engine.cohort import round_steps
from flcore.experiment.experiment import Experiment
from pipelines.execution.bodies import carry_out_all
from pipelines.execution.operation import Operation
from pipelines.plan.spec import ExperimentPlan, RunSpec, with_rounds
from pipelines.reporting.formats import format_bytes
from pipelines.runs.cache import Cache
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs

BUDGETS = ("rounds", "bytes", "steps")
MOST = 10
"""Maximum multiple of the configured rounds."""
SLACK = 1.02
"""A run may send this multiple of its planned bytes, as later rounds are extrapolated from measured ones."""


@dataclass(frozen=True)
class Budget:
    """The budget of each run of a comparison.

    Attributes:
        kind: one of :data:`BUDGETS`.
        baseline: the method that sets it.
        bytes: of a run; None if rounds or steps are equal.
        steps: of a run, by its seed and the seed of its division; empty if rounds or bytes are equal.
    """

    kind: str = "rounds"
    baseline: str = ""
    bytes: int | None = None
    steps: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def words(self) -> str | None:
        """Return the budget in a sentence; None if all have the same rounds."""
        if self.kind == "rounds":
            return None
        bytes, steps = self.bytes, sorted(set(self.steps.values()))
        limit = f"{format_bytes(bytes)}" if bytes is not None else f"{' or '.join(f'{n:,}' for n in steps)} steps"
        verb = "send" if bytes is not None else "train for"
        return (
            f"Every run may {verb} {limit}, as {self.baseline} does as given, and has so many rounds, {MOST} times as "
            "many as given at most."
        )

    @property
    def max_bytes(self) -> int | None:
        """Return the most bytes that a run within the budget may have sent."""
        return None if self.bytes is None else int(self.bytes * SLACK)

    def fitted(self, config: Config) -> Config:
        """Return a configuration with the rounds that the budget of steps allows; unchanged without such a budget.

        Raises:
            ConfigError: not even one round is within it, or clients have a stream of tasks.
            DataError: data are missing or damaged.
        """
        return within_steps(config, inputs_of(config), self.steps[_division(config)]) if self.steps else config


def within_budget(kind: str, plan: ExperimentPlan, out: Path, operation: Operation) -> tuple[Budget, ExperimentPlan]:
    """Return the plan of a comparison with the rounds of each run that its budget allows.

    Args:
        kind: one of :data:`BUDGETS`. plan: as given.
        out: folder of the comparison; bytes are measured in its folder ``budget/``. operation: how to run the steps.

    Raises:
        ConfigError: no such kind, or a run cannot be planned with it. RunError: a measured run failed.
    """
    if kind not in BUDGETS:
        raise ConfigError(f"--budget {kind}: must be one of {', '.join(BUDGETS)}")
    if kind == "rounds":
        return Budget(), plan
    planned, baseline = plan.runs, plan.base.compare.baseline
    if kind == "steps":
        steps = {}
        for run in planned:
            key = _division(run.config)
            if key not in steps:
                steps[key] = steps_of(_reference(plan, run))
        budget = Budget(kind, baseline, steps=steps)
        return budget, plan.with_runs(replace(run, config=budget.fitted(run.config)) for run in planned)
    first = planned[0]
    measured = [run for run in planned if (run.config.seed, run.draw) == (first.config.seed, first.draw)]
    measured = [replace(first, config=_reference(plan, first), row=baseline, label="budget"), *measured]
    for run in measured:
        _refuse_streams(run.config, inputs_of(run.config))
    runs, failed = carry_out_all(measured, out / "budget", operation)
    if failed:
        raise RunError(f"--budget bytes: what a run sends could not be measured: {next(iter(failed.values()))}")
    sent = {one.name: _sent(run.directory) for one, run in zip(measured, runs, strict=True)}
    budget = Budget(kind, baseline, bytes=sum(sent[baseline]))
    rounds = {row: rounds_for_bytes(sum(sent[baseline]), by_round) for row, by_round in sent.items()}
    for row, count in rounds.items():
        operation.watcher.say(f"--budget bytes: {row} has {count} rounds")
    return budget, plan.with_runs(replace(run, config=with_rounds(run.config, rounds[run.name])) for run in planned)


def _reference(plan: ExperimentPlan, run: RunSpec) -> Config:
    """Return the given baseline, with a run's seed and division."""
    return plan.of_row(plan.base.compare.baseline, run.config.seed, run.draw)


def _division(config: Config) -> tuple[int, int]:
    """Return the seeds that determine the data and the participation of clients."""
    return config.seed, config.partition_seed


def within_steps(config: Config, inputs: Inputs, steps: int) -> Config:
    """Return a configuration with the rounds that fit into a number of steps, at most :data:`MOST` times its own.

    Raises:
        ConfigError: its first round takes more, or clients have a stream of tasks.
    """
    experiment = _refuse_streams(config, inputs)
    totals = itertools.accumulate(round_steps(experiment, at) for at in range(1, MOST * config.federation.rounds + 1))
    rounds = sum(1 for _ in itertools.takewhile(lambda total: total <= steps, totals))
    if rounds == 0:
        raise ConfigError(f"a first round takes more steps than the budget of {steps:,}")
    return with_rounds(config, rounds)


def steps_of(config: Config) -> int:
    """Return the planned mini-batches of their own images that the clients of a run train on."""
    experiment = Experiment.open(config, *_places(inputs_of(config)))
    return sum(round_steps(experiment, number) for number in range(1, config.federation.rounds + 1))


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


def inputs_of(config: Config) -> Inputs:
    """Return a configuration's data and partition from the cache; make them if they are missing."""
    cache = Cache.here()
    prepared = cache.prepared(config)
    return Inputs(prepared, cache.partition(config, prepared))


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


def _refuse_streams(config: Config, inputs: Inputs) -> Experiment:
    experiment = Experiment.open(config, *_places(inputs))
    if experiment.task(1) is not None:
        raise ConfigError("--budget: a stream of tasks is as long as its rounds; leave it out")
    return experiment


def _places(inputs: Inputs) -> tuple[Path, Path]:
    return inputs.prepared, inputs.partition
