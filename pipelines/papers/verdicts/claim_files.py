"""The papers' sentences as data, each with the leads that are its evidence.

A file of ``claims/`` lists sentences of a paper's abstract, contributions and conclusion::

    - id: fedpa.best
      says: it is ahead of its rivals on most data sets
      where: conclusion
      holds_if: most           # of its pairs hold: all (default), or most
      flags: [rivals untuned]  # why a verdict might be due to this project
      takes: 8 core-hours      # to decide it
      in_print: 1.4 and 1.5    # the figures of the paper that contradict it, where no table has them
      pairs:
        - table: fedpa.table2
          column: [mnist_0.1, mnist_1]
          better: fedpa
          than: [fedavg, fedgen]       # optional; without it the figure itself is claimed to exceed ``by``
          says: "{better} leads {than} on {column}"  # optional
          by: 0            # minimum lead, in the table's unit; default 0
          times: 1         # claimed factor: than/better if lower, else better/than
          lower: false     # true: lower figures are better
          than_column: {mnist_0.1: mnist_1}    # the column of than, if not better's
          wider_than: {mnist_0.1: mnist_1}     # the lead exceeds the same rows' lead in this column by ``by``
      stand_in: [...]      # pairs of a smaller setting, which decide where ``pairs`` do not

A list in ``column``, ``better``, ``than`` or ``wider_than`` gives a lead for each item; an item
``{mean: [mnist_0.1, mnist_1]}`` is the mean of several. Braces are replaced by titles of the table. ``by``,
``than_column`` and ``wider_than`` may map columns to values.

A lead is a weighted sum of cells, one per seed and partition::

    better - than, mean(better) - than, better - 2 than, (better - than) - (better' - than') in another column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, Literal

import yaml

from flcore.core.errors import ConfigError
from pipelines.papers.catalogue import PAPERS, PaperTable, table_named
from pipelines.papers.results import TableResults
from pipelines.reporting.formats import listed
from pipelines.reporting.statistics import PairedDifference, paired_difference

_NEEDED = ("table", "column", "better")
_KEYS = (*_NEEDED, "than", "says", "by", "times", "lower", "than_column", "wider_than")
_OF_A_SENTENCE = ("id", "says", "where", "holds_if", "flags", "takes", "in_print", "pairs", "stand_in")

Keys = tuple[str, ...]
"""Rows or columns to average; usually one."""


@dataclass(frozen=True)
class Lead:
    """A claimed lead in one column, of one row over another; several keys are averaged."""

    id: str
    says: str
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

    @property
    def printed(self) -> float | None:
        """The lead in the paper's own table; None if a figure is not printed."""
        table = table_named(self.table)
        places = [(table.row(row), table.column(column)) for row, column in self.weights]
        values = [table.printed.get((row.printed_as or row.key, at.printed_as or at.key)) for row, at in places]
        if None in values:
            return None
        return round(sum(w * one.value for w, one in zip(self.weights.values(), values, strict=True) if one), 6)


@dataclass(frozen=True)
class Sentence:
    """A sentence of a paper; attributes as in its file."""

    id: str
    says: str
    where: str
    pairs: tuple[Lead, ...] = ()
    stand_in: tuple[Lead, ...] = ()
    holds_if: Literal["all", "most"] = "all"
    flags: Keys = ()
    takes: str = ""
    in_print: str = ""

    @property
    def paper(self) -> str:
        """One of :data:`pipelines.papers.catalogue.PAPERS`."""
        return self.id.partition(".")[0]

    def needed(self, pairs: int) -> int:
        """Return how many of a number of pairs must hold."""
        return pairs if self.holds_if == "all" else pairs // 2 + 1


@cache
def sentences() -> tuple[Sentence, ...]:
    """Return all sentences by paper, in file order."""
    folder = files("pipelines.papers") / "claims"
    names = [f"{paper}.yaml" for paper in PAPERS]
    return tuple(
        one for name in names for one in sentences_of(yaml.safe_load((folder / name).read_text("utf-8")), name)
    )


