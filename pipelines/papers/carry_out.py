"""``protofl paper run``: the comparisons of a table one after the other, its page growing with each."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flcore.errors import RunError
from pipelines.execution.bodies import Operation, Outcome
from pipelines.papers.plan import TablePlan, told_length
from pipelines.papers.results import TableResults, paper_tables, results, write
from pipelines.reporting.tables import print_tables
from pipelines.tuning.comparing import compare_methods

HOME = Path("runs/papers")
"""Where tables go that nobody gives a place."""


def folder_of(plan: TablePlan) -> Path:
    """Where a table goes that nobody gives a place: one folder per table and budget."""
    scale = plan.asked.rounds_scale
    return HOME / (plan.table.id + ("" if scale == 1 else f"-x{scale:g}"))


def run_table(plan: TablePlan, out: Path, operation: Operation, *, restart: bool = False) -> Outcome:
    """Carry out what can be run; what has finished is found again, so that the same command goes on.

    A setting that fails is told and does not stop the others.

    Args:
        plan: of the table. out: its folder. operation: how.
        restart: throw away checkpoints that cannot be used.

    Returns:
        With the table's page, and runs and settings that failed.

    Raises:
        RunError: nothing can be run, or every setting failed.
    """
    if not plan.settings:
        reasons = sorted(set(plan.refused.values()))
        raise RunError(f"{plan.table.id}: none of these cells can be run here: {'; '.join(reasons)}")
    operation.watcher.say(f"{plan.table.id}: {told_length(plan)}")
    failed: dict[str, str] = {}
    store = None
    for number, setting in enumerate(plan.settings, 1):
        titles = ", ".join(column.title for column in setting.columns)
        operation.watcher.say(f"{plan.table.id}: {titles} (setting {number} of {len(plan.settings)})")
        whole = replace(operation, wait=True)  # the table is read from what the recorder writes
        try:
            outcome = compare_methods(setting.parameters, None, None, out / setting.name, whole, restart=restart)
        except RunError as error:
            failed[titles] = str(error)
            operation.watcher.say(f"{titles} failed: {error}")
        else:
            store = outcome.store
        _write(results(plan, out), out)
    if len(failed) == len(plan.settings):
        raise RunError(f"{plan.table.id}: every setting failed; the first: {next(iter(failed.values()))}")
    found = results(plan, out)
    page = _write(found, out)
    text = io.StringIO()
    width, terminal = operation.console["width"], operation.console["terminal"]
    print_tables(paper_tables(found), Console(file=text, width=width, force_terminal=terminal))
    markdown = (out / "table.md").read_text(encoding="utf-8")
    return Outcome(out, page, store, table=text.getvalue(), markdown=markdown, failed={**found.failed, **failed})


def _write(found: TableResults, out: Path) -> Path:
    from pipelines.papers.drawings import sections  # matplotlib, which takes a second to import

    return write(found, out, sections(found))
