"""The one table: typed columns that know what they mean, how people read them, and how machines do.

Whoever has something to say in rows (a comparison, a sweep) makes a :class:`Table` of values; a terminal, Markdown,
LaTeX and the page show its texts, CSV and JSON its values under the columns' keys. For people accuracies are
percentages with two decimals and a missing value is a dash; files for machines have fractions and null or an empty
cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from flcore.io import files
from flcore.io.files import remove_stale_temp
from pipelines.reporting.formats import (
    MISSING,
    format_byte_difference,
    format_bytes,
    format_count,
    format_difference,
    format_number,
    format_number_difference,
    format_p,
    format_percent,
    format_summary,
)
from pipelines.reporting.statistics import BEST, TIED, PairedDifference, Summary
from pipelines.runs.better import MetricUnit
from pipelines.runs.layout import write_text

TIED_SIGN = "≈"
MARKS_MEAN = (
    f"Bold: best mean of a column. {TIED_SIGN}: not told apart from it, since the 95 % interval of the differences, "
    "seed by seed, contains 0. A row without the seeds of the others is not ranked."
)

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Format:
    """How the values of a column are written.

    Attributes:
        text: of a value, for people.
        fields: of the column's key and a value, for machines: one or more named values.
        is_text: whether the column is words, which stand on the left.
    """

    text: Callable[[Any], str]
    fields: Callable[[str, Any], Mapping[str, Scalar]] = lambda key, value: {key: value}
    is_text: bool = False


def _or_missing(value: object) -> str:
    return MISSING if value is None else str(value)


def _score_fields(key: str, summary: Summary) -> dict[str, Scalar]:
    # The spread over clients is itself a column's name; its mean over seeds must not be taken for one over clients.
    name = f"{key}_over_clients" if key == "client_std" else key
    return {f"{name}_mean": summary.mean, f"{name}_std_over_seeds": summary.std, f"{name}_n": summary.n}


def _difference_fields(key: str, difference: PairedDifference) -> dict[str, Scalar]:
    prefix = f"{key}_paired_difference"
    return {
        f"{prefix}_mean": difference.mean,
        f"{prefix}_std": difference.std,
        f"{prefix}_ci95_low": difference.low,
        f"{prefix}_ci95_high": difference.high,
        f"{prefix}_n": difference.n,
        f"{prefix}_p": difference.p,
        f"{prefix}_p_holm": difference.p_holm,
    }


def of_mean(text: Callable[[float | None], str]) -> Format:
    """A format for summaries of which the mean alone is told."""
    return Format(lambda summary: text(summary.mean), lambda key, summary: {f"{key}_mean": summary.mean})


WORDS = Format(_or_missing, is_text=True)
VALUE = Format(_or_missing)
PERCENT = Format(format_percent)
BYTES = Format(format_bytes)
SCORE = Format(format_summary, _score_fields)
SPREAD = Format(lambda summary: format_percent(summary.mean), _score_fields)
NUMBER_SUMMARY = Format(format_number, _score_fields)


def _tested(text: Callable[[PairedDifference], str]) -> Format:
    """A format of differences with their adjusted p-values."""
    return Format(lambda difference: text(difference) + format_p(difference), _difference_fields)


DIFFERENCE = _tested(format_difference)
DIFFERENCE_FORMATS: Mapping[MetricUnit, Format] = {
    "share": DIFFERENCE,
    "bytes": _tested(format_byte_difference),
    "number": _tested(format_number_difference),
}
SUMMARY_FORMATS: Mapping[MetricUnit, Format] = {
    "share": SCORE,
    "bytes": Format(lambda summary: format_bytes(summary.mean), _score_fields),
    "number": NUMBER_SUMMARY,
}
"""By the unit of a figure."""

MEAN_BYTES, MEAN_COUNT = of_mean(format_bytes), of_mean(format_count)


@dataclass(frozen=True)
class Column:
    """A column: its name in files for machines, its heading and meaning for people, its values and their marks.

    ``instead`` has texts that take the place of a value's in single rows, such as "baseline".
    """

    key: str
    heading: str
    values: Sequence[Any]
    format: Format = VALUE
    meaning: str = ""
    marks: Sequence[str] = ()
    instead: Mapping[int, str] | None = None

    def text(self, row: int) -> str:
        """What people read in a row."""
        return self.instead[row] if self.instead and row in self.instead else self.format.text(self.values[row])

    def mark(self, row: int) -> str:
        """Whether a row is the "best", "tied" with it, or "" (neither)."""
        return self.marks[row] if self.marks else ""


@dataclass(frozen=True)
class Table:
    """Columns of equal length under a title."""

    title: str
    columns: tuple[Column, ...]

    @property
    def size(self) -> int:
        return len(self.columns[0].values)

    @property
    def header(self) -> tuple[str, ...]:
        return tuple(column.heading for column in self.columns)

    @property
    def rows(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Per row its cells, each a text and a mark."""
        return tuple(tuple((column.text(row), column.mark(row)) for column in self.columns) for row in range(self.size))

    @property
    def has_marks(self) -> bool:
        """Whether any cell is marked."""
        return any(any(column.marks) for column in self.columns)