def sentences_of(entries: Any, file_name: str) -> list[Sentence]:
    """Return the sentences of a file's content.

    Raises:
        ConfigError: a key is missing or unknown, or names no row or column of the table.
    """
    parsed: list[Sentence] = []
    for entry in entries or ():
        where = f"{file_name}: {entry.get('id', 'a sentence') if isinstance(entry, Mapping) else entry}"
        _check(entry, _OF_A_SENTENCE[:3], _OF_A_SENTENCE, where)
        if entry.get("holds_if", "all") not in ("all", "most"):
            raise ConfigError(f"{where}: holds_if = {entry['holds_if']}: expected all or most")
        leads = {key: tuple(_leads(entry.get(key, ()), entry["id"], where)) for key in ("pairs", "stand_in")}
        parsed.append(Sentence(**{**entry, **leads, "flags": tuple(entry.get("flags", ()))}))
        if any(one.id == parsed[-1].id for one in parsed[:-1]):
            raise ConfigError(f"{where}: two sentences have this id")
    return parsed


def _leads(entries: Sequence[Any], id: str, where: str) -> Iterator[Lead]:
    for entry in entries:
        _check(entry, _NEEDED, _KEYS, where)
        if "than" not in entry and "by" not in entry:
            raise ConfigError(f"{where}: neither than nor by is given: what is the figure of better set against?")
        yield from _each(entry, id, where)


def _check(entry: Any, needed: Sequence[str], known: Sequence[str], where: str) -> None:
    if not isinstance(entry, Mapping) or not {*entry} <= {*known}:
        raise ConfigError(f"{where}: expected the keys {', '.join(known)}")
    if lacking := [key for key in needed if key not in entry]:
        raise ConfigError(f"{where}: {', '.join(lacking)} not given")


def _each(entry: Mapping[str, Any], id: str, where: str) -> Iterator[Lead]:
    """Yield the leads of an entry: one per column, pair of rows and ``wider_than`` column."""
    table, times = table_named(entry["table"]), entry.get("times", 1.0)
    part = table.id.removeprefix(f"{table.paper}.")
    for column in _choices(entry["column"], where):
        by = _for_column(entry, "by", column, where, 0.0)
        for name, value in (("times", times), ("by", by)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{where}: {name} = {value}: expected a number for {_named(column)}")
        than_column = _one(_for_column(entry, "than_column", column, where), where)
        choices = (entry["better"], entry.get("than"), _for_column(entry, "wider_than", column, where))
        for better, than, wider_than in product(*(_choices(value, where) for value in choices)):
            if better == than and (than_column or column) == column:
                continue
            lead = Lead(
                ".".join(_named(keys) for keys in ((id,), (part,), column, better, than, wider_than) if keys),
                "",
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
            yield _with_words(lead, table, entry.get("says"))


def _with_words(lead: Lead, table: PaperTable, says: str | None) -> Lead:
    """Return a lead in words: the words of the file, or the usual ones."""
    names = ("better", "than"), ("column", "than_column", "wider_than")
    titles = {name: _title([table.row(key).title for key in getattr(lead, name)]) for name in names[0]}
    titles |= {name: _title([table.column(key).title for key in getattr(lead, name)]) for name in names[1]}
    if says is None:
        ahead = "has less than" if lead.lower else "is ahead of"
        by = f" by {lead.by:g}" if lead.by else ""
        says = f"{{better}} {ahead} {{than}}{by}, {{column}}" + (
            ", more than on {wider_than}" if lead.wider_than else ""
        )
    return replace(lead, says=says.format(**titles))


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


def difference_of(lead: Lead, results: TableResults) -> PairedDifference:
    """Return a measured lead, from its table's results; positive if as claimed, also for costs. p is of ``by``.

    There is one value per seed, or partition and seed, with figures in all its cells.
    """
    weights = lead.weights
    figures = {cell: results.cells[cell].ours.by_seed for cell in weights}
    leads = {}
    for pair in set.intersection(*({*by_seed} for by_seed in figures.values())):
        values = [(weights[cell], by_seed[pair]) for cell, by_seed in figures.items()]
        known = [weight * value for weight, value in values if value is not None]
        if len(known) == len(values):
            leads[pair] = sum(known)
    return paired_difference(leads, dict.fromkeys(leads, 0.0), null=lead.by)
