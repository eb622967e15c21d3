"""Our figures beside the printed ones: read from the comparisons of a table, as far as they are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipelines.papers.catalogue import Column, PaperTable, Printed, Row
from pipelines.papers.figures_of_a_run import figure
from pipelines.papers.plan import Asked, TablePlan, cells, refused_by_reason
from pipelines.reporting import tables
from pipelines.reporting.formats import MISSING, format_number, format_number_difference, listed
from pipelines.reporting.html import Notes, Rows, Section, Words, write_page
from pipelines.reporting.statistics import PairedDifference, Summary, paired_difference, summarise
from pipelines.reporting.tables import WORDS, Format, Table, csv_text, json_text, markdown_table, write_texts
from pipelines.runs.layout import read_json
from pipelines.runs.record import Pair


@dataclass(frozen=True)
class Cell:
    """One figure of a table.

    Attributes:
        row, column: whose. printed: in the paper; None where it prints nothing.
        ours: in the table's unit, over runs; without values where nothing has been run.
        difference: of ours to the row that is the baseline, run by run.
        refused: why it is not run; None where it is, or may be.
    """

    row: Row
    column: Column
    printed: Printed | None
    ours: Summary
    difference: PairedDifference
    refused: str | None = None


@dataclass(frozen=True)
class MeasuredRun:
    """What a finished run says of a table.

    Attributes:
        row: its key. pair: its seed, or division and seed.
        figures: by key of the columns that are read from it, in their units; None where the run has none.
        setting: key of the first of these columns, which its comparison's folder is called by. folder: of the run.
    """

    row: str
    pair: Pair
    figures: Mapping[str, float | None]
    setting: str
    folder: Path


@dataclass(frozen=True)
class TableResults:
    """A table as it stands.

    Attributes:
        plan: of it. cells: by row and column.
        failed: runs without a result, by setting and label, with the reason.
        runs: that the figures are of.
    """

    plan: TablePlan
    cells: Mapping[tuple[str, str], Cell]
    failed: Mapping[str, str]
    runs: tuple[MeasuredRun, ...] = ()

    @property
    def num_measured(self) -> int:
        """Printed cells that have a figure of ours."""
        return sum(self.cells[row.key, column.key].ours.n > 0 for row, column in cells(self.plan.table))


def results(plan: TablePlan, out: Path) -> TableResults:
    """What the comparisons of a table found, as far as they have ended.

    Args:
        plan: of the table; settings that it leaves out are read too, where an earlier command has carried them out.
        out: its folder, with one of each setting.

    Raises:
        DataError: a file there is damaged.
    """
    failed = {
        f"{place.name}: {label}": reason
        for place, document, _ in _comparisons(plan.table, out)
        for label, reason in document["failed"].items()
    }
    return assembled(plan, measured_runs(plan.table, out), failed)


def measured_runs(table: PaperTable, out: Path) -> Iterator[MeasuredRun]:
    """The finished runs of a table's comparisons, with their figures.

    Raises:
        DataError: a file there is damaged.
    """
    reference = table.row(table.baseline)
    for place, document, columns in _comparisons(table, out):
        runs: list[tuple[Row, Pair, Path]] = []
        for run in document["runs"]:
            row = table.row(run["method"])
            pair: Pair = run["seed"] if run.get("division") is None else (run["division"], run["seed"])
            runs.append((row, pair, place / "runs" / f"{row.method}-s{run['seed']}-{run['config_hash'][:8]}"))
        baselines = {pair: folder for row, pair, folder in runs if row.key == table.baseline}
        for row, pair, folder in runs:
            found = {}
            for column in columns:
                if table.why_missing(row, column) is None:  # else such as a figure that is not what the paper's is
                    metric, usual = (one.metrics.get(column.metric, column.metric) for one in (row, reference))
                    value = figure(folder, metric, (baselines[pair], usual) if pair in baselines else None)
                    found[column.key] = None if value is None else column.scale * value
            yield MeasuredRun(row.key, pair, found, columns[0].key, folder)


def _comparisons(table: PaperTable, out: Path) -> Iterator[tuple[Path, Any, tuple[Column, ...]]]:
    """Of every setting that has been carried out: its folder, what is written there, the columns read from it."""
    for columns in table.settings():
        place = out / columns[0].key
        if (place / "comparison.json").exists():
            yield place, read_json(place / "comparison.json"), columns


def asked_of(folder: Path) -> Asked:
    """What a finished table was asked for, as far as its figures depend on it.

    Raises:
        DataError: the folder is none of a table.
    """
    said = read_json(folder / "table.json")
    draws = said["partition_seeds"]
    return Asked(
        seeds=tuple(said["seeds"]),
        partition_seeds=None if draws is None else tuple(draws),
        rounds_scale=said["rounds_scale"],
    )


def assembled(plan: TablePlan, runs: Iterable[MeasuredRun], failed: Mapping[str, str]) -> TableResults:
    """A table from the figures of its runs, in whatever order they come."""
    table, runs = plan.table, tuple(runs)
    values: dict[tuple[str, str], dict[Pair, float | None]] = {}
    for run in runs:
        for read, value in run.figures.items():
            values.setdefault((run.row, read), {})[run.pair] = value
    found = {}
    for row in table.rows:
        for column in table.columns:
            key = row.key, column.key
            own = values.get(key, {})
            reference = {} if row.key == table.baseline else values.get((table.baseline, column.key), {})
            found[key] = Cell(
                row,
                column,
                table.printed.get(key),
                summarise(own),
                paired_difference(own, reference),
                plan.refused.get(key),
            )
    return TableResults(plan, found, failed, runs)


# ---- for people and machines -------------------------------------------------------------------------------------


def write(found: TableResults, directory: Path, drawn: Iterable[Section] = ()) -> Path:
    """Write ``table.md``, ``.csv``, ``.json`` and ``report.html``.

    Args:
        found: a table as it stands. directory: its folder.
        drawn: parts of the page that come first (:mod:`pipelines.papers.drawings`).

    Returns:
        The page.
    """
    shown = paper_tables(found)
    lines = [f"# {title(found)}", "", *lead(found), ""]
    for table in shown:
        lines += markdown_table(table)
    lines += _refusals(found)
    noted = notes(found)
    lines += ["## Notes", "", *(f"- {note}" for note in noted), ""] if noted else []
    rows = records(found)
    document = {
        "id": found.plan.table.id,
        "title": found.plan.table.title,
        "seeds": list(found.plan.asked.seeds),
        "partition_seeds": found.plan.asked.partition_seeds and list(found.plan.asked.partition_seeds),
        "rounds_scale": found.plan.asked.rounds_scale,
        "cells": rows,
        "failed": dict(found.failed),
    }
    contents = {"table.md": "\n".join(lines), "table.csv": csv_text(rows), "table.json": json_text(document)}
    write_texts(contents, directory)
    sections = list(drawn)
    sections += [Section(f"table-{place}", table.title, (Rows(table),)) for place, table in enumerate(shown)]
    settings = [
        Words(_LINK.format(href=f"{setting.name}/report.html", title=", ".join(one.title for one in setting.columns)))
        for setting in found.plan.settings
        if (directory / setting.name / "report.html").exists()
    ]
    if settings:
        sections.append(Section("settings", "Pages of the comparisons", tuple(settings)))
    if found.plan.refused:
        refused = [f"{reason}: {where}" for reason, where in refused_by_reason(found.plan).items()]
        sections.append(Section("refused", "Not run here", (Notes(tuple(refused)),)))
    if noted:
        sections.append(Section("notes", "Notes", (Notes(tuple(noted)),)))
    page = {"kicker": found.plan.table.id, "title": found.plan.table.title}
    return write_page(directory / "report.html", page, " ".join(lead(found)), sections, colours={})


def title(found: TableResults) -> str:
    """The table's id and caption; the budget where it is not the paper's."""
    return f"{found.plan.table.id}: {found.plan.table.title}{budget(found.plan)}"


def budget(plan: TablePlan) -> str:
    """A mark for whatever is measured with other rounds than the paper's; empty at its own budget."""
    scale = plan.asked.rounds_scale
    return "" if scale == 1 else f" (REDUCED BUDGET: {scale:g} of the rounds)"


