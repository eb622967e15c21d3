"""What a paper claims, as data.

A file of ``claims/`` is a list of entries::

    - id: fedpa.best
      says: "{better} is ahead of {than} on {column}"
      where: section V.B, table II
      table: fedpa.table2
      column: [mnist_0.1, mnist_1]
      better: fedpa
      than: [fedavg, fedgen]
      by: 0            # points of the table's unit that it is ahead by, at least; 0 where nothing is said
      lower: false     # whether less of the figure is better

Where ``column``, ``better`` or ``than`` is a list, the entry is a claim for each, whose id has the key at its end
(``fedpa.best.mnist_0.1.fedgen``); braces stand for titles of the table. ``by`` may be a number per column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

from flcore.errors import ConfigError
from pipelines.papers.catalogue import table_named
from pipelines.papers.results import TableResults
from pipelines.reporting.statistics import PairedDifference, paired_difference

_KEYS = ["id", "says", "where", "table", "column", "better", "than", "by", "lower"]
_VARYING = ("column", "better", "than")


@dataclass(frozen=True)
class Claim:
    """That one row is better than another in a column.

    Attributes:
        id: such as ``fedpa.1``. says: in words. where: in the paper.
        table, column, better, than: keys of the catalogue.
        by: the lead that is claimed, in the table's unit. lower: whether less is better.
    """

    id: str
    says: str
    where: str
    table: str
    column: str
    better: str
    than: str
    by: float = 0.0
    lower: bool = False


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, by file and as they stand there.

    Raises:
        ConfigError: a file is not of the form above.
    """
    folder = files("pipelines.papers") / "claims"
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".yaml"):
            found += claims_of(yaml.safe_load(path.read_text("utf-8")), path.name)
    return tuple(found)


def claims_of(entries: Any, place: str) -> list[Claim]:
    """Claims from what their file says.

    Raises:
        ConfigError: a key is missing, unknown, or names what no table has.
    """
    found: list[Claim] = []
    for entry in entries or ():
        here = f"{place}: {entry.get('id', 'a claim') if isinstance(entry, Mapping) else entry}"
        if not isinstance(entry, Mapping) or not {*entry} <= {*_KEYS}:
            raise ConfigError(f"{here}: expected the keys {', '.join(_KEYS)}")
        lacking = [key for key in _KEYS[:-2] if key not in entry]
        if lacking:
            raise ConfigError(f"{here}: {', '.join(lacking)} not given")
        found += _each(entry, here)
    ids = [claim.id for claim in found]
    twice = next((id for id in ids if ids.count(id) > 1), None)
    if twice is not None:
        raise ConfigError(f"{place}: {twice}: two claims have this id")
    return found


def _each(entry: Mapping[str, Any], here: str) -> Iterator[Claim]:
    """The claims of an entry: one per column and pair of rows."""
    table = table_named(entry["table"])
    listed = [entry[key] if isinstance(entry[key], list) else [entry[key]] for key in _VARYING]
    by = entry.get("by", 0.0)
    for chosen in product(*listed):
        column, better, than = table.column(chosen[0]), table.row(chosen[1]), table.row(chosen[2])
        if better == than:
            continue
        lead = by.get(column.key) if isinstance(by, Mapping) else by
        if isinstance(lead, bool) or not isinstance(lead, int | float):
            raise ConfigError(f"{here}: by = {lead}: expected a number for {column.key}")
        suffix = [key for name, key in zip(_VARYING, chosen, strict=True) if isinstance(entry[name], list)]
        yield Claim(
            ".".join([entry["id"], *suffix]),
            entry["says"].format(column=column.title, better=better.title, than=than.title),
            str(entry["where"]),
            table.id,
            column.key,
            better.key,
            than.key,
            float(lead),
            entry.get("lower", False) is True,
        )


def difference_of(claim: Claim, found: TableResults) -> PairedDifference:
    """The lead that a claim is about, by the results of its table: above 0 if it is as claimed, also of costs."""
    better, than = (found.cells[row, claim.column].ours.by_seed for row in (claim.better, claim.than))
    return paired_difference(than, better) if claim.lower else paired_difference(better, than)
