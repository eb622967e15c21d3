"""Texts on figures with other rounds than the paper's, or other settings than the table's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipelines.papers.catalogue import Column
from pipelines.papers.overrides import key_of
from pipelines.papers.plan import TablePlan

IMAGE_FILES = {"data.name": "imagefolder", "data.image_size": "null"}
"""Keys that may differ from a table, with the allowed value: its images as files, which may be JPEG copies."""
FROM_FILES = frozenset(f"{key}={value}" for key, value in IMAGE_FILES.items())
"""Its assignments."""


def budget(plan: TablePlan) -> str:
    """Return a mark for other rounds than the paper's; empty at the paper's budget."""
    scale = plan.selection.rounds_scale
    return "" if scale == 1 else f" ({'REDUCED' if scale < 1 else 'LARGER'} BUDGET: {scale:g} of the rounds)"


def mark(plan: TablePlan) -> str:
    """Return a table's mark for other rounds, images from files and other settings."""
    assignments = [one for each in plan.overrides.values() for one in each]
    files = " (IMAGES FROM FILES)" if FROM_FILES & {*assignments} else ""
    return budget(plan) + files + changed(assignments)


def changed(assignments: Iterable[str]) -> str:
    """Return a mark for assignments; empty if they only change the rounding or take images from files."""
    distinct = dict.fromkeys(_of_setting(assignments))
    return f" (CHANGED SETTING: {', '.join(distinct)})" if distinct else ""


def is_changed(plan: TablePlan, column: Column) -> bool:
    """Return whether a column's runs have another setting than the table's, besides images from files."""
    return any(_of_setting(overrides_of(plan, column)))


def _of_setting(assignments: Iterable[str]) -> Iterator[str]:
    """Skip images from files, and assignments that only change the order of sums, which affects last digits."""
    for assignment in assignments:
        key = key_of(assignment)
        if assignment not in FROM_FILES and (not key.startswith("engine.") or key == "engine.precision"):
            yield assignment


def overrides_of(plan: TablePlan, column: Column) -> tuple[str, ...]:
    """Return the assignments of a column's runs."""
    return plan.overrides.get(next(group[0].key for group in plan.table.settings() if column in group), ())


def panel_caveat(plan: TablePlan, column: Column) -> str:
    """Return the second title line of a column's panel; empty without a mark."""
    scale = plan.selection.rounds_scale
    words = [f"{scale:g} of the rounds"] * (scale != 1) + ["changed setting"] * is_changed(plan, column)
    return ", ".join(words)


def overrides_by_setting(plan: TablePlan) -> list[str]:
    """Return a line per setting with its assignments."""
    return [
        f"{', '.join(c.title for c in group)}: {', '.join(plan.overrides[group[0].key])}"
        for group in plan.table.settings()
        if plan.overrides.get(group[0].key)
    ]
