"""Turn a paper's table into comparisons: which cells can be run here, with which runs, and roughly for how long."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from flcore.config.schema import Config
from flcore.config.sections import FederationConfig
from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError
from pipelines.papers.assigned import ROUNDS, SNAPSHOTS, check, key_of, that_count
from pipelines.papers.catalogue import Column, PaperTable, Row
from pipelines.plan.comparison import comparison_plan
from pipelines.plan.params import override, with_values
from pipelines.plan.spec import ExperimentPlan, RunSpec
from pipelines.reporting.formats import plural
from pipelines.runs.cache import Cache, kind_of


@dataclass(frozen=True)
class Asked:
    """A request for a table.

    Attributes:
        rows, columns: their keys; None: all.
        seeds: of every cell. partition_seeds: each is combined with every seed; None: as the table defines.
        rounds_scale: factor on the printed rounds; 1 is the paper's budget.
        assignments: ``KEY=VALUE`` for all cells, such as a data folder; see :func:`pipelines.papers.assigned.check`.
        max_hours: limit for one run; longer ones are refused. None: no limit.
    """

    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    partition_seeds: tuple[int, ...] | None = None
    rounds_scale: float = 1.0
    assignments: tuple[str, ...] = ()
    max_hours: float | None = None


Place = tuple[str, str, int, int]
"""Key of a run in a table: setting, row, partition seed, seed."""


@dataclass(frozen=True)
class Setting:
    """Columns that share their runs.

    Attributes:
        name: name of its folder: the table's first such column. rows: those that can be run.
        parameters: of the comparison.
        seconds: estimate for all its runs on one core, from earlier runs or trials; None: unknown.
        besides: assignments that make it another setting than the table's.
        only: the runs to make; None: all (:mod:`pipelines.papers.share`).
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    parameters: Mapping[str, Any]
    seconds: float | None = None
    besides: tuple[str, ...] = ()
    only: frozenset[Place] | None = None

    @cached_property
    def plan(self) -> ExperimentPlan:
        """The checked runs to make, by row, partition seed and seed."""
        every = comparison_plan(self.parameters)
        return every.with_runs(run for run in every.runs if self.only is None or place_of(self, run) in self.only)

    @property
    def num_runs(self) -> int:
        """Number of runs; they are not checked."""
        compare = self.parameters["compare"]
        every = len(self.rows) * len(compare["seeds"]) * len(compare["partition_seeds"] or (0,))
        return every if self.only is None else len(self.only)


def place_of(setting: Setting, run: RunSpec) -> Place:
    """Return the key of a setting's run."""
    return setting.name, run.name, run.config.partition_seed, run.config.seed


@dataclass(frozen=True)
class TablePlan:
    """The comparisons of a table that are run.

    Attributes:
        refused: by row and column, why a cell is not run.
        at_fault: likewise, the error's type; without cells that the table's file refuses.
        besides: by setting, the assignments of the runs that figures come from.
        left_out: runs that are kept or in another part.
    """

    table: PaperTable
    asked: Asked
    settings: tuple[Setting, ...]
    refused: Mapping[tuple[str, str], str]
    at_fault: Mapping[tuple[str, str], type[ProtoflError]] = field(default_factory=dict)
    besides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: frozenset[Place] = frozenset()

    @property
    def is_kept(self) -> bool:
        """True if all runs are kept."""
        return bool(self.left_out) and not self.settings

    def nothing_to_run(self) -> ProtoflError:
        """Return the error for a plan without settings, of the type that all refusals share."""
        kinds = set(self.at_fault.values())
        kind = kinds.pop() if len(kinds) == 1 else RunError
        reasons = sorted(set(self.refused.values()))
        return kind(f"{self.table.id}: none of these cells can be run here: {'; '.join(reasons)}")

    @property
    def num_runs(self) -> int:
        return sum(setting.num_runs for setting in self.settings)


