"""Our figures next to the printed ones, read from the finished comparisons of a table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipelines.papers.catalogue import Column, PaperTable, Printed, Row
from pipelines.papers.caveats import budget, is_changed, mark, overrides_by_setting, overrides_of
from pipelines.papers.plan import RunKey, TablePlan, cells, refused_by_reason, snapshots_beyond
from pipelines.papers.runs import INTERRUPTED, FailedRun, MeasuredRun, describe_pairs, runs_of, table_file
from pipelines.reporting import tables
from pipelines.reporting.formats import MISSING, format_difference, format_summary, format_value, listed, plural
from pipelines.reporting.page import Block, Section, write_page
from pipelines.reporting.statistics import PairedDifference, Summary, paired_difference, summarise
from pipelines.reporting.tables import Table, csv_text, json_text, markdown_table, write_texts
from pipelines.runs.record import Pair


@dataclass(frozen=True)
class Cell:
    """One figure of a table.

    Attributes:
        printed: in the paper. ours: over runs, in the table's unit. difference: to the baseline's row, paired by run.
        refused: why it is not run. failed: a reason for each run without a result, except interrupted ones.
    """

    row: Row
    column: Column
    printed: Printed | None
    ours: Summary
    difference: PairedDifference
    refused: str | None = None
    failed: tuple[str, ...] = ()

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """Partition seed and seed of the runs that have a figure."""
        pairs = self.ours.by_seed.items()
        return frozenset(pair for pair, value in pairs if value is not None and isinstance(pair, tuple))

    @property
    def lost(self) -> str:
        """The number of runs without a result, such as ``4 of 5 diverged``; empty if all have one."""
        if not self.failed:
            return ""
        how = "diverged" if all("diverged" in reason for reason in self.failed) else "failed"
        return f"{len(self.failed)} of {len(self.failed) + len(self.ours.by_seed)} {how}"


@dataclass(frozen=True)
class TableResults:
    """The cells of a table by row and column, its runs (one per partition and seed), and runs without a result."""

    plan: TablePlan
    cells: Mapping[tuple[str, str], Cell]
    runs: tuple[MeasuredRun, ...] = ()
    failures: tuple[FailedRun, ...] = ()

    @property
    def failed(self) -> Mapping[str, str]:
        """Reasons of runs without a result, by label."""
        return {run.label: run.reason for run in self.failures}

    @property
    def num_measured(self) -> int:
        """Number of printed cells that have a measured figure."""
        return sum(self.cells[row.key, column.key].ours.n > 0 for row, column in cells(self.plan.table))


def results(plan: TablePlan, out: Path, done: Collection[str] = ()) -> TableResults:
    """Read the finished comparisons in a table's folder, including settings that the plan leaves out.

    Settings in ``done`` have the plan's assignments; the others have the folder's.
    """
    overrides = dict(table_file(out).assignments) if (out / "table.json").exists() else {}
    overrides |= {setting.name: setting.overrides for setting in plan.settings if setting.name in done}
    runs, failures = runs_of(plan.table, out)
    return assembled(replace(_as_measured(plan, runs), overrides=overrides), runs, failures)


def _as_measured(plan: TablePlan, runs: Iterable[MeasuredRun]) -> TablePlan:
    """Return the plan with the seeds of all measured runs, and their partition seeds if the plan has any."""
    seeds = tuple(sorted({*plan.selection.seeds, *(run.seed for run in runs)}))
    draws = plan.selection.partition_seeds
    if draws is not None:
        draws = tuple(sorted({*draws, *(run.division for run in runs)}))
    return replace(plan, selection=replace(plan.selection, seeds=seeds, partition_seeds=draws))


def assembled(plan: TablePlan, runs: Iterable[MeasuredRun], failures: Iterable[FailedRun] = ()) -> TableResults:
    """Assemble a table from the figures of its runs, in any order.

    A cell has one run per partition and seed; partitions with the same fingerprint are the same.
    """
    table = plan.table
    divided: dict[tuple[str, str], int] = {}  # by setting and fingerprint: the reported partition seed
    values: dict[tuple[str, str], dict[Pair, float | None]] = {}
    measured: dict[RunKey, MeasuredRun] = {}
    for run in runs:
        same = replace(run, division=divided.setdefault((run.setting, run.partition), run.division))
        measured[same.key] = same
        for read, value in run.figures.items():
            values.setdefault((run.row, read), {})[same.pair] = value
    lost = {run.key: run for run in failures if run.reason != INTERRUPTED and run.key not in measured}
    setting_of = {column.key: group[0].key for group in table.settings() for column in group}
    reasons: dict[tuple[str, str], list[str]] = {}
    for failure in lost.values():
        reasons.setdefault((failure.setting, failure.row), []).append(failure.reason)
    table_cells = {}
    for row in table.rows:
        for column in table.columns:
            key = row.key, column.key
            by_run = values.get(key, {})
            reference = {} if row.key == table.baseline else values.get((table.baseline, column.key), {})
            failed_reasons = reasons.get((setting_of[column.key], row.key), ())
            table_cells[key] = Cell(
                row,
                column,
                table.printed.get(key),
                summarise(by_run),
                paired_difference(by_run, reference),
                plan.refused.get(key),
                tuple(failed_reasons) if table.why_missing(row, column) is None else (),
            )
    return TableResults(plan, table_cells, tuple(measured.values()), tuple(failures))


# ---- for people and machines -------------------------------------------------------------------------------------


def write(results: TableResults, directory: Path, drawn: Iterable[Section] = (), verdicts: Table | None = None) -> Path:
    """Write ``table.md``, ``.csv``, ``.json`` and ``report.html`` and return the page.

    ``drawn`` are the first sections of the page (:mod:`pipelines.papers.drawings`).
    """
    plan = results.plan
    shown = [*paper_tables(results), *([verdicts] if verdicts else [])]
    heading, differing = "Set beside the table's own values", overrides_by_setting(plan)
    refused = [f"{reason}: {where}" for reason, where in refused_by_reason(plan).items()]
    note_texts, rows = notes(results), records(results)
    lines = [f"# {title(results)}", "", *lead(results), ""]
    lines += [f"{heading}:", "", *(f"- {each}" for each in differing), ""] if differing else []
    for table in shown:
        lines += markdown_table(table)
    lines += ["## Not run here", "", *(f"- {one}" for one in refused), ""] if refused else []
    lines += ["## Notes", "", *(f"- {note}" for note in note_texts), ""] if note_texts else []
    document = {
        "id": plan.table.id,
        "title": plan.table.title,
        "seeds": list(plan.selection.seeds),
        "partition_seeds": plan.selection.partition_seeds and list(plan.selection.partition_seeds),
        "rounds_scale": plan.selection.rounds_scale,
        "assignments": {name: list(each) for name, each in plan.overrides.items() if each},
        "cells": rows,
        "failed": dict(results.failed),
    }
    contents = {"table.md": "\n".join(lines), "table.csv": csv_text(rows), "table.json": json_text(document)}
    write_texts(contents, directory)
    links = [
        Block("words", _LINK.format(href=f"{setting.name}/report.html", title=listed(c.title for c in setting.columns)))
        for setting in plan.settings
        if (directory / setting.name / "report.html").exists()
    ]
    sections = [
        *([Section("changed", heading, (Block("notes", differing),))] if differing else []),
        *drawn,
        *(Section(f"table-{number}", table.title, (Block("table", table),)) for number, table in enumerate(shown)),
        *([Section("settings", "Pages of the comparisons", tuple(links))] if links else []),
        *([Section("refused", "Not run here", (Block("notes", refused),))] if refused else []),
        *([Section("notes", "Notes", (Block("notes", note_texts),))] if note_texts else []),
    ]
    page = {"kicker": plan.table.id, "title": f"{plan.table.title}{mark(plan)}"}
    return write_page(directory / "report.html", page, " ".join(lead(results)), sections, colours={})


def title(results: TableResults) -> str:
    """Return the table's id and title, with a mark if its setting is not the paper's."""
    return f"{results.plan.table.id}: {results.plan.table.title}{mark(results.plan)}"


def lead(results: TableResults) -> list[str]:
    """Return sentences on the figures and, by column, the runs that they come from."""
    printed = sum(1 for _ in cells(results.plan.table))
    measured = f"{results.num_measured} of {printed} printed figures are measured" if printed else "nothing is printed"
    return [
        results.plan.table.about,
        f"Ours are mean ± sample standard deviation over n runs; {measured}{budget(results.plan)}.",
        *_runs_by_column(results),
    ]


def _runs_by_column(results: TableResults) -> list[str]:
    """Return sentences on the runs of each column; columns with the same runs share one, differing rows are named."""
    texts: dict[str, list[str]] = {}
    for column in results.plan.table.columns:
        rows: dict[frozenset[tuple[int, int]], list[str]] = {}
        for row in results.plan.table.rows:
            if pairs := results.cells[row.key, column.key].pairs:
                rows.setdefault(pairs, []).append(row.title)
        if rows:
            usual = max(rows, key=lambda pairs: (len(rows[pairs]), len(pairs)))
            others = [f"{listed(names)}: {describe_pairs(pairs)}" for pairs, names in rows.items() if pairs != usual]
            texts.setdefault("; ".join([describe_pairs(usual), *others]), []).append(column.title)
    return [f"{', '.join(columns)}: {words}." for words, columns in texts.items()]


def paper_tables(results: TableResults, *, measured: bool = False) -> list[Table]:
    """Return our figures with the printed ones, then the differences; if ``measured``, only cells that were run."""
    table = results.plan.table
    tried = {key for key, cell in results.cells.items() if not measured or cell.ours.n or cell.failed}
    columns = [column for column in table.columns if any((row.key, column.key) in tried for row in table.rows)]
    rows = [row for row in table.rows if any((row.key, column.key) in tried for column in columns)]
    names = tables.Column("method", [row.title for row in rows], is_text=True)
    figures, differences = [names], [names]
    for column in columns:
        column_cells = [results.cells[row.key, column.key] for row in rows]
        if not any(cell.ours.n or cell.failed or cell.printed for cell in column_cells):
            continue
        has_printed = any(cell.printed for cell in column_cells)
        has_ours = any(cell.ours.n or cell.failed for cell in column_cells)
        heading = f"{column.title}, ours" if has_printed else column.title
        heading += " (changed setting)" if is_changed(results.plan, column) else ""
        if has_ours:
            figures.append(
                tables.Column(heading, [_with_lost(format_summary(cell.ours, "points"), cell) for cell in column_cells])
            )
        if has_printed:  # columns without runs get no empty column of ours
            named = "printed" if has_ours else f"{column.title}, printed"
            figures.append(
                tables.Column(named, [MISSING if c.printed is None else c.printed.text for c in column_cells])
            )
        if any(cell.difference.n for cell in column_cells):
            texts = [format_difference(cell.difference, "points") for cell in column_cells]
            texts = [t if t == MISSING else _with_lost(t, c) for t, c in zip(texts, column_cells, strict=True)]
            differences.append(tables.Column(heading, texts))
            if has_printed:
                printed = [_printed_difference(table, row, column) for row in rows]
                texts = [format_value(value, "points", signed=True) for value in printed]
                differences.append(tables.Column("printed", texts))
    shown = [Table(f"{table.title}{mark(results.plan)}", tuple(figures))]
    if len(differences) > 1:
        baseline = table.row(table.baseline).title
        shown.append(Table(f"Difference to {baseline} [95 % interval]{mark(results.plan)}", tuple(differences)))
    return shown


def _printed_difference(table: PaperTable, row: Row, column: Column) -> float | None:
    value, reference = table.printed.get((row.key, column.key)), table.printed.get((table.baseline, column.key))
    return value.value - reference.value if value and reference and row.key != table.baseline else None


def records(results: TableResults) -> list[dict[str, Any]]:
    """Return a machine-readable row per cell; figures are in the table's unit."""
    return [
        {
            "row": cell.row.key,
            "column": cell.column.key,
            "metric": cell.row.metrics.get(cell.column.metric, cell.column.metric),
            "printed": None if cell.printed is None else cell.printed.value,
            "printed_spread": None if cell.printed is None else cell.printed.spread,
            "ours": cell.ours.mean,
            "ours_std": cell.ours.std,
            "n": cell.ours.n,
            "divisions": len({division for division, _ in cell.pairs}),
            "failed": len(cell.failed),
            "rounds_scale": results.plan.selection.rounds_scale,
            "assignments": ", ".join(overrides_of(results.plan, cell.column)) or None,
            "difference": cell.difference.mean,
            "difference_low": cell.difference.low,
            "difference_high": cell.difference.high,
            "refused": cell.refused,
        }
        for cell in results.cells.values()
    ]


def notes(results: TableResults) -> list[str]:
    """Return notes for the reader, and failures."""
    beyond = ", ".join(map(str, snapshots_beyond(results.plan)))
    without = [f"No pictures of round {beyond}: the reduced budget ends before."] if beyond else []
    shown = {run.key for run in results.runs}
    others = plural(len(results.plan.left_out - shown), "run")
    elsewhere = [f"{others} left out: kept with the code, or another machine's part; `protofl paper keep` joins them."]
    failed = [f"Failed: {label}: {reason}" for label, reason in results.failed.items()]
    return [*results.plan.table.notes, *without, *(elsewhere if results.plan.left_out - shown else []), *failed]


def _with_lost(text: str, cell: Cell) -> str:
    """Return a figure with the number of failed runs."""
    return f"{text} ({cell.lost})" if cell.failed else text


_LINK = Markup('<a href="{href}">{title}</a>')
