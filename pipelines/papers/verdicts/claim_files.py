"""The papers' sentences as data, each with the leads that are its evidence.

A file of ``claims/`` lists sentences of a paper's abstract, contributions and conclusion::

    - id: fedpa.best
      says: it is ahead of its rivals on most data sets
      where: conclusion
      holds_if: most           # of its pairs hold: all (default), or most
      flags: {rivals untuned, few data sets: MNIST}    # why a verdict might be due to us, with details
      takes: 8 core-hours      # to decide it
      late: true               # declared when its figures were known: its pairs change no other pair's p
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
      stand_in: [...]      # pairs of a smaller setting, which decide where ``pairs`` do not, or are not there

An id that begins with another one and an underscore, ``fedpa.best_tuned``, is another reading of that sentence; its
pairs change no other pair's p, either.

A list in ``column``, ``better``, ``than`` or ``wider_than`` gives a lead for each item; an item
``{mean: [mnist_0.1, mnist_1]}`` is the mean of several. Braces are replaced by titles of the table. ``by``,
``than_column`` and ``wider_than`` may map columns to values.

A lead is a weighted sum of cells, one per seed and partition::

    better - than, mean(better) - than, better - 2 than, (better - than) - (better' - than') in another column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

Keys = tuple[str, ...]
"""Rows or columns to average; usually one."""
FLAGS = {
    "rivals untuned": "all at one rate, or at each paper's own",
    "rivals differ": "from the paper's",
    "few data sets": "fewer than the sentence covers",
    "our reading": "of what the paper leaves open, or a margin of ours",
    "our defaults": "in place of the authors' values",
    "authors' values": "from their code, with its own deviations from the paper",
    "tuned": "on validation images",
    "small budget": "fewer rounds or steps, or a smaller network",
    "random start": "where the paper's network is pretrained",
    "baseline not as printed": "so the printed lead cannot appear",
    "other measure": "than the sentence speaks of",
    "rounds chosen on test": "as the paper does",
    "test error": "a lead that other test images may turn",
    "divisions added": "when the first were known",
    "in print": "what the paper's own figures say of it",
    "our own method": "judged by ourselves",
}
"""Why a verdict might be due to this project, in a few words, with what they mean."""


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
    flags: Mapping[str, str] = field(default_factory=dict)
    takes: str = ""
    late: bool = False
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
    contents = (yaml.safe_load((folder / f"{paper}.yaml").read_text("utf-8")) for paper in PAPERS)
    return tuple(one for content in contents for one in sentences_of(content))


def sentences_of(entries: Iterable[Mapping[str, Any]]) -> list[Sentence]:
    """Return the sentences of a file's content.

    Raises:
        TypeError: a key is missing or unknown. ConfigError: one names no row or column, or an unknown flag.
    """
    parsed = []
    for entry in entries:
        leads = {
            key: tuple(lead for pair in entry.get(key, ()) for lead in _leads(entry["id"], **pair))
            for key in ("pairs", "stand_in")
        }
        flags = {key: detail or "" for key, detail in entry.get("flags", {}).items()}
        if unknown := [key for key in flags if key not in FLAGS]:
            raise ConfigError(f"{entry['id']}: flags has {listed(unknown)}; the flags are {listed(FLAGS)}")
        parsed.append(Sentence(**{**entry, **leads, "flags": flags}))
    return parsed


def _leads(
    id: str,
    *,
    table: str,
    column: Any,
    better: Any,
    than: Any = None,
    says: str | None = None,
    by: Any = 0.0,
    times: float = 1.0,
    lower: bool = False,
    than_column: Any = None,
    wider_than: Any = None,
) -> Iterator[Lead]:
    """Yield the leads of a pair of the file: one per column, two rows and ``wider_than`` column."""
    of = table_named(table)
    part = of.id.removeprefix(f"{of.paper}.")
    for at in _choices(column):
        other = _keys(_for_column(than_column, at))
        for one, rival, wider in product(_choices(better), _choices(than), _choices(_for_column(wider_than, at))):
            if one == rival and (other or at) == at:
                continue
            name = ".".join("+".join(keys) for keys in ((id,), (part,), at, one, rival, wider) if keys)
            lead_by = float(_for_column(by, at))
            yield _with_words(
                Lead(name, "", table, at, one, rival, lead_by, lower, float(times), other, wider), of, says
            )


def _with_words(lead: Lead, table: PaperTable, says: str | None) -> Lead:
    """Return a lead in words: the words of the file, or the usual ones."""
    names = ("better", "than"), ("column", "than_column", "wider_than")
    titles = {name: _title([table.row(key).title for key in getattr(lead, name)]) for name in names[0]}
    titles |= {name: _title([table.column(key).title for key in getattr(lead, name)]) for name in names[1]}
    if says is None:
        factor = "" if lead.times == 1 else f" 1/{lead.times:g} of" if lead.lower else f" {lead.times:g} times"
        ahead = f"has less than{factor}" if lead.lower else f"is ahead of{factor}"
        by = f" by {lead.by:g}" if lead.by else ""
        says = f"{{better}} {ahead} {{than}}{by}, {{column}}" + (
            ", more than on {wider_than}" if lead.wider_than else ""
        )
    return replace(lead, says=says.format(**titles))


def _choices(value: Any) -> list[Keys]:
    """Return one item per list element; a single key, a mean or None gives one item."""
    return [_keys(one) for one in value] if isinstance(value, list) else [_keys(value)]


def _keys(value: Any) -> Keys:
    """Return one key, the keys of a mean, or none."""
    if isinstance(value, Mapping):
        return tuple(map(str, value["mean"]))
    return () if value is None else (str(value),)


def _for_column(value: Any, column: Keys) -> Any:
    """Return a value of the file, or its value for a column."""
    return value["+".join(column)] if isinstance(value, Mapping) and "mean" not in value else value


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
