"""A paper's table as data: its setting, rows, columns, and what is printed in each cell.

One YAML file per table or figure in ``tables/``, of this form::

    id: fedpa.table2
    title: Test accuracy
    about: what the printed figure is, in a sentence
    metric: top5_pooled_local          # of metrics.json, dotted where it is nested
    baseline: fedavg                   # the row that differences are taken to
    common: {data.name: mnist, ...}    # dotted keys of every cell
    columns:
      mnist_0.1: {title: "MNIST, 0.1", values: {partition.alpha: 0.1}}
      glo: {title: A_glo, metric: tasks.last_epochs.a_glo, values: {...}}     # another metric than the table's
      sent: {title: Scalars, metric: scalars_up_per_round, scale: 0.001, values: {...}}     # and another unit
    rows:
      fedavg: {title: FedAvg, method: fedavg}
      fedproto: {title: FedProto, method: fedproto, metrics: {top1_global: top1_vote}, values: {...}}
    cells:                             # dotted keys of some cells; either list may be left out, and then means all
      - {rows: [moon], columns: [mnist_0.1], values: {method.mu: 1.0}}
    printed:
      fedavg: {mnist_0.1: [93.33, 1.0], glo: 71.2}     # value, or value and spread, in the table's own unit
    scale: 100                         # what a figure of metrics.json is multiplied with to be set beside it
    pictures: [tsne, tsne_round_5]     # of each cell's first run, on the table's page: its analyses, or partition
    missing:
      - {row: moon, column: mnist_0.1, why: the paper does not say which model}    # either may be left out
    notes: [...]
    beside: what somebody else measured of it, and by what the two differ    # for docs/claims.md

A metric is a dotted name of a run's ``metrics.json``; ``timing.<...>``, ``analyses.<name>.<...>``,
``history.<round>.<...>`` and ``rounds_to_target.<...>`` are read from its other files, and ``formula.<name>`` is what a
formula says of it (:func:`pipelines.papers.figures_of_a_run.figure`).

A cell's configuration is the common keys, then the column's, then the row's, then the cell's own. Columns of which all
these are the same are read from the same runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import yaml

from flcore.config.analyses import SUMMARIES, without_round
from flcore.core.errors import ConfigError
from flcore.methods import METHODS
from pipelines.papers.yaml_checks import mapping, needed, number, only

_Entry = TypeVar("_Entry", "Row", "Column")
DIVISION = "partition"  # the picture that every run has: who holds what
PAPERS = ("fedpg", "fedcspc", "fedmlp", "fedpa", "gfpl")


@dataclass(frozen=True)
class Printed:
    """A printed figure, in the table's unit; ``spread`` is what stands after ±, None where nothing does."""

    value: float
    spread: float | None = None