def lead(found: TableResults) -> list[str]:
    """What the figures are, in sentences."""
    asked = found.plan.asked
    several = "s" if len(asked.partition_seeds or ()) > 1 else ""
    draws = f" on division{several} {listed(asked.partition_seeds)}" if asked.partition_seeds else ""
    printed = sum(1 for _ in cells(found.plan.table))
    measured = f"{found.num_measured} of {printed} printed figures are measured" if printed else "nothing is printed"
    return [
        found.plan.table.about,
        f"Ours are mean ± sample standard deviation over seeds {listed(asked.seeds)}{draws}; {measured}"
        f"{budget(found.plan)}.",
    ]


def paper_tables(found: TableResults, *, measured: bool = False) -> list[Table]:
    """Our figures beside the printed ones, then the differences to the baseline.

    Args:
        found: a table as it stands. measured: leave out rows and columns without a figure of ours.
    """
    table = found.plan.table
    columns = [c for c in table.columns if not measured or any(found.cells[r.key, c.key].ours.n for r in table.rows)]
    rows = [r for r in table.rows if not measured or any(found.cells[r.key, c.key].ours.n for c in columns)]
    names = tables.Column("row", "method", [row.title for row in rows], WORDS)
    figures, differences = [names], [names]
    for column in columns:
        of = [found.cells[row.key, column.key] for row in rows]
        if not any(cell.ours.n or cell.printed for cell in of):
            continue
        beside, here = any(cell.printed for cell in of), any(cell.ours.n for cell in of)
        heading = f"{column.title}, ours" if beside else column.title
        if here:
            figures.append(tables.Column(f"{column.key}_ours", heading, [cell.ours for cell in of], _OURS))
        if beside:  # a column that nobody has run takes no room for figures that are not there
            given, named = [cell.printed for cell in of], "printed" if here else f"{column.title}, printed"
            figures.append(tables.Column(f"{column.key}_printed", named, given, _PRINTED))
        if any(cell.difference.n for cell in of):
            gaps = [cell.difference for cell in of]
            differences.append(tables.Column(column.key, heading, gaps, _DIFFERENCE))
            if beside:
                printed = [_printed_difference(table, row, column) for row in rows]
                differences.append(tables.Column(f"{column.key}_printed", "printed", printed, _GAP))
    shown = [Table(f"{table.title}{budget(found.plan)}", tuple(figures))]
    if len(differences) > 1:
        baseline = table.row(table.baseline).title
        shown.append(Table(f"Difference to {baseline} [95 % interval]{budget(found.plan)}", tuple(differences)))
    return shown