def plan(table: PaperTable, asked: Asked, *, look_at_data: bool = True) -> TablePlan:
    """Plan the cells that can be run.

    ``look_at_data`` prepares the data and refuses cells without data; otherwise cells only need a valid configuration.

    Raises:
        ConfigError: a row or column is unknown, or an assignment is not allowed.
    """
    rows = [table.row(key) for key in asked.rows] if asked.rows is not None else list(table.rows)
    wanted = {table.column(key).key for key in asked.columns or [column.key for column in table.columns]}
    check(table, [column for column in table.columns if column.key in wanted], asked.assignments)
    if asked.rounds_scale <= 0:
        raise ConfigError(f"--rounds-scale {asked.rounds_scale}: must be above 0")
    refused: dict[tuple[str, str], str] = {}
    at_fault: dict[tuple[str, str], type[ProtoflError]] = {}
    settings = []
    for whole in table.settings():
        group = tuple(column for column in whole if column.key in wanted)
        if not group:
            continue
        usable: list[Row] = []
        seconds: list[float | None] = []
        no_data = _missing_data(table, group[0], asked) if look_at_data else None
        configs = _configs(table, group[0], rows, asked)
        for row in rows:
            missing = {column.key: table.why_missing(row, column) for column in group}
            refused.update({(row.key, key): reason for key, reason in missing.items() if reason is not None})
            readable = [(row.key, key) for key, reason in missing.items() if reason is None]
            if not readable:
                continue
            took = _known_seconds(configs[row.key], asked, look_at_data, no_data)
            if isinstance(took, ProtoflError):
                refused.update(dict.fromkeys(readable, str(took)))
                at_fault.update(dict.fromkeys(readable, type(took)) if row.method is not None else {})
            else:
                usable.append(row)
                seconds.append(took)
        if usable:
            draws = len(asked.seeds) * len(asked.partition_seeds or (0,))
            known = [each for each in seconds if each is not None]
            told = sum(known) * draws if len(known) == len(seconds) else None
            parameters = comparison_parameters(table, group[0], usable, asked)
            besides = _besides(table, group[0], usable, configs, asked)
            settings.append(Setting(whole[0].key, group, tuple(usable), parameters, told, besides))
    return TablePlan(table, asked, tuple(settings), refused, at_fault)


def _configs(table: PaperTable, column: Column, rows: Sequence[Row], asked: Asked) -> dict[str, Config | ConfigError]:
    """Return each row's configuration with the first seed, or the error why it has none."""
    found: dict[str, Config | ConfigError] = {row.key: ConfigError(f"{row.title} is not built") for row in rows}
    built = [row for row in rows if row.method is not None]
    try:
        parameters = comparison_parameters(table, column, built, asked) if built else {}
        runs = comparison_plan(parameters, None, asked.seeds[:1]).runs if built else ()
    except ConfigError as error:
        if len(built) == 1:
            return {**found, built[0].key: error}
        for row in built:  # find the rows at fault
            found |= _configs(table, column, [row], asked)
        return found
    return found | {row.key: run.config for row, run in zip(built, one_draw(runs, built), strict=True)}


def _besides(
    table: PaperTable, column: Column, rows: Sequence[Row], configs: Mapping[str, Config | ConfigError], asked: Asked
) -> tuple[str, ...]:
    if not asked.assignments:
        return ()
    usual = _configs(table, column, rows, replace(asked, assignments=()))
    return that_count(asked.assignments, usual, {row.key: configs[row.key] for row in rows})