@dataclass(frozen=True)
class Row:
    """A method as a table has it.

    Attributes:
        key: in the file. title: as printed. method: here; None where it is not built, for which a reason is given.
        values: dotted keys that are its own.
        metrics: which figure stands for a column's, such as a vote for a global model.
    """

    key: str
    title: str
    method: str | None
    values: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A setting, and the figure of it that is printed.

    Attributes:
        key: in the file. title: as printed. values: dotted keys.
        metric: of a run. scale: factor from a run's figure to the printed one.
    """

    key: str
    title: str
    values: Mapping[str, Any]
    metric: str
    scale: float = 100.0


@dataclass(frozen=True)
class Exceptional:
    """Dotted keys that only some cells have; ``rows`` and ``columns`` are keys, empty for all."""

    rows: frozenset[str]
    columns: frozenset[str]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class PaperTable:
    """A results table or a figure with data in it.

    Attributes:
        id: such as ``fedpa.table2``. title: its caption, shortened. about: what the figures are.
        baseline: row that differences are taken to.
        common: dotted keys of every cell.
        columns, rows: in the printed order.
        printed: by row and column; what is not printed is not there.
        exceptions: what some cells have of their own, later ones above earlier ones.
        missing: by row and column, None for all, why cells cannot be run.
        notes: what a reader of the figures should know.
        pictures: of every cell's first run, on the page: analyses (``NAME_round_N`` too), :data:`DIVISION`.
        beside: what the independent run of the method's specification gave, and by what it differs; empty: nothing.
    """

    id: str
    title: str
    about: str
    baseline: str
    common: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    printed: Mapping[tuple[str, str], Printed]
    exceptions: tuple[Exceptional, ...] = ()
    missing: tuple[tuple[str | None, str | None, str], ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    beside: str = ""

    @property
    def paper(self) -> str:
        """Which of :data:`PAPERS`."""
        return self.id.partition(".")[0]

    def column(self, key: str) -> Column:
        """A column by its key.

        Raises:
            ConfigError: there is none.
        """
        return _named(key, self.columns, f"{self.id}: no column")

    def row(self, key: str) -> Row:
        """A row by its key.

        Raises:
            ConfigError: there is none.
        """
        return _named(key, self.rows, f"{self.id}: no row")

    def values_of(self, row: Row, column: Column) -> dict[str, Any]:
        """Dotted keys of a cell that are not those of all rows of its column."""
        found = dict(row.values)
        for one in self.exceptions:
            if row.key in (one.rows or {row.key}) and column.key in (one.columns or {column.key}):
                found |= one.values
        return found

    def settings(self) -> list[tuple[Column, ...]]:
        """Columns by the runs that they are read from, in the printed order."""
        groups: list[list[Column]] = []
        for column in self.columns:
            same = next((group for group in groups if self._same_runs(group[0], column)), None)
            if same is None:
                groups.append([column])
            else:
                same.append(column)
        return [tuple(group) for group in groups]

    def _same_runs(self, one: Column, other: Column) -> bool:
        return one.values == other.values and all(
            self.values_of(row, one) == self.values_of(row, other) for row in self.rows
        )

    def why_missing(self, row: Row, column: Column) -> str | None:
        """Why a cell cannot be run, as its file says; None where it says nothing."""
        said = (why for r, c, why in self.missing if r in (None, row.key) and c in (None, column.key))
        return next(said, None)


@cache
def tables() -> Mapping[str, PaperTable]:
    """All tables by id, by paper and then as printed.

    Raises:
        ConfigError: a file is not of the form above; names it and the key.
    """
    folder = files("pipelines.papers") / "tables"
    found = [
        table_of(yaml.safe_load(path.read_text("utf-8")), path.name)
        for path in sorted(folder.iterdir(), key=lambda path: path.name)
        if path.name.endswith(".yaml")
    ]
    return {table.id: table for table in sorted(found, key=lambda table: PAPERS.index(table.paper))}


def table_named(id: str) -> PaperTable:
    """A table.

    Raises:
        ConfigError: there is none of this id; says which there are.
    """
    if id not in tables():
        raise ConfigError(f"paper {id}: not known; one of {', '.join(tables())}")
    return tables()[id]


def table_of(values: Any, place: str) -> PaperTable:
    """A table from what its file says.

    Args:
        values: of the file. place: for messages.

    Raises:
        ConfigError: a key is missing, unknown or does not fit the others.
    """
    given = mapping(values, place)
    only(given, place, _TABLE)
    id = str(needed(given, "id", place))
    if id.partition(".")[0] not in PAPERS:
        raise ConfigError(f"{place}: id = {id}: must begin with one of {', '.join(PAPERS)}")
    metric = str(given.get("metric", ""))
    scale = number(given.get("scale", 100.0), f"{place}: scale")
    columns = tuple(
        _column(key, own, metric, scale, f"{place}: columns.{key}")
        for key, own in mapping(needed(given, "columns", place), f"{place}: columns").items()
    )
    rows = tuple(
        _row(key, own, f"{place}: rows.{key}")
        for key, own in mapping(needed(given, "rows", place), f"{place}: rows").items()
    )
    baseline = str(given.get("baseline", rows[0].key))
    known_rows, known_columns = {row.key for row in rows}, {column.key for column in columns}
    if baseline not in known_rows:
        raise ConfigError(f"{place}: baseline = {baseline}: is no row")
    printed = {}
    for row, cells in mapping(given.get("printed") or {}, f"{place}: printed").items():
        for column, value in mapping(cells, f"{place}: printed.{row}").items():
            if row not in known_rows or column not in known_columns:
                raise ConfigError(f"{place}: printed.{row}.{column}: no such row or column")
            if value is not None:
                printed[row, column] = _printed(value, f"{place}: printed.{row}.{column}")
    exceptions = tuple(_exceptional(one, known_rows, known_columns, place) for one in given.get("cells") or ())
    for place_of, values in (
        *((f"rows.{row.key}", row.values) for row in rows),
        *(("cells", one.values) for one in exceptions if one.rows),
    ):
        for name in values:
            if name.startswith(("data.", "partition.")):
                raise ConfigError(f"{place}: {place_of}: {name}: all rows of a column have the same; set it there")
    missing = tuple(_missing(entry, known_rows, known_columns, place) for entry in given.get("missing") or ())
    pictures = tuple(map(str, given.get("pictures") or ()))
    for name in pictures:
        if name != DIVISION and without_round(name)[0] not in SUMMARIES:
            raise ConfigError(
                f"{place}: pictures: {name}: expected {DIVISION}, {', '.join(SUMMARIES)}, or NAME_round_N"
            )
    return PaperTable(
        id,
        str(needed(given, "title", place)),
        str(given.get("about", "")),
        baseline,
        mapping(given.get("common") or {}, f"{place}: common"),
        columns,
        rows,
        printed,
        exceptions,
        missing,
        tuple(map(str, given.get("notes") or ())),
        pictures,
        str(given.get("beside") or "").strip(),
    )


_TABLE = (
    *("id", "title", "about", "metric", "baseline", "common", "columns", "rows"),
    *("cells", "printed", "scale", "missing", "notes", "pictures", "beside"),
)


def _column(key: str, own: Any, metric: str, scale: float, place: str) -> Column:
    given = mapping(own, place)
    only(given, place, ["title", "values", "metric", "scale"])
    asked = str(given.get("metric", metric))
    if not asked:
        raise ConfigError(f"{place}: has no metric, and the table has none")
    values = mapping(given.get("values") or {}, f"{place}.values")
    own_scale = number(given.get("scale", scale), f"{place}.scale")
    return Column(key, str(given.get("title", key)), values, asked, own_scale)


def _row(key: str, own: Any, place: str) -> Row:
    given = mapping(own, place)
    only(given, place, ["title", "method", "values", "metrics"])
    method = given.get("method")
    if method is not None and method not in METHODS:
        raise ConfigError(f"{place}: method = {method}: is not known")
    if key in METHODS and method is not None and key != method:
        raise ConfigError(f"{place}: is the name of another method than {method}; choose another key")
    values, metrics = (mapping(given.get(name) or {}, f"{place}.{name}") for name in ("values", "metrics"))
    return Row(key, str(given.get("title", key)), method, values, metrics)


def _printed(value: Any, place: str) -> Printed:
    parts = value if isinstance(value, list) else [value]
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, int | float) for part in parts):
        raise ConfigError(f"{place} = {value}: expected a number, or a number and its spread")
    return Printed(*map(float, parts))


def _exceptional(entry: Any, rows: set[str], columns: set[str], place: str) -> Exceptional:
    given = mapping(entry, f"{place}: cells")
    only(given, f"{place}: cells", ["rows", "columns", "values"])
    whose = [frozenset(map(str, given.get(name) or ())) for name in ("rows", "columns")]
    for unknown in (whose[0] - rows) | (whose[1] - columns):
        raise ConfigError(f"{place}: cells: {unknown}: no such row or column")
    return Exceptional(whose[0], whose[1], mapping(needed(given, "values", f"{place}: cells"), f"{place}: cells"))


def _missing(entry: Any, rows: set[str], columns: set[str], place: str) -> tuple[str | None, str | None, str]:
    given = mapping(entry, f"{place}: missing")
    only(given, f"{place}: missing", ["row", "column", "why"])
    row, column = given.get("row"), given.get("column")
    if (row is not None and row not in rows) or (column is not None and column not in columns):
        raise ConfigError(f"{place}: missing: no row {row} or column {column}")
    return row, column, str(needed(given, "why", f"{place}: missing"))


def _named(key: str, among: Sequence[_Entry], what: str) -> _Entry:
    found = next((one for one in among if one.key == key), None)
    if found is None:
        raise ConfigError(f"{what} {key}; one of {', '.join(one.key for one in among)}")
    return found
