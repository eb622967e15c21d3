"""A paper's claims as data.

A file of ``claims/`` is a list of entries::

    - id: fedpa.best
      says: "{better} is ahead of {than} on {column}"
      where: section V.B, table II
      table: fedpa.table2
      column: [mnist_0.1, mnist_1]
      better: fedpa
      than: [fedavg, fedgen]       # optional; without it the figure itself is claimed to exceed ``by``
      by: 0            # minimum lead, in the table's unit; default 0
      times: 1         # claimed factor: than/better if lower, else better/than
      lower: false     # true: lower figures are better
      than_column: {mnist_0.1: mnist_1}    # the column of than, if not better's
      wider_than: {mnist_0.1: mnist_1}     # the lead exceeds the same rows' lead in this column by ``by``

A list in ``column``, ``better``, ``than`` or ``wider_than`` gives a claim for each item, with the key appended to the
id (``fedpa.best.mnist_0.1.fedgen``); an item ``{mean: [mnist_0.1, mnist_1]}`` is the mean of several. Braces are
replaced by titles of the table. ``by``, ``than_column`` and ``wider_than`` may map columns to values.

The lead of a claim is a weighted sum of cells, one per seed and partition::

    better - than, mean(better) - than, better - 2 than, (better - than) - (better' - than') in another column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

from flcore.core.errors import ConfigError
from pipelines.papers.catalogue import table_named
from pipelines.papers.results import TableResults
from pipelines.reporting.formats import listed
from pipelines.reporting.statistics import PairedDifference, paired_difference

_NEEDED = ("id", "says", "where", "table", "column", "better")
_KEYS = (*_NEEDED, "than", "by", "times", "lower", "than_column", "wider_than")

Keys = tuple[str, ...]
"""Rows or columns to average; usually one."""


@dataclass(frozen=True)
class Claim:
    """One claim of a file, for one column and pair of rows; several keys are averaged."""

    id: str
    says: str
    where: str
    table: str
    column: Keys
    better: Keys
    than: Keys = ()
    by: float = 0.0
    lower: bool = False
    times: float = 1.0
    than_column: Keys = ()
    wider_than: Keys = ()

    @property
    def columns(self) -> Keys:
        """All columns that it needs, without duplicates."""
        return tuple(dict.fromkeys((*self.column, *self.than_column, *self.wider_than)))

    @property
    def weights(self) -> Mapping[tuple[str, str], float]:
        """Weights of the cells by row and column; the weighted sum is the lead, positive also for costs."""
        by_cell: dict[tuple[str, str], float] = {}
        sign, factor_better, factor_than = (-1.0, self.times, 1.0) if self.lower else (1.0, 1.0, self.times)
        terms = [(sign, self.column, self.than_column or self.column)]
        if self.wider_than:
            terms.append((-sign, self.wider_than, self.wider_than))
        for weight, column, than_column in terms:
            for factor, rows, columns in ((factor_better, self.better, column), (-factor_than, self.than, than_column)):
                for cell in product(rows, columns):
                    by_cell[cell] = by_cell.get(cell, 0.0) + weight * factor / (len(rows) * len(columns))
        return by_cell


@cache
def claims() -> tuple[Claim, ...]:
    """Return all claims in file order."""
    folder = files("pipelines.papers") / "claims"
    all_claims = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".yaml"):
            all_claims += claims_of(yaml.safe_load(path.read_text("utf-8")), path.name)
    return tuple(all_claims)


def claims_of(entries: Any, file_name: str) -> list[Claim]:
    """Return the claims of a file's content.

    Raises:
        ConfigError: a key is missing or unknown, or names no row or column of the table.
    """
    parsed: list[Claim] = []
    for entry in entries or ():
        where = f"{file_name}: {entry.get('id', 'a claim') if isinstance(entry, Mapping) else entry}"
        if not isinstance(entry, Mapping) or not {*entry} <= {*_KEYS}:
            raise ConfigError(f"{where}: expected the keys {', '.join(_KEYS)}")
        lacking = [key for key in _NEEDED if key not in entry]
        if lacking:
            raise ConfigError(f"{where}: {', '.join(lacking)} not given")
        if "than" not in entry and "by" not in entry:
            raise ConfigError(f"{where}: neither than nor by is given: what is the figure of better set against?")
        parsed += _each(entry, where)
    ids = [claim.id for claim in parsed]
    twice = next((id for id in ids if ids.count(id) > 1), None)
    if twice is not None:
        raise ConfigError(f"{file_name}: {twice}: two claims have this id")
    return parsed


def _each(entry: Mapping[str, Any], where: str) -> Iterator[Claim]:
    """Yield the claims of an entry: one per column, pair of rows and ``wider_than`` column."""
    table, times = table_named(entry["table"]), entry.get("times", 1.0)
    for column in _choices(entry["column"], where):
        by = _for_column(entry, "by", column, where, 0.0)
        for name, value in (("times", times), ("by", by)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{where}: {name} = {value}: expected a number for {_named(column)}")
        than_column = _one(_for_column(entry, "than_column", column, where), where)
        choices = {name: entry.get(name) for name in ("column", "better", "than")}
        choices["wider_than"] = _for_column(entry, "wider_than", column, where)
        others = [_choices(value, where) for name, value in choices.items() if name != "column"]
        for better, than, wider_than in product(*others):
            if better == than and (than_column or column) == column:
                continue
            rows, columns = {"better": better, "than": than}, {"column": column, "wider_than": wider_than}
            titles = {name: _title([table.row(key).title for key in keys]) for name, keys in rows.items()}
            for name, keys in {**columns, "than_column": than_column}.items():
                titles[name] = _title([table.column(key).title for key in keys])
            chosen = {**rows, **columns}
            suffix = [_named(chosen[name]) for name, value in choices.items() if isinstance(value, list)]
            yield Claim(
                ".".join([entry["id"], *suffix]),
                entry["says"].format(**titles),
                str(entry["where"]),
                table.id,
                column,
                better,
                than,
                float(by),
                entry.get("lower", False) is True,
                float(times),
                than_column,
                wider_than,
            )


def _choices(value: Any, where: str) -> list[Keys]:
    """Return one item per list element; a single key, a mean or None gives one item."""
    return [_one(one, where) for one in value] if isinstance(value, list) else [_one(value, where)]


def _one(value: Any, where: str) -> Keys:
    """Return one key, the keys of a mean, or none."""
    if isinstance(value, Mapping):
        if {*value} != {"mean"} or not isinstance(value["mean"], list) or not value["mean"]:
            raise ConfigError(f"{where}: {dict(value)}: expected mean with a list of keys")
        return tuple(map(str, value["mean"]))
    return () if value is None else (str(value),)


def _for_column(entry: Mapping[str, Any], name: str, column: Keys, where: str, default: Any = None) -> Any:
    """Return an entry's value, or its value for a column."""
    value = entry.get(name, default)
    if not isinstance(value, Mapping) or "mean" in value:
        return value
    if _named(column) not in value:
        raise ConfigError(f"{where}: {name} = {dict(value)}: nothing is said for {_named(column)}")
    return value[_named(column)]


def _named(keys: Keys) -> str:
    return "+".join(keys)


def _title(titles: Sequence[str]) -> str:
    return f"the mean of {listed(titles)}" if len(titles) > 1 else "".join(titles)


def difference_of(claim: Claim, results: TableResults) -> PairedDifference:
    """Return the lead that a claim is about, from its table's results; positive if as claimed, also for costs.

    There is one value per seed, or partition and seed, with figures in all its cells.
    """
    weights = claim.weights
    figures = {cell: results.cells[cell].ours.by_seed for cell in weights}
    leads = {}
    for pair in set.intersection(*({*by_seed} for by_seed in figures.values())):
        values = [(weights[cell], by_seed[pair]) for cell, by_seed in figures.items()]
        known = [weight * value for weight, value in values if value is not None]
        if len(known) == len(values):
            leads[pair] = sum(known)
    return paired_difference(leads, dict.fromkeys(leads, 0.0))
