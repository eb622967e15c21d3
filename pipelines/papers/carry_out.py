"""``protofl paper run``: the comparisons of a table one after the other, its page growing with each."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flcore.errors import RunError
from pipelines.config.grid import PlannedRun
from pipelines.execution.bodies import RUNS, Operation, Outcome, comparison_runs
from pipelines.execution.one_run import placed
from pipelines.papers.plan import Setting, TablePlan, plan, told_length
from pipelines.papers.results import TableResults, paper_tables, results, write
from pipelines.reporting.tables import print_tables
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs
from pipelines.tuning.comparing import compare_methods

HOME = Path("runs/papers")
"""Where tables go that nobody gives a place."""


def folder_of(planned: TablePlan) -> Path:
    """Where a table goes that nobody gives a place: one folder per table and budget."""
    scale = planned.asked.rounds_scale
    return HOME / (planned.table.id + ("" if scale == 1 else f"-x{scale:g}"))


def run_table(planned: TablePlan, out: Path, operation: Operation, *, restart: bool = False) -> Outcome:
    """Carry out what can be run; what has finished is found again, so that the same command goes on.

    A setting that fails is told and does not stop the others. Rows that an earlier command finished there stay in its
    comparison, whichever are asked for now.

    Args:
        planned: the table's plan. out: its folder. operation: how.
        restart: throw away checkpoints that cannot be used.

    Returns:
        With the table's page, and runs and settings that failed.

    Raises:
        ConfigError: nothing can be run as it is asked for. DataError: nothing can be run without data that are missing.
        RunError: nothing can be run for other or several reasons, or every setting failed.
    """
    if not planned.settings:
        raise planned.nothing_to_run()
    operation.watcher.say(f"{planned.table.id}: {told_length(planned)}")
    failed: dict[str, str] = {}
    store = None
    for number, setting in enumerate(planned.settings, 1):
        titles = ", ".join(column.title for column in setting.columns)
        operation.watcher.say(f"{planned.table.id}: {titles} (setting {number} of {len(planned.settings)})")
        whole = replace(operation, wait=True)  # the table is read from what the recorder writes
        try:
            parameters = _with_finished_rows(planned, setting, out)
            outcome = compare_methods(parameters, None, None, out / setting.name, whole, restart=restart)
        except RunError as error:
            failed[titles] = str(error)
            operation.watcher.say(f"{titles} failed: {error}")
        else:
            store = outcome.store
        _write(results(planned, out), out)
    if len(failed) == len(planned.settings):
        raise RunError(f"{planned.table.id}: every setting failed; the first: {next(iter(failed.values()))}")
    found = results(planned, out)
    page = _write(found, out)
    text = io.StringIO()
    width, terminal = operation.console["width"], operation.console["terminal"]
    print_tables(paper_tables(found), Console(file=text, width=width, force_terminal=terminal))
    markdown = (out / "table.md").read_text(encoding="utf-8")
    return Outcome(out, page, store, table=text.getvalue(), markdown=markdown, failed={**found.failed, **failed})


def _with_finished_rows(planned: TablePlan, setting: Setting, out: Path) -> Mapping[str, Any]:
    """A setting's parameters, with the other rows all of whose runs this code has finished there."""
    asked = replace(planned.asked, rows=None, columns=[column.key for column in setting.columns], max_hours=None)
    rows = [row.key for row in setting.rows]
    for whole in plan(planned.table, asked, look_at_data=False).settings:
        runs = [run for run in comparison_runs(whole.parameters, None, None) if run.name not in rows]
        names = dict.fromkeys(run.name for run in runs)
        rows += [n for n in names if all(_has_finished(run, out / setting.name) for run in runs if run.name == n)]
    if len(rows) == len(setting.rows):
        return setting.parameters
    in_order = [row.key for row in planned.table.rows if row.key in rows]
    return plan(planned.table, replace(asked, rows=in_order), look_at_data=False).settings[0].parameters


def _has_finished(run: PlannedRun, home: Path) -> bool:
    cache = Cache.here()
    if not any((home / RUNS).glob(f"{run.config.method.name}-s{run.config.seed}-*")):
        return False
    prepared = cache.prepared(run.config)
    inputs = Inputs(prepared, cache.partition(run.config, prepared))
    return placed(run.config, inputs, home / RUNS).is_finished


def _write(found: TableResults, out: Path) -> Path:
    from pipelines.papers.drawings import sections  # matplotlib, which takes a second to import

    return write(found, out, sections(found))
