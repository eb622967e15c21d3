"""Figures at the top of a table's page: ours next to the printed ones, and pictures of its runs."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from flcore.config.analyses import without_round
from flcore.core.errors import DataError
from pipelines.papers.catalogue import DIVISION, Column, PaperTable
from pipelines.papers.caveats import panel_caveat
from pipelines.papers.metrics import FORMULA, PREDICTED
from pipelines.papers.results import Cell, TableResults
from pipelines.papers.runs import MeasuredRun
from pipelines.reporting.figures.analyses import CAPTIONS, draw_analysis, heading, subject_of
from pipelines.reporting.figures.cells import draw_partition
from pipelines.reporting.figures.parts import panel
from pipelines.reporting.figures.sets import Drawing, drawing
from pipelines.reporting.figures.style import GRID, INK, MUTED, house_style, method_styles
from pipelines.reporting.page import LEGENDS, Block, Section, panels
from pipelines.reporting.partition_table import load_partition
from pipelines.runs.analyses import load
from pipelines.runs.record import record_of

_ROW, _AROUND, _LINE = 0.26, 0.75, 0.17  # inches: a row; title and axis; the title's second line
_APART = 0.17  # offset of the printed figure below ours, in rows
_OURS = "Filled: ours, mean ± sample standard deviation over runs, with a dot per run."
_PRINTED = "Open: printed, with its ± where one is printed."
_BY_FORMULA = "Open: by the paper's formula, mean over runs."
_LEFT_OUT = "Settings of which nothing has been run are left out."


def sections(results: TableResults) -> Iterator[Section]:
    """Yield the page's sections with figures, if anything was measured."""
    figures = beside_printed(results)
    if figures is not None:
        table = results.plan.table
        printed, by_formula = bool(table.printed), any(formula_of(table, column) for column in table.columns)
        name = "Our figures beside the printed ones" if printed else "Our figures"
        caption = " ".join((_OURS, *([_PRINTED] if printed else []), *([_BY_FORMULA] if by_formula else []), _LEFT_OUT))
        yield Section("figures", name, (panels(name, caption, figures),))
    picture_sections = list(pictures(results))
    if picture_sections:
        yield Section("pictures", "Pictures", ())
        yield from picture_sections


def beside_printed(results: TableResults) -> Drawing | None:
    """Draw a panel per measured column, with its rows from top to bottom; None if nothing was measured."""
    table = results.plan.table
    columns = [
        column
        for column in table.columns
        if column.metric != FORMULA and any(results.cells[row.key, column.key].ours.n for row in table.rows)
    ]
    if not columns:
        return None
    with house_style():
        return drawing("beside-printed", {column.key: _draw_column(results, column) for column in columns})


def formula_of(table: PaperTable, column: Column) -> Column | None:
    """Return the column with the formula for this measured column, from the same runs."""
    same = next(group for group in table.settings() if column in group) if column.metric == PREDICTED else ()
    return next((other for other in same if other.metric == FORMULA), None)


def _draw_column(results: TableResults, column: Column) -> Figure:
    rows, formula = results.plan.table.rows, formula_of(results.plan.table, column)
    caveat = panel_caveat(results.plan, column)
    heading = [column.title, *([caveat] if caveat else [])]
    figure, axes = panel("\n".join(heading), _AROUND + _LINE * (len(heading) - 1) + _ROW * len(rows))
    ours = method_styles(["ours"])["ours"]
    for position, row in enumerate(rows):
        cell: Cell = results.cells[row.key, column.key]
        if cell.ours.mean is not None:
            dots = [value for value in cell.ours.by_seed.values() if value is not None]
            axes.plot(dots, [position] * len(dots), "o", color=ours.colour, markersize=2.2, alpha=0.45)
            axes.errorbar(
                cell.ours.mean, position, xerr=cell.ours.std, fmt="o", color=ours.colour, markersize=5, capsize=2
            )
        if cell.printed is not None:
            axes.errorbar(
                *(cell.printed.value, position + _APART),
                xerr=cell.printed.spread,
                fmt="D",
                color=MUTED,
                markerfacecolor="none",
                markersize=4.2,
                linewidth=0.9,
                capsize=2,
            )
        predicted = results.cells[row.key, formula.key].ours.mean if formula is not None else None
        if predicted is not None:
            axes.plot(predicted, position + _APART, "D", color=MUTED, markerfacecolor="none", markersize=4.2)
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(visible=False, axis="y")
    axes.grid(color=GRID, axis="x")
    return figure


def pictures(results: TableResults) -> Iterator[Section]:
    """Yield the pictures that the table requests, from the first run of every cell."""
    table = results.plan.table
    for columns in table.settings():
        for row in table.rows:
            runs = [run for run in results.runs if (run.row, run.setting) == (row.key, columns[0].key)]
            if runs and table.pictures:
                run = min(runs, key=lambda run: run.pair)
                title = f"{columns[0].title}, {row.title}" if len(table.settings()) > 1 else row.title
                title += f" ({caveat})" if (caveat := panel_caveat(results.plan, columns[0])) else ""
                yield from _of_run(run, title, table.pictures)


def _of_run(run: MeasuredRun, place_title: str, names: tuple[str, ...]) -> Iterator[Section]:
    stored = {analysis.name: analysis for analysis in load(run.folder)}
    for name in names:
        if name == DIVISION:
            title = f"{place_title}: {LEGENDS[name].heading}"
            block = _division(run, title)
        elif name in stored:
            title, analysis = f"{place_title}: {heading(name)}", stored[name]
            if analysis.skipped is not None:
                block = Block("words", f"Left out: {analysis.skipped}.")
            else:
                figure = draw_analysis(analysis, subject_of(record_of(run.folder), name))
                caption = " ".join((CAPTIONS[without_round(name)[0]], *analysis.notes))
                block = panels(title, caption, drawing(f"{run.setting}-{run.row}-{name}", {"": figure}))
        else:
            continue
        yield Section(f"picture-{run.setting}-{run.row}-{name}", title, (block,), level=3)


def _division(run: MeasuredRun, title: str) -> Block:
    """Draw the class counts per client; the partition is an input of the run, stored with its data."""
    try:
        partition = load_partition(run.folder.inputs.partition, run.folder.metrics.get("class_names") or ())
    except DataError as error:
        return Block("words", f"Left out: {error}")
    drawn = drawing(f"{run.setting}-{run.row}-{DIVISION}", {"": draw_partition(partition)})
    return panels(title, LEGENDS[DIVISION].caption, drawn)