def _printed_difference(table: PaperTable, row: Row, column: Column) -> float | None:
    own, reference = table.printed.get((row.key, column.key)), table.printed.get((table.baseline, column.key))
    if own is None or reference is None or row.key == table.baseline:
        return None
    return own.value - reference.value


def records(found: TableResults) -> list[dict[str, Any]]:
    """A row per cell, for machines; figures in the table's unit."""
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
            "difference": cell.difference.mean,
            "difference_low": cell.difference.low,
            "difference_high": cell.difference.high,
            "refused": cell.refused,
        }
        for cell in found.cells.values()
    ]


def notes(found: TableResults) -> list[str]:
    """What a reader should know, and what failed."""
    failed = [f"Failed: {label}: {reason}" for label, reason in found.failed.items()]
    return [*found.plan.table.notes, *failed]


def _refusals(found: TableResults) -> list[str]:
    if not found.plan.refused:
        return []
    return [
        "## Not run here",
        "",
        *(f"- {reason}: {where}" for reason, where in refused_by_reason(found.plan).items()),
        "",
    ]


def _printed_text(printed: Printed | None) -> str:
    if printed is None:
        return MISSING
    return f"{printed.value:.2f}" + ("" if printed.spread is None else f" ± {printed.spread:.2f}")


_LINK = Markup('<a href="{href}">{title}</a>')
_OURS = Format(partial(format_number, spec=".2f"))
_PRINTED = Format(_printed_text)
_DIFFERENCE = Format(partial(format_number_difference, spec=".2f"))
_GAP = Format(lambda value: MISSING if value is None else f"{value:+.2f}")
