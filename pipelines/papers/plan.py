"""From a paper's table to comparisons: which cells can be run here, by which runs, and about how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flcore.config import Config
from flcore.errors import ConfigError, DataError
from pipelines.config.params import override, with_values
from pipelines.execution.bodies import comparison_runs
from pipelines.papers.catalogue import Column, PaperTable, Row
from pipelines.runs.cache import Cache, kind_of


@dataclass(frozen=True)
class Asked:
    """What is wanted of a table.

    Attributes:
        rows, columns: their keys; None: all.
        seeds: of every cell. partition_seeds: of its divisions, each with every seed; None: as the table has it.
        rounds_scale: the printed rounds times this; 1 is the paper's budget.
        assignments: ``KEY=VALUE`` for all cells, such as where data lie.
        max_hours: of one run; longer ones are refused. None: any.
    """

    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    partition_seeds: tuple[int, ...] | None = None
    rounds_scale: float = 1.0
    assignments: tuple[str, ...] = ()
    max_hours: float | None = None


@dataclass(frozen=True)
class Setting:
    """Columns that are read from the same runs.

    Attributes:
        columns: of the table. parameters: of the comparison. rows: that can be run.
        seconds: of training that all its runs take on one core, as earlier runs or a trial step say; None: unknown.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    parameters: Mapping[str, Any]
    seconds: float | None = None

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.columns[0].key


@dataclass(frozen=True)
class TablePlan:
    """What of a table is run.

    Attributes:
        table: planned. asked: how. settings: the comparisons.
        refused: by row and column, why a cell is not run.
    """

    table: PaperTable
    asked: Asked
    settings: tuple[Setting, ...]
    refused: Mapping[tuple[str, str], str]

    @property
    def seconds(self) -> float | None:
        """Of all runs on one core, as far as it is known."""
        known = [setting.seconds for setting in self.settings if setting.seconds is not None]
        return sum(known) if known else None

    @property
    def num_runs(self) -> int:
        """Runs of all comparisons."""
        draws = len(self.asked.partition_seeds or (0,))
        return sum(len(setting.rows) for setting in self.settings) * len(self.asked.seeds) * draws


def plan(table: PaperTable, asked: Asked, *, look_at_data: bool = True) -> TablePlan:
    """Which cells can be run, and how.

    Args:
        table: of a paper. asked: what of it.
        look_at_data: whether to prepare the data, which a cell is refused without; else it is only checked whether
            every cell can be configured.

    Raises:
        ConfigError: no such row or column, or an assignment that fits no cell.
    """
    rows = [table.row(key) for key in asked.rows] if asked.rows is not None else list(table.rows)
    columns = [table.column(key) for key in asked.columns] if asked.columns is not None else list(table.columns)
    if asked.rounds_scale <= 0:
        raise ConfigError(f"--rounds-scale {asked.rounds_scale}: must be above 0")
    refused: dict[tuple[str, str], str] = {}
    settings = []
    for group in _groups(columns):
        usable: list[Row] = []
        seconds: list[float | None] = []
        no_data = _missing_data(table, group[0], asked) if look_at_data else None
        for row in rows:
            why = next((why for column in group if (why := table.why_missing(row, column)) is not None), no_data)
            if why is None and row.method is None:
                why = f"{row.title} is not built"
            if why is None:
                try:
                    config = _config(table, group[0], row, asked)
                except ConfigError as error:
                    why = str(error)
                else:
                    took = Cache.here().cost(kind_of(config)).seconds if look_at_data else None
                    if asked.max_hours is not None and took is not None and took > 3600 * asked.max_hours:
                        why = f"takes about {took / 3600:.1f} hours on one core, above --max-hours {asked.max_hours:g}"
                    else:
                        seconds.append(took)
            if why is None:
                usable.append(row)
            else:
                refused.update({(row.key, column.key): why for column in group})
        if usable:
            draws = len(asked.seeds) * len(asked.partition_seeds or (0,))
            known = [each for each in seconds if each is not None]
            told = sum(known) * draws if len(known) == len(seconds) else None
            settings.append(Setting(tuple(group), tuple(usable), _parameters(table, group[0], usable, asked), told))
    return TablePlan(table, asked, tuple(settings), refused)


def cells(table: PaperTable) -> Iterator[tuple[Row, Column]]:
    """Those with a printed figure, row by row."""
    for row in table.rows:
        for column in table.columns:
            if (row.key, column.key) in table.printed:
                yield row, column


def _groups(columns: Sequence[Column]) -> list[list[Column]]:
    groups: list[list[Column]] = []
    for column in columns:
        same = next((group for group in groups if group[0].values == column.values), None)
        if same is None:
            groups.append([column])
        else:
            same.append(column)
    return groups


def _parameters(table: PaperTable, column: Column, rows: Sequence[Row], asked: Asked) -> dict[str, Any]:
    """Of the comparison of a column's rows."""
    variants: dict[str, Any] = {}
    methods = []
    for row in rows:
        methods.append(row.key)
        if row.key != row.method:
            variants[row.key] = {"method": row.method, **row.values}
    settings = {row.key: dict(row.values) for row in rows if row.key == row.method and row.values}
    common = _common(table, column, asked)
    return {
        **common,
        "compare": {
            "methods": methods,
            "seeds": list(asked.seeds),
            "partition_seeds": None if asked.partition_seeds is None else list(asked.partition_seeds),
            "baseline": table.baseline if table.baseline in methods else methods[0],
            "settings": settings,
            "variants": variants,
        },
    }


def _common(table: PaperTable, column: Column, asked: Asked) -> dict[str, Any]:
    given = with_values({}, {**table.common, **column.values}, f"{table.id}: ")
    if asked.rounds_scale != 1:
        rounds = Config.from_mapping(given).federation.rounds
        given = with_values(given, {"federation.rounds": max(1, round(rounds * asked.rounds_scale))})
    return override(given, asked.assignments)


def _config(table: PaperTable, column: Column, row: Row, asked: Asked) -> Config:
    """A cell's, with its first seed."""
    return comparison_runs(_parameters(table, column, [row], asked), None, asked.seeds[:1])[0].config


def _missing_data(table: PaperTable, column: Column, asked: Asked) -> str | None:
    try:
        config = Config.from_mapping(_common(table, column, asked))
        Cache.here().prepared(config)
    except DataError as error:
        return f"data: {str(error).replace(chr(10), '; ')}"
    except ConfigError:  # which every row says with its own values
        return None
    return None


def told_length(found: TablePlan) -> str:
    """How many runs, and about how long they take on one core; earlier runs of the same kind say how long each does."""
    unknown = sum(setting.seconds is None for setting in found.settings)
    words = f"{found.num_runs} runs in {len(found.settings)} settings"
    if found.seconds is not None:
        words += f", about {_duration(found.seconds)} on one core"
        words += f" and {unknown} settings of which no run has finished here" if unknown else ""
    elif found.settings:
        words += "; how long they take is not known before one of each kind has finished here"
    return words


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{seconds / 3600:.1f} hours"
