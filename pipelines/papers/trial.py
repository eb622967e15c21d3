"""About how long a table takes where no run of its kinds has finished here: a few rounds of each are carried out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flcore.config.schema import Config
from flcore.experiment.run_folder import RunFiles
from pipelines.config.grid import PlannedRun
from pipelines.config.params import with_values
from pipelines.execution.bodies import carry_out_all, comparison_runs
from pipelines.execution.operation import Operation
from pipelines.papers.plan import TablePlan, one_draw
from pipelines.reporting.formats import plural
from pipelines.runs.cache import Cache, kind_of
from pipelines.runs.layout import read_json

ROUNDS = 3
"""Of a trial; the first one, in which everything is met for the first time, is left out of what is measured."""
_WORTH = 10  # a trial is at most a tenth of a run


def measure(found: TablePlan, home: Path, operation: Operation) -> bool:
    """Carry out a few rounds of every kind of run whose length nobody knows, and remember how long a run will take.

    A later plan of the same table knows it. Kinds of fewer than thirty rounds are left: their first run says as much.

    Args:
        found: the plan. home: folder of the trials. operation: how.

    Returns:
        Whether anything was measured.
    """
    cache = Cache.here()
    unknown: dict[str, PlannedRun] = {}
    for setting in found.settings:
        runs = comparison_runs(setting.parameters, None, found.asked.seeds[:1])
        for run, row in zip(one_draw(runs, setting.rows), setting.rows, strict=True):
            kind = kind_of(run.config)
            if cache.cost(kind).seconds is None and run.config.federation.rounds >= _WORTH * ROUNDS:
                unknown[kind] = replace(run, label=f"{row.key}, {setting.name}")
    if not unknown:
        return False
    kinds = plural(len(unknown), "kind")
    operation.watcher.say(f"{found.table.id}: {ROUNDS} rounds of each of {kinds} of runs, to know how long they take")
    trials = [replace(run, config=_with_rounds(run.config)) for run in unknown.values()]
    placed, failed = carry_out_all(trials, home, operation)
    for trial, run in zip(placed, unknown.values(), strict=True):
        if trial.label not in failed:
            cache.note_seconds(run.config, per_round(trial.directory) * run.config.federation.rounds)
    return True


def _with_rounds(config: Config) -> Config:
    return Config.from_mapping(with_values(config.to_mapping(), {"federation.rounds": ROUNDS}))


def per_round(run: Path) -> float:
    """Mean seconds of the rounds of a finished run after its first one, evaluation included."""
    records = read_json(RunFiles(run).timing)["rounds"]
    later = [record for record in records if record["round"] > 1]
    return sum(sum(record["seconds"].values()) for record in later) / len({record["round"] for record in later})