def records(columns: Iterable[Column]) -> list[dict[str, Scalar]]:
    """A row each, as named values for machines; columns of several tables over the same rows may be given."""
    columns = list(columns)
    size = len(columns[0].values) if columns else 0
    return [
        {
            name: value
            for column in columns
            for name, value in column.format.fields(column.key, column.values[row]).items()
        }
        for row in range(size)
    ]


def meanings(tables: Iterable[Table]) -> dict[str, str]:
    """What columns mean, by heading and, for scores, their name in files; headings of one meaning share an entry."""
    by_meaning: dict[str, list[str]] = {}
    for column in (column for table in tables for column in table.columns if column.meaning):
        is_score = column.format in (SCORE, SPREAD) and column.key != column.heading
        name = f"{column.heading} ({column.key})" if is_score else column.heading
        by_meaning.setdefault(column.meaning, []).append(name)
    return {"; ".join(dict.fromkeys(names)): meaning for meaning, names in by_meaning.items()}


# ------------------------------------------------------------------------------------------------------ for people


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print on a terminal; below stands what marks mean, if there are any.

    Cells of a table that is wider than the terminal are folded; nothing is cut.
    """
    tables = list(tables)
    for table in tables:
        # Text, not str: names that people choose may contain what rich takes for its markup.
        console.print(Text(table.title, style="italic"))
        drawn = RichTable()
        for position, column in enumerate(table.columns):
            side: Literal["left", "right"] = "left" if position == 0 or column.format.is_text else "right"
            drawn.add_column(Text(column.heading), justify=side, overflow="fold")
        for row in range(table.size):
            drawn.add_row(*(_styled(column, row) for column in table.columns))
        console.print(drawn)
    if any(table.has_marks for table in tables):
        console.print(Text(MARKS_MEAN, style="dim"))


def _styled(column: Column, row: int) -> Text:
    text, mark = column.text(row), column.mark(row)
    return Text(f"{text} {TIED_SIGN}") if mark == TIED else Text(text, style="bold" if mark == BEST else "")


def markdown_table(table: Table) -> list[str]:
    """The lines of a table in Markdown, with its title and an empty line behind it."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def cell(text: str, mark: str) -> str:
        return f"**{text}**" if mark == BEST else f"{text} {TIED_SIGN}" if mark == TIED else text

    sides = [":---" if position == 0 or c.format.is_text else "---:" for position, c in enumerate(table.columns)]
    rows = (line(cell(text, mark) for text, mark in row) for row in table.rows)
    return [f"## {table.title}", "", line(table.header), line(sides), *rows, ""]


_TEX = {
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


def _tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in text)


def latex_table(table: Table, label: str = "") -> list[str]:
    """The lines of a table for LaTeX with the package booktabs; the best are bold, those tied with them underlined."""

    def cell(text: str, mark: str) -> str:
        command = {BEST: "\\textbf", TIED: "\\underline"}.get(mark)
        return f"{command}{{{_tex(text)}}}" if command else _tex(text)

    sides = "".join("l" if position == 0 or c.format.is_text else "r" for position, c in enumerate(table.columns))
    return [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{_tex(table.title)}}}",
        *([f"  \\label{{tab:{label}}}"] if label else []),
        f"  \\begin{{tabular}}{{{sides}}}",
        r"    \toprule",
        f"    {' & '.join(_tex(heading) for heading in table.header)} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(cell(text, mark) for text, mark in row)} \\\\" for row in table.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        "",
    ]


# ---------------------------------------------------------------------------------------------------- for machines


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV with the columns of all rows; floats are rounded as in JSON, None is an empty cell, like what a row lacks."""
    import pandas as pd  # a third of a second, for which the help of commands does not wait

    frame = pd.DataFrame([{key: _rounded(value) for key, value in row.items()} for row in rows], dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


def json_text(document: Mapping[str, Any]) -> str:
    """JSON with sorted keys and rounded floats, so that the same records give the same bytes."""
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
