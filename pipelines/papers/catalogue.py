"""A paper's table as data: its setting, rows, columns, and the printed figure of each cell.

One YAML file per table or figure in ``tables/``::

    id: fedpa.table2
    title: Test accuracy
    about: what the printed figure is, in a sentence
    metric: top5_pooled_local          # a key of metrics.json; dotted if nested
    baseline: fedavg                   # the row that differences refer to
    common: {data.name: mnist, ...}    # dotted keys of every cell
    columns:
      mnist_0.1: {title: "MNIST, 0.1", values: {partition.alpha: 0.1}}
      glo: {title: A_glo, metric: tasks.last_epochs.a_glo, values: {...}}     # overrides the table's metric
      sent: {title: Scalars, metric: scalars_up_per_round, scale: 0.001, values: {...}}     # and its unit
    rows:
      fedavg: {title: FedAvg, method: fedavg}
      fedproto: {title: FedProto, method: fedproto, metrics: {top1_global: top1_vote}, values: {...}}
    cells:                             # dotted keys of some cells; no rows or no columns: all of them
      - {rows: [moon], columns: [mnist_0.1], values: {method.mu: 1.0}}
    printed:
      fedavg: {mnist_0.1: [93.33, 1.0], glo: 71.2}     # value, or value and spread, in the table's own unit
    scale: 100                         # factor from a figure of metrics.json to the printed one
    pictures: [tsne, tsne_round_5]     # analyses (or partition) of each cell's first run, shown on the page
    missing:
      - {row: moon, column: mnist_0.1, why: the paper does not say which model}    # row or column is optional
    unlike:                            # cells that are not what the paper compares; claims about them are not judged
      - {row: fedgen, why: the authors' code leaves out a term}
      - {row: fedpa, against: true, why: our defaults}    # a claim may hold, but not fail
    notes: [...]
    beside: another measurement of the table, and how it differs    # for docs/claims.md

A metric is a dotted key of a run's ``metrics.json``. ``timing.<...>``, ``analyses.<name>.<...>``,
``history.<round>.<...>`` and ``rounds_to_target.<...>`` come from its other files, ``formula.mixtures_up`` from a
formula (:func:`pipelines.papers.metrics.figure`).

A cell's configuration merges the common keys, then the column's, the row's and the cell's own. Columns with equal keys
in all of these share their runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BeforeValidator, ConfigDict, StringConstraints
from pydantic.dataclasses import dataclass

from flcore.core.errors import ConfigError

_Entry = TypeVar("_Entry", "Row", "Column")
DIVISION = "partition"  # the picture that every run has: the partition of the data
PAPERS = ("fedpg", "fedcspc", "fedmlp", "fedpa", "gfpl", "protolda")
"""The five papers, and this project's own method, which is judged as they are."""
_OF_A_FILE = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


@dataclass(frozen=True)
class Printed:
    """A printed figure, in the table's unit; ``spread`` is the number after ±."""

    value: float
    spread: float | None = None

    @property
    def text(self) -> str:
        """The figure as a table shows it."""
        return f"{self.value:.2f}" + ("" if self.spread is None else f" ± {self.spread:.2f}")


def _printed(value: Any) -> Any:
    if isinstance(value, Printed):
        return value
    parts = value if isinstance(value, list) else [value]
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, int | float) for part in parts):
        raise ValueError("expected a number, or a number and its spread")
    return Printed(*parts)


@dataclass(frozen=True, config=_OF_A_FILE)
class Row:
    """A method of a table.

    Attributes:
        title: as printed. method: None if it is not implemented; ``missing`` has the reason.
        printed_as: the row of the paper that this one repeats in another reading.
        values: dotted keys. metrics: replacement metrics by a column's metric, such as a vote.
    """

    key: str
    title: str
    method: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    printed_as: str | None = None


@dataclass(frozen=True, config=_OF_A_FILE)
class Column:
    """A setting and its printed figure.

    Attributes:
        title: as printed. metric: of a run. scale: factor from a run's figure to the printed one. values: dotted keys.
        printed_as: the column of the paper that this one repeats in another reading.
    """

    key: str
    title: str
    metric: str
    scale: float = 100.0
    values: Mapping[str, Any] = field(default_factory=dict)
    printed_as: str | None = None


@dataclass(frozen=True, config=_OF_A_FILE)
class Exceptional:
    """Dotted keys of some cells; ``rows`` and ``columns`` are keys, empty for all."""

    values: Mapping[str, Any]
    rows: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()


@dataclass(frozen=True, config=_OF_A_FILE)
class Missing:
    """Why cells cannot be run; without ``row`` or ``column``, for all of them."""

    why: str
    row: str | None = None
    column: str | None = None


