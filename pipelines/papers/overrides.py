"""``--set`` assignments that override a paper table's values: which are allowed, and which change a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flcore.config.schema import Config
from flcore.config.sections import DEFAULT_NAMES
from flcore.core.errors import ConfigError
from flcore.core.text import shorten
from pipelines.papers.catalogue import Column, PaperTable
from pipelines.runs.compared import flatten

ROUNDS = "federation.rounds"
SNAPSHOTS = "evaluation.snapshots"
_DATA = "data.name"


def key_of(assignment: str) -> str:
    """Return the dotted key of ``KEY=VALUE``."""
    return assignment.partition("=")[0].strip()


def check(table: PaperTable, columns: Iterable[Column], assignments: Iterable[str]) -> None:
    """Refuse assignments after which figures are not comparable with the printed ones.

    Raises:
        ConfigError: it sets the rounds, which have an option of their own, or one data set for columns of several.
    """
    of: dict[str, list[str]] = {}
    for column in columns:
        values = {**table.common, **column.values}
        of.setdefault(str(values.get(_DATA, DEFAULT_NAMES["data"])), []).append(column.key)
    for assignment in assignments:
        key = key_of(assignment)
        if key in (ROUNDS, "federation"):
            raise ConfigError(
                f"--set {shorten(assignment)}: the rounds are the table's; --rounds-scale F takes a share of them"
            )
        if key in (_DATA, "data") and len(of) > 1:
            first = next(iter(of.values()))
            raise ConfigError(
                f"--set {shorten(assignment)}: these columns are of {', '.join(of)}; with --columns name those of one "
                f"data set, such as --columns {','.join(first)}"
            )


def effective(
    assignments: Sequence[str], usual: Mapping[str, Config | ConfigError], assigned: Mapping[str, Config | ConfigError]
) -> tuple[str, ...]:
    """Return the assignments that can change a result, unlike the data folder or the number of workers.

    ``usual`` and ``assigned`` are the configurations by row without and with them; the last one wins for each key.
    """
    differing: set[str] = set()
    for row, config in assigned.items():
        identity, usual_identity = _identity(config), _identity(usual[row])
        differing |= {key for key in {*identity, *usual_identity} if identity.get(key) != usual_identity.get(key)}
    last = {key_of(assignment): shorten(assignment.strip()) for assignment in assignments}
    return tuple(text for key, text in last.items() if any(f"{one}.".startswith(f"{key}.") for one in differing))


def _identity(config: Config | ConfigError) -> dict[str, Any]:
    return {} if isinstance(config, ConfigError) else dict(flatten(config.identity()))
