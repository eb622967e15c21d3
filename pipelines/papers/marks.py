"""Marks of whatever is measured with other rounds than the paper's, or with a setting that is not the table's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipelines.papers.catalogue import Column, PaperTable

if TYPE_CHECKING:
    from pipelines.papers.plan import TablePlan


def budget(plan: TablePlan) -> str:
    """A mark for other rounds than the paper's; empty at its own budget."""
    scale = plan.asked.rounds_scale
    return "" if scale == 1 else f" ({'REDUCED' if scale < 1 else 'LARGER'} BUDGET: {scale:g} of the rounds)"


def mark(plan: TablePlan) -> str:
    """A mark of a table for other rounds, and for what was set beside its own values; empty where it is as printed."""
    return budget(plan) + changed(one for each in plan.besides.values() for one in each)


def changed(assignments: Iterable[str]) -> str:
    """A mark for what was set beside a table's own values; empty for nothing."""
    distinct = dict.fromkeys(assignments)
    return f" (CHANGED SETTING: {', '.join(distinct)})" if distinct else ""


def of_column(plan: TablePlan, column: Column) -> tuple[str, ...]:
    """What was set beside a column's own values when its runs were made."""
    return plan.besides.get(setting_of(plan.table, column), ())


def setting_of(table: PaperTable, column: Column) -> str:
    """The name of the setting that a column is read from."""
    return next(group[0].key for group in table.settings() if column in group)


def on_panel(plan: TablePlan, column: Column) -> str:
    """A line below the title of a column's panel, which may be looked at without its page; empty for no mark."""
    scale = plan.asked.rounds_scale
    words = [f"{scale:g} of the rounds"] * (scale != 1) + ["changed setting"] * bool(of_column(plan, column))
    return ", ".join(words)


def by_setting(plan: TablePlan) -> list[str]:
    """What was set beside the table's own values, a line per setting."""
    table = plan.table
    return [
        f"{', '.join(c.title for c in group)}: {', '.join(plan.besides[group[0].key])}"
        for group in table.settings()
        if plan.besides.get(group[0].key)
    ]