@dataclass(frozen=True, config=_OF_A_FILE)
class Unlike(Missing):
    """Why cells are not what the paper compares; ``against``: this excuses failures only."""

    against: bool = False


@dataclass(frozen=True, config=_OF_A_FILE)
class PaperTable:
    """A results table, or a figure with data in it; attributes as in its file, ``printed`` by row and column."""

    id: str
    title: str
    baseline: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    about: str = ""
    common: Mapping[str, Any] = field(default_factory=dict)
    printed: Mapping[tuple[str, str], Annotated[Printed, BeforeValidator(_printed)]] = field(default_factory=dict)
    cells: tuple[Exceptional, ...] = ()
    missing: tuple[Missing, ...] = ()
    unlike: tuple[Unlike, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    beside: Annotated[str, StringConstraints(strip_whitespace=True)] = ""

    @property
    def paper(self) -> str:
        """One of :data:`PAPERS`."""
        return self.id.partition(".")[0]

    def column(self, key: str) -> Column:
        """Return a column by its key."""
        return _named(key, self.columns, f"{self.id}: no column")

    def row(self, key: str) -> Row:
        """Return a row by its key."""
        return _named(key, self.rows, f"{self.id}: no row")

    def values_of(self, row: Row, column: Column) -> dict[str, Any]:
        """Return the dotted keys that a cell's row and ``cells`` add to the column's."""
        values = dict(row.values)
        for one in self.cells:
            if row.key in (one.rows or {row.key}) and column.key in (one.columns or {column.key}):
                values |= one.values
        return values

    def settings(self) -> list[tuple[Column, ...]]:
        """Group the columns that share their runs, in the printed order."""
        groups, of_group = list[list[Column]](), list[list[Mapping[str, Any]]]()
        for column in self.columns:
            values = [column.values, *(self.values_of(row, column) for row in self.rows)]
            if values in of_group:
                groups[of_group.index(values)].append(column)
            else:
                groups.append([column])
                of_group.append(values)
        return [tuple(group) for group in groups]

    def why_missing(self, row: Row, column: Column) -> str | None:
        """Return the file's reason why a cell cannot be run; None if it can."""
        reasons = (m.why for m in self.missing if m.row in (None, row.key) and m.column in (None, column.key))
        return next(reasons, None)

    def unlike_in(self, row: str, column: str) -> list[Unlike]:
        """Return why a cell is not what the paper compares."""
        return [one for one in self.unlike if one.row in (None, row) and one.column in (None, column)]


def name_at(id: str, rounds_scale: float) -> str:
    """Return the folder and file name of a table at a fraction of its rounds."""
    return id + ("" if rounds_scale == 1 else f"-x{rounds_scale:g}")


@cache
def tables() -> Mapping[str, PaperTable]:
    """Return all tables by id, ordered by paper, then as printed."""
    folder = files("pipelines.papers") / "tables"
    parsed = [
        table_of(yaml.safe_load(path.read_text("utf-8")))
        for path in sorted(folder.iterdir(), key=lambda path: path.name)
        if path.name.endswith(".yaml")
    ]
    return {table.id: table for table in sorted(parsed, key=lambda table: PAPERS.index(table.paper))}


def table_named(id: str) -> PaperTable:
    """Return a table."""
    if id not in tables():
        raise ConfigError(f"paper {id}: not known; one of {', '.join(tables())}")
    return tables()[id]


def table_of(values: Mapping[str, Any]) -> PaperTable:
    """Return a table from the content of its file; pydantic's ValidationError if a key is missing or unknown."""
    values_given = {key: value for key, value in values.items() if value is not None}
    shared = {key: values_given.pop(key) for key in ("metric", "scale") if key in values_given}
    rows, printed = values_given.get("rows", {}), values_given.get("printed", {})
    values_given["columns"] = [
        {"key": key, "title": key, **shared, **(entry or {})} for key, entry in values_given.get("columns", {}).items()
    ]
    values_given["rows"] = [{"key": key, "title": key, **(entry or {})} for key, entry in rows.items()]
    values_given["printed"] = {
        (row, column): value for row, entry in printed.items() for column, value in entry.items() if value is not None
    }
    return PaperTable(**{"baseline": next(iter(rows), ""), **values_given})


def _named(key: str, among: Sequence[_Entry], what: str) -> _Entry:
    match = next((one for one in among if one.key == key), None)
    if match is None:
        raise ConfigError(f"{what} {key}; one of {', '.join(one.key for one in among)}")
    return match
