"""Estimate a table's duration: time a few rounds of each kind of run that has not finished here yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flcore.config.schema import Config
from pipelines.execution.bodies import carry_out_all
from pipelines.execution.operation import Operation
from pipelines.papers.plan import TablePlan
from pipelines.plan.comparison import comparison_plan
from pipelines.plan.params import with_values
from pipelines.plan.spec import RunSpec
from pipelines.reporting.formats import plural
from pipelines.runs.cache import Cache, kind_of
from pipelines.runs.folder import RunFolder

ROUNDS = 3
"""Rounds of a trial; the first, which includes start-up, does not count."""
_WORTH = 10  # a trial is at most a tenth of a run


def measure(plan: TablePlan, home: Path, operation: Operation) -> bool:
    """Time every kind of run of unknown duration and store it for later plans; return whether anything was timed.

    Kinds of fewer than thirty rounds are skipped: a full run is as short. ``home`` is the folder of the trials.
    """
    cache = Cache.here()
    unknown: dict[str, RunSpec] = {}
    for setting in plan.settings:
        runs = comparison_plan(setting.parameters, None, plan.selection.seeds[:1]).runs
        first_of_each = runs[:: len(runs) // len(setting.rows)]
        for run, row in zip(first_of_each, setting.rows, strict=True):
            kind = kind_of(run.config)
            if cache.cost(kind).seconds is None and run.config.federation.rounds >= _WORTH * ROUNDS:
                unknown[kind] = replace(run, label=f"{row.key}, {setting.name}")
    if not unknown:
        return False
    kinds = plural(len(unknown), "kind")
    operation.watcher.say(f"{plan.table.id}: {ROUNDS} rounds of each of {kinds} of runs, to know how long they take")
    rounds = {"federation.rounds": ROUNDS}
    trials = [
        replace(run, config=Config.from_mapping(with_values(run.config.to_mapping(), rounds)))
        for run in unknown.values()
    ]
    placed, failed = carry_out_all(trials, home, operation)
    for trial, run in zip(placed, unknown.values(), strict=True):
        if trial.label not in failed:
            cache.note_seconds(run.config, per_round(trial.directory) * run.config.federation.rounds)
    return True


def per_round(run: Path) -> float:
    """Return the mean seconds of a finished run's rounds after the first, including evaluation."""
    later = [leg for leg in RunFolder(run).legs if leg["round"] > 1]
    return sum(sum(leg["seconds"].values()) for leg in later) / len({leg["round"] for leg in later})
