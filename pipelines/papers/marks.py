"""Marks of whatever is measured with other rounds than the paper's, or with a setting that is not the table's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pipelines.papers.assigned import key_of
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
    """A mark for what was set beside a table's own values; empty for nothing, and for what can only round otherwise."""
    distinct = dict.fromkeys(_not_rounding(assignments))
    return f" (CHANGED SETTING: {', '.join(distinct)})" if distinct else ""


def is_changed(plan: TablePlan, column: Column) -> bool:
    """Whether a column's runs are of another setting than the table's."""
    return any(_not_rounding(of_column(plan, column)))


def _not_rounding(assignments: Iterable[str]) -> Iterator[str]:
    """Without where and how the same sums are added up; their last digits are told beside the figures, not marked."""
    for assignment in assignments:
        key = key_of(assignment)
        if not key.startswith("engine.") or key == "engine.precision":
            yield assignment


def of_column(plan: TablePlan, column: Column) -> tuple[str, ...]:
    """What was set beside a column's own values when its runs were made."""
    return plan.besides.get(setting_of(plan.table, column), ())


def setting_of(table: PaperTable, column: Column) -> str:
    """The name of the setting that a column is read from."""
    return next(group[0].key for group in table.settings() if column in group)


def on_panel(plan: TablePlan, column: Column) -> str:
    """A line below the title of a column's panel, which may be looked at without its page; empty for no mark."""
    scale = plan.asked.rounds_scale
    words = [f"{scale:g} of the rounds"] * (scale != 1) + ["changed setting"] * is_changed(plan, column)
    return ", ".join(words)


def by_setting(plan: TablePlan) -> list[str]:
    """What was set beside the table's own values, a line per setting."""
    table = plan.table
    return [
        f"{', '.join(c.title for c in group)}: {', '.join(plan.besides[group[0].key])}"
        for group in table.settings()
        if plan.besides.get(group[0].key)
    ]
