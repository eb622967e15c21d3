"""The table model: columns of texts for people, printed on a terminal, as Markdown, as LaTeX and on a page.

Accuracies are percentages with two decimals and a missing value is a dash. Files for machines, CSV and JSON, are
written from records instead: fractions, and null or an empty cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from flcore.io import files
from flcore.io.files import remove_stale_temp
from pipelines.reporting.formats import MISSING, format_summary, format_tested
from pipelines.reporting.statistics import BEST, TIED, PairedDifference, Summary, marks
from pipelines.runs.layout import write_text
from pipelines.runs.metrics import direction, heading, meaning, unit

TIED_SIGN = "≈"
MARKS_MEAN = (
    f"Bold: best mean of a column. {TIED_SIGN}: the 95 % interval of the difference to it, paired by seed, contains 0. "
    "Rows with other seeds are not ranked."
)


@dataclass(frozen=True)
class Column:
    """A column: its heading, its values, texts mostly, their meaning and their marks.

    Words are aligned to the left. ``metric`` is its name in files for machines.
    """

    heading: str
    values: Sequence[object]
    is_text: bool = False
    meaning: str = ""
    marks: Sequence[str] = ()
    metric: str = ""

    def text(self, row: int) -> str:
        """Return the text of a cell."""
        value = self.values[row]
        return MISSING if value is None else str(value)

    def mark(self, row: int) -> str:
        """Return whether a row is the "best", "tied" with it, or "" (neither)."""
        return self.marks[row] if self.marks else ""


@dataclass(frozen=True)
class Table:
    """Columns of equal length under a title."""

    title: str
    columns: tuple[Column, ...]

    @property
    def header(self) -> tuple[str, ...]:
        return tuple(column.heading for column in self.columns)

    @property
    def rows(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Per row its cells, each a text and a mark."""
        places = range(len(self.columns[0].values))
        return tuple(tuple((column.text(row), column.mark(row)) for column in self.columns) for row in places)

    @property
    def has_marks(self) -> bool:
        """Return whether any cell is marked."""
        return any(any(column.marks) for column in self.columns)

    def is_left(self, index: int) -> bool:
        """Return whether a column is aligned to the left."""
        return index == 0 or self.columns[index].is_text


def score_column(metric: str, summaries: Sequence[Summary], marked: Sequence[str] | None = None) -> Column:
    """Make a column of a metric's means and spreads; the best are marked, unless other marks are given."""
    if marked is None:
        better = direction(metric)
        marked = marks(summaries, lower_is_better=better == "lower") if better else ()
    texts = [format_summary(summary, unit(metric)) for summary in summaries]
    return Column(heading(metric), texts, meaning=meaning(metric), marks=marked, metric=metric)


def difference_column(
    metric: str, differences: Sequence[PairedDifference], means: str, instead: Mapping[int, str]
) -> Column:
    """Make a column of paired differences with interval and adjusted p; ``instead`` has other texts for single rows."""
    texts = [instead.get(row, format_tested(difference, unit(metric))) for row, difference in enumerate(differences)]
    return Column(f"Δ {heading(metric)}", texts, meaning=means)


def meanings(tables: Iterable[Table]) -> dict[str, str]:
    """Return the meanings of columns by heading and, for metrics, name in files; equal meanings share an entry."""
    by_meaning: dict[str, list[str]] = {}
    for column in (column for table in tables for column in table.columns if column.meaning):
        named = column.metric and column.metric != column.heading
        name = f"{column.heading} ({column.metric})" if named else column.heading
        by_meaning.setdefault(column.meaning, []).append(name)
    return {"; ".join(dict.fromkeys(names)): meaning for meaning, names in by_meaning.items()}


# ------------------------------------------------------------------------------------------------------ for people


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print on a terminal, and the meaning of marks if there are any.

    Cells of a table that is wider than the terminal are folded; nothing is cut.
    """
    tables = list(tables)
    for table in tables:
        # Text, not str: names that people choose may contain what rich takes for its markup.
        console.print(Text(table.title, style="italic"))
        drawn = RichTable()
        for index, name in enumerate(table.header):
            side: Literal["left", "right"] = "left" if table.is_left(index) else "right"
            drawn.add_column(Text(name), justify=side, overflow="fold")
        for row in table.rows:
            drawn.add_row(*(_styled(text, mark) for text, mark in row))
        console.print(drawn)
    if any(table.has_marks for table in tables):
        console.print(Text(MARKS_MEAN, style="dim"))


def _styled(text: str, mark: str) -> Text:
    return Text(f"{text} {TIED_SIGN}") if mark == TIED else Text(text, style="bold" if mark == BEST else "")


def markdown_table(table: Table) -> list[str]:
    """Return the lines of a table in Markdown, with its title and a final empty line."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def cell(text: str, mark: str) -> str:
        return f"**{text}**" if mark == BEST else f"{text} {TIED_SIGN}" if mark == TIED else text

    sides = [":---" if table.is_left(index) else "---:" for index in range(len(table.columns))]
    rows = (line(cell(text, mark) for text, mark in row) for row in table.rows)
    return [f"## {table.title}", "", line(table.header), line(sides), *rows, ""]


_TEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "[": "{[}",  # behind the end of a row it would open an argument
        "]": "{]}",
        "±": r"$\pm$",
        "\u2212": "$-$",
        "\u2013": "--",
        "Δ": r"$\Delta$",
        TIED_SIGN: r"$\approx$",
        "\N{NARROW NO-BREAK SPACE}": r"\,",
        "✓": r"$\checkmark$",  # amssymb
        "✗": r"$\times$",
    }
)


def latex_table(table: Table, label: str = "") -> list[str]:
    """Return the lines of a table for LaTeX with booktabs; the best cells are bold, tied ones underlined."""

    def cell(text: str, mark: str) -> str:
        command = {BEST: "\\textbf", TIED: "\\underline"}.get(mark)
        return f"{command}{{{text.translate(_TEX)}}}" if command else text.translate(_TEX)

    sides = "".join("l" if table.is_left(index) else "r" for index in range(len(table.columns)))
    return [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{table.title.translate(_TEX)}}}",
        *([f"  \\label{{tab:{label}}}"] if label else []),
        f"  \\begin{{tabular}}{{{sides}}}",
        r"    \toprule",
        f"    {' & '.join(name.translate(_TEX) for name in table.header)} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(cell(text, mark) for text, mark in row)} \\\\" for row in table.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        "",
    ]


# ---------------------------------------------------------------------------------------------------- for machines


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV with the columns of all rows; floats are rounded as in JSON, None and missing values are empty."""
    import pandas as pd  # a third of a second, for which the help of commands does not wait

    frame = pd.DataFrame([{key: _rounded(value) for key, value in row.items()} for row in rows], dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


def json_text(document: Mapping[str, Any]) -> str:
    """Return JSON with sorted keys and rounded floats, so the same records give the same bytes."""
    return files.json_text(_rounded(dict(document)), indent=1) + "\n"


def _rounded(value: Any) -> Any:
    """Round floats to 12 decimals: far below any meaning, and the last bits of a mean may differ between machines."""
    if isinstance(value, float):
        return round(value, 12)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def write_texts(contents: Mapping[str, str], directory: Path) -> tuple[Path, ...]:
    """Write files by name into a folder, which is made if it is not there; returns their paths."""
    remove_stale_temp(directory)
    for name, text in contents.items():
        write_text(directory / name, text)
    return tuple(directory / name for name in contents)
