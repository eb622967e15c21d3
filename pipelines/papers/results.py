"""Our figures next to the printed ones, read from the finished comparisons of a table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipelines.papers.catalogue import Column, PaperTable, Printed, Row
from pipelines.papers.marks import budget, by_setting, is_changed, mark, of_column
from pipelines.papers.plan import TablePlan, cells, refused_by_reason, snapshots_beyond
from pipelines.papers.runs import INTERRUPTED, FailedRun, MeasuredRun, runs_of, table_file, told_pairs
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


def results(plan: TablePlan, out: Path, carried_out: Collection[str] = ()) -> TableResults:
    """Read the finished comparisons in a table's folder, including settings that the plan leaves out.

    Settings in ``carried_out`` have the plan's assignments; the others have the folder's.

    Raises:
        DataError: a file there is damaged.
    """
    besides = dict(table_file(out).assignments) if (out / "table.json").exists() else {}
    besides |= {setting.name: setting.besides for setting in plan.settings if setting.name in carried_out}
    runs, failures = runs_of(plan.table, out)
    return assembled(replace(_as_measured(plan, runs), besides=besides), runs, failures)


def _as_measured(plan: TablePlan, runs: Iterable[MeasuredRun]) -> TablePlan:
    """Return the plan with the seeds of all measured runs, and their partition seeds if the plan has any."""
    seeds = tuple(sorted({*plan.asked.seeds, *(run.pair[1] for run in runs)}))
    draws = plan.asked.partition_seeds
    if draws is not None:
        draws = tuple(sorted({*draws, *(run.pair[0] for run in runs)}))
    return replace(plan, asked=replace(plan.asked, seeds=seeds, partition_seeds=draws))


def assembled(plan: TablePlan, runs: Iterable[MeasuredRun], failures: Iterable[FailedRun] = ()) -> TableResults:
    """Assemble a table from the figures of its runs, in any order.

    A cell has one run per partition and seed; partitions with the same fingerprint are the same.
    """
    table = plan.table
    divided: dict[tuple[str, str], int] = {}  # by setting and fingerprint: the reported partition seed
    values: dict[tuple[str, str], dict[Pair, float | None]] = {}
    measured: dict[tuple[str, str, Pair], MeasuredRun] = {}
    for run in runs:
        pair = divided.setdefault((run.setting, run.partition), run.pair[0]), run.pair[1]
        measured[run.setting, run.row, pair] = replace(run, pair=pair)
        for read, value in run.figures.items():
            values.setdefault((run.row, read), {})[pair] = value
    lost = {
        (run.setting, run.row, run.pair): run
        for run in failures
        if run.reason != INTERRUPTED and (run.setting, run.row, run.pair) not in measured
    }
    setting_of = {column.key: group[0].key for group in table.settings() for column in group}
    reasons: dict[tuple[str, str], list[str]] = {}
    for (setting, whose, _), failure in lost.items():
        reasons.setdefault((setting, whose), []).append(failure.reason)
    found = {}
    for row in table.rows:
        for column in table.columns:
            key = row.key, column.key
            own = values.get(key, {})
            reference = {} if row.key == table.baseline else values.get((table.baseline, column.key), {})
            here = reasons.get((setting_of[column.key], row.key), ())
            found[key] = Cell(
                row,
                column,
                table.printed.get(key),
                summarise(own),
                paired_difference(own, reference),
                plan.refused.get(key),
                tuple(here) if table.why_missing(row, column) is None else (),
            )
    return TableResults(plan, found, tuple(measured.values()), tuple(failures))


# ---- for people and machines -------------------------------------------------------------------------------------


def write(found: TableResults, directory: Path, drawn: Iterable[Section] = (), verdicts: Table | None = None) -> Path:
    """Write ``table.md``, ``.csv``, ``.json`` and ``report.html`` and return the page.

    ``drawn`` are the first sections of the page (:mod:`pipelines.papers.drawings`).
    """
    shown = [*paper_tables(found), *([verdicts] if verdicts else [])]
    lines = [f"# {title(found)}", "", *lead(found), ""]
    differing = by_setting(found.plan)
    lines += ["Set beside the table's own values:", "", *(f"- {each}" for each in differing), ""] if differing else []
    for table in shown:
        lines += markdown_table(table)
    refused = [f"{reason}: {where}" for reason, where in refused_by_reason(found.plan).items()]
    lines += ["## Not run here", "", *(f"- {one}" for one in refused), ""] if refused else []
    noted = notes(found)
    lines += ["## Notes", "", *(f"- {note}" for note in noted), ""] if noted else []
    rows = records(found)
    document = {
        "id": found.plan.table.id,
        "title": found.plan.table.title,
        "seeds": list(found.plan.asked.seeds),
        "partition_seeds": found.plan.asked.partition_seeds and list(found.plan.asked.partition_seeds),
        "rounds_scale": found.plan.asked.rounds_scale,
        "assignments": {name: list(each) for name, each in found.plan.besides.items() if each},
        "cells": rows,
        "failed": dict(found.failed),
    }
    contents = {"table.md": "\n".join(lines), "table.csv": csv_text(rows), "table.json": json_text(document)}
    write_texts(contents, directory)
    heading = "Set beside the table's own values"
    sections = [Section("changed", heading, (Block("notes", differing),))] if differing else []
    sections += drawn
    sections += [Section(f"table-{place}", table.title, (Block("table", table),)) for place, table in enumerate(shown)]
    settings = [
        Block(
            "words",
            _LINK.format(href=f"{setting.name}/report.html", title=listed(one.title for one in setting.columns)),
        )
        for setting in found.plan.settings
        if (directory / setting.name / "report.html").exists()
    ]
    if settings:
        sections.append(Section("settings", "Pages of the comparisons", tuple(settings)))
    if refused:
        sections.append(Section("refused", "Not run here", (Block("notes", refused),)))
    if noted:
        sections.append(Section("notes", "Notes", (Block("notes", noted),)))
    page = {"kicker": found.plan.table.id, "title": f"{found.plan.table.title}{mark(found.plan)}"}
    return write_page(directory / "report.html", page, " ".join(lead(found)), sections, colours={})


def title(found: TableResults) -> str:
    """Return the table's id and title, with a mark if its setting is not the paper's."""
    return f"{found.plan.table.id}: {found.plan.table.title}{mark(found.plan)}"


def lead(found: TableResults) -> list[str]:
    """Return sentences on the figures and, by column, the runs that they come from."""
    printed = sum(1 for _ in cells(found.plan.table))
    measured = f"{found.num_measured} of {printed} printed figures are measured" if printed else "nothing is printed"
    return [
        found.plan.table.about,
        f"Ours are mean ± sample standard deviation over n runs; {measured}{budget(found.plan)}.",
        *_runs_by_column(found),
    ]


def _runs_by_column(found: TableResults) -> list[str]:
    """Return sentences on the runs of each column; columns with the same runs share one, differing rows are named."""
    told: dict[str, list[str]] = {}
    for column in found.plan.table.columns:
        rows: dict[frozenset[tuple[int, int]], list[str]] = {}
        for row in found.plan.table.rows:
            if pairs := found.cells[row.key, column.key].pairs:
                rows.setdefault(pairs, []).append(row.title)
        if rows:
            usual = max(rows, key=lambda pairs: (len(rows[pairs]), len(pairs)))
            others = [f"{listed(names)}: {told_pairs(pairs)}" for pairs, names in rows.items() if pairs != usual]
            told.setdefault("; ".join([told_pairs(usual), *others]), []).append(column.title)
    return [f"{', '.join(columns)}: {words}." for words, columns in told.items()]


def paper_tables(found: TableResults, *, measured: bool = False) -> list[Table]:
    """Return our figures with the printed ones, then the differences; if ``measured``, only cells that were run."""
    table = found.plan.table
    tried = {key for key, cell in found.cells.items() if not measured or cell.ours.n or cell.failed}
    columns = [column for column in table.columns if any((row.key, column.key) in tried for row in table.rows)]
    rows = [row for row in table.rows if any((row.key, column.key) in tried for column in columns)]
    names = tables.Column("method", [row.title for row in rows], is_text=True)
    figures, differences = [names], [names]
    for column in columns:
        of = [found.cells[row.key, column.key] for row in rows]
        if not any(cell.ours.n or cell.failed or cell.printed for cell in of):
            continue
        beside, here = any(cell.printed for cell in of), any(cell.ours.n or cell.failed for cell in of)
        heading = f"{column.title}, ours" if beside else column.title
        heading += " (changed setting)" if is_changed(found.plan, column) else ""
        if here:
            figures.append(
                tables.Column(heading, [_with_lost(format_summary(cell.ours, "points"), cell) for cell in of])
            )
        if beside:  # columns without runs get no empty column of ours
            named = "printed" if here else f"{column.title}, printed"
            figures.append(tables.Column(named, [_printed_text(cell.printed) for cell in of]))
        if any(cell.difference.n for cell in of):
            differences.append(tables.Column(heading, [_difference_text(cell) for cell in of]))
            if beside:
                printed = [_printed_difference(table, row, column) for row in rows]
                texts = [format_value(value, "points", signed=True) for value in printed]
                differences.append(tables.Column("printed", texts))
    shown = [Table(f"{table.title}{mark(found.plan)}", tuple(figures))]
    if len(differences) > 1:
        baseline = table.row(table.baseline).title
        shown.append(Table(f"Difference to {baseline} [95 % interval]{mark(found.plan)}", tuple(differences)))
    return shown


def _printed_difference(table: PaperTable, row: Row, column: Column) -> float | None:
    own, reference = table.printed.get((row.key, column.key)), table.printed.get((table.baseline, column.key))
    if own is None or reference is None or row.key == table.baseline:
        return None
    return own.value - reference.value


def records(found: TableResults) -> list[dict[str, Any]]:
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
            "rounds_scale": found.plan.asked.rounds_scale,
            "assignments": ", ".join(of_column(found.plan, cell.column)) or None,
            "difference": cell.difference.mean,
            "difference_low": cell.difference.low,
            "difference_high": cell.difference.high,
            "refused": cell.refused,
        }
        for cell in found.cells.values()
    ]


def notes(found: TableResults) -> list[str]:
    """Return notes for the reader, and failures."""
    beyond = ", ".join(map(str, snapshots_beyond(found.plan)))
    without = [f"No pictures of round {beyond}: the reduced budget ends before."] if beyond else []
    here = {(run.setting, run.row, *run.pair) for run in found.runs}
    others = plural(len(found.plan.left_out - here), "run")
    elsewhere = [f"{others} left out: kept with the code, or another machine's part; `protofl paper keep` joins them."]
    failed = [f"Failed: {label}: {reason}" for label, reason in found.failed.items()]
    return [*found.plan.table.notes, *without, *(elsewhere if found.plan.left_out - here else []), *failed]


def _printed_text(printed: Printed | None) -> str:
    if printed is None:
        return MISSING
    return f"{printed.value:.2f}" + ("" if printed.spread is None else f" ± {printed.spread:.2f}")


def _with_lost(text: str, cell: Cell) -> str:
    """Return a figure with the number of failed runs."""
    return f"{text} ({cell.lost})" if cell.failed else text


def _difference_text(cell: Cell) -> str:
    text = format_difference(cell.difference, "points")
    return text if text == MISSING else _with_lost(text, cell)


_LINK = Markup('<a href="{href}">{title}</a>')