def one_draw(runs: Sequence[RunSpec], rows: Sequence[Row]) -> Sequence[RunSpec]:
    """Return the run of every row on its first partition."""
    return runs[:: len(runs) // len(rows)] if rows else []


def _known_seconds(
    config: Config | ConfigError, asked: Asked, look_up: bool, no_data: DataError | None
) -> float | ProtoflError | None:
    """Return the known seconds of one run of a row, or why it cannot be run."""
    if no_data is not None:
        return no_data
    if isinstance(config, ConfigError):
        return config
    took = Cache.here().cost(kind_of(config)).seconds if look_up else None
    if asked.max_hours is not None and took is not None and took > 3600 * asked.max_hours:
        return RunError(f"takes about {took / 3600:.1f} hours on one core, above --max-hours {asked.max_hours:g}")
    return took


def cells(table: PaperTable) -> Iterator[tuple[Row, Column]]:
    """Yield the cells with a printed figure, row by row."""
    for row in table.rows:
        for column in table.columns:
            if (row.key, column.key) in table.printed:
                yield row, column


def comparison_parameters(table: PaperTable, column: Column, rows: Sequence[Row], asked: Asked) -> dict[str, Any]:
    """Return the unchecked parameters of the comparison of a column's rows."""
    own = {row.key: _own_values(table, column, row, asked) for row in rows}
    # A method's settings also apply to its variants, but a row's values must apply to that row only.
    several = {row.method for row in table.rows if row.key != row.method}
    plain = {row.key for row in rows if row.key == row.method and not (own[row.key] and row.method in several)}
    variants = {row.key: {"method": row.method, **own[row.key]} for row in rows if row.key not in plain}
    settings = {row.key: own[row.key] for row in rows if row.key in plain and own[row.key]}
    methods = [row.key for row in rows]
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


def _own_values(table: PaperTable, column: Column, row: Row, asked: Asked) -> dict[str, Any]:
    """Return a cell's values; assignments for all cells override them."""
    given = {key_of(assignment) for assignment in asked.assignments}
    own = {
        key: value
        for key, value in table.values_of(row, column).items()
        if not any(key == other or key.startswith(f"{other}.") for other in given)
    }
    if own.keys() & {ROUNDS, SNAPSHOTS}:
        reached = _at_budget({**table.common, **column.values, **table.values_of(row, column)}, asked)
        own |= {key: value for key, value in reached.items() if key == ROUNDS or key not in given}
    return own


def _common(table: PaperTable, column: Column, asked: Asked) -> dict[str, Any]:
    values = {**table.common, **column.values}
    given = with_values({}, {**values, **_at_budget(values, asked)}, f"{table.id}: ")
    return override(given, asked.assignments)


def _at_budget(values: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """Return the rounds of a cell at the requested budget, and its snapshots within them."""
    printed = values.get(ROUNDS, FederationConfig().rounds)
    rounds = max(1, round(printed * asked.rounds_scale))
    within = {SNAPSHOTS: [n for n in values[SNAPSHOTS] if n <= rounds or n > printed]} if SNAPSHOTS in values else {}
    return {ROUNDS: rounds, **within}


def snapshots_beyond(found: TablePlan) -> list[int]:
    """Return the snapshot rounds that no run reaches at this budget."""
    table = found.table
    wanted, reached = set[int](), set[int]()
    for column in (column for setting in found.settings for column in setting.columns):
        for row in table.rows:
            values = {**table.common, **column.values, **table.values_of(row, column)}
            wanted.update(values.get(SNAPSHOTS, ()))
            reached.update(_at_budget(values, found.asked).get(SNAPSHOTS, ()))
    return sorted(wanted - reached)


def _missing_data(table: PaperTable, column: Column, asked: Asked) -> DataError | None:
    try:
        config = Config.from_mapping(_common(table, column, asked))
        Cache.here().prepared(config)
    except DataError as error:
        return DataError(f"data: {str(error).replace(chr(10), '; ')}")
    except ConfigError:  # every row reports it with its own values
        pass
    return None


def told_length(found: TablePlan, finished: Mapping[str, int] | None = None) -> str:
    """Return a text with the number of runs and their estimated time on one core; ``finished`` counts by setting."""
    there = finished or {}
    done = sum(there.values())
    left = {setting.name: 1 - there.get(setting.name, 0) / setting.num_runs for setting in found.settings}
    waiting = [setting for setting in found.settings if left[setting.name] > 0]
    known = [setting.seconds * left[setting.name] for setting in waiting if setting.seconds is not None]
    words = f"{plural(found.num_runs, 'run')} in {plural(len(found.settings), 'setting')}"
    words += f" ({len(found.left_out)} others left out)" if found.left_out else ""
    words += f", {done} of them finished before" if done else ""
    if known:
        unknown = len(waiting) - len(known)
        words += f", about {_duration(sum(known))} on one core"
        words += f" and {plural(unknown, 'setting')} of which no run has finished here" if unknown else ""
    elif waiting:
        words += "; how long they take is not known before one of each kind has finished here (paper show --measure)"
    return words


def _duration(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return plural(minutes, "minute") if minutes < 120 else f"{seconds / 3600:.1f} hours"


def refused_by_reason(found: TablePlan) -> dict[str, str]:
    """Return the refused cells by reason as text, grouping rows with the same columns."""
    table, by_reason = found.table, dict[str, dict[str, list[str]]]()
    for (row, column), reason in found.refused.items():
        by_reason.setdefault(reason, {}).setdefault(row, []).append(column)
    told = {}
    for reason, by_row in by_reason.items():
        rows_of: dict[frozenset[str], list[str]] = {}
        for row, columns in by_row.items():
            rows_of.setdefault(frozenset(columns), []).append(row)
        told[reason] = ", ".join(
            f"{_titles(table.rows, set(rows), ', ')} ({_titles(table.columns, columns, '; ')})"
            for columns, rows in rows_of.items()
        )
    return told


def _titles(of: Sequence[Row] | Sequence[Column], keys: Collection[str], between: str) -> str:
    """Return the titles of keys, in the table's order."""
    return "all" if len(keys) == len(of) else between.join(one.title for one in of if one.key in keys)
