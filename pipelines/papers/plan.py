"""Turn a paper's table into comparisons: which cells can be run here, with which runs, and roughly for how long."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from flcore.config.schema import Config
from flcore.config.sections import FederationConfig
from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError
from pipelines.papers.catalogue import Column, PaperTable, Row
from pipelines.papers.overrides import ROUNDS, SNAPSHOTS, check, effective, key_of
from pipelines.plan.comparison import comparison_plan
from pipelines.plan.params import override, with_values
from pipelines.plan.spec import ExperimentPlan, RunSpec
from pipelines.reporting.formats import plural
from pipelines.runs.cache import Cache, kind_of


@dataclass(frozen=True)
class TableSelection:
    """A request for a table.

    Attributes:
        rows, columns: their keys; None: all.
        seeds: of every cell. partition_seeds: each is combined with every seed; None: as the table defines.
        rounds_scale: factor on the printed rounds. max_hours: longer runs are refused; None: no limit.
        assignments: ``KEY=VALUE`` for all cells, such as a data folder; see :func:`pipelines.papers.overrides.check`.
    """

    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    partition_seeds: tuple[int, ...] | None = None
    rounds_scale: float = 1.0
    assignments: tuple[str, ...] = ()
    max_hours: float | None = None


RunKey = tuple[str, str, int, int]
"""Key of a run in a table: setting, row, partition seed, seed."""


@dataclass(frozen=True)
class Setting:
    """Columns that share their runs.

    Attributes:
        name: of its folder: the table's first such column. rows: those that can be run.
        parameters: of the comparison. overrides: assignments that change its results.
        seconds: estimate for all its runs on one core, from earlier runs or trials; None: unknown.
        only: the runs to make; None: all (:mod:`pipelines.papers.shard`).
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    parameters: Mapping[str, Any]
    seconds: float | None = None
    overrides: tuple[str, ...] = ()
    only: frozenset[RunKey] | None = None

    @cached_property
    def plan(self) -> ExperimentPlan:
        """The checked runs to make, by row, partition seed and seed."""
        every = comparison_plan(self.parameters)
        return every.with_runs(run for run in every.runs if self.only is None or run_key(self, run) in self.only)

    @property
    def num_runs(self) -> int:
        """Number of runs; they are not checked."""
        compare = self.parameters["compare"]
        every = len(self.rows) * len(compare["seeds"]) * len(compare["partition_seeds"] or (0,))
        return every if self.only is None else len(self.only)


def run_key(setting: Setting, run: RunSpec) -> RunKey:
    """Return the key of a setting's run."""
    return setting.name, run.name, run.config.partition_seed, run.config.seed


@dataclass(frozen=True)
class TablePlan:
    """The comparisons of a table that are run.

    Attributes:
        refused: by row and column, why a cell is not run.
        error_types: likewise, the error's type; without cells that the table's file refuses.
        overrides: by setting, the assignments of the runs that figures come from.
        left_out: runs that are kept or in another part.
    """

    table: PaperTable
    selection: TableSelection
    settings: tuple[Setting, ...]
    refused: Mapping[tuple[str, str], str]
    error_types: Mapping[tuple[str, str], type[ProtoflError]] = field(default_factory=dict)
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: frozenset[RunKey] = frozenset()

    @property
    def is_kept(self) -> bool:
        """True if all runs are kept."""
        return bool(self.left_out) and not self.settings

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of the first comparison, which have the store of all runs."""
        return self.settings[0].parameters if self.settings else {}

    def nothing_to_run(self) -> ProtoflError:
        """Return the error for a plan without settings, of the type that all refusals share."""
        kinds = set(self.error_types.values())
        kind = kinds.pop() if len(kinds) == 1 else RunError
        reasons = sorted(set(self.refused.values()))
        return kind(f"{self.table.id}: none of these cells can be run here: {'; '.join(reasons)}")

    @property
    def num_runs(self) -> int:
        return sum(setting.num_runs for setting in self.settings)


def plan_table(table: PaperTable, selection: TableSelection, *, with_data: bool = True) -> TablePlan:
    """Plan the cells that can be run; ConfigError if a row or column is unknown, or an assignment is not allowed.

    ``with_data`` prepares the data and refuses cells without data; otherwise cells only need a valid configuration.
    """
    rows = [table.row(key) for key in selection.rows] if selection.rows is not None else list(table.rows)
    wanted = {table.column(key).key for key in selection.columns or [column.key for column in table.columns]}
    check(table, [column for column in table.columns if column.key in wanted], selection.assignments)
    if selection.rounds_scale <= 0:
        raise ConfigError(f"--rounds-scale {selection.rounds_scale}: must be above 0")
    refused: dict[tuple[str, str], str] = {}
    error_types: dict[tuple[str, str], type[ProtoflError]] = {}
    settings = []
    for group in table.settings():
        columns = tuple(column for column in group if column.key in wanted)
        if not columns:
            continue
        configs = _configs(table, columns[0], rows, selection)
        no_data = _missing_data(table, columns[0], selection) if with_data else None
        seconds: dict[str, float | None] = {}  # of one run, by row that can be run
        for row in rows:
            reasons = {(row.key, column.key): table.why_missing(row, column) for column in columns}
            refused |= {cell: reason for cell, reason in reasons.items() if reason is not None}
            possible = [cell for cell, reason in reasons.items() if reason is None]
            known = no_data or _known_seconds(configs[row.key], selection, with_data) if possible else None
            if isinstance(known, ProtoflError):
                refused |= dict.fromkeys(possible, str(known))
                error_types |= dict.fromkeys(possible, type(known)) if row.method is not None else {}
            elif possible:
                seconds[row.key] = known
        if seconds:
            usable = [row for row in rows if row.key in seconds]
            per_row = len(selection.seeds) * len(selection.partition_seeds or (0,))
            times = [each for each in seconds.values() if each is not None]
            total = sum(times) * per_row if len(times) == len(seconds) else None
            parameters = comparison_parameters(table, columns[0], usable, selection)
            overrides: tuple[str, ...] = ()
            if selection.assignments:
                usual = _configs(table, columns[0], usable, replace(selection, assignments=()))
                overrides = effective(selection.assignments, usual, {row.key: configs[row.key] for row in usable})
            settings.append(Setting(group[0].key, columns, tuple(usable), parameters, total, overrides))
    return TablePlan(table, selection, tuple(settings), refused, error_types)


def _configs(
    table: PaperTable, column: Column, rows: Sequence[Row], selection: TableSelection
) -> dict[str, Config | ConfigError]:
    """Return each row's configuration with the first seed, or the error why it has none."""
    configs: dict[str, Config | ConfigError] = {row.key: ConfigError(f"{row.title} is not built") for row in rows}
    for row in rows:
        if row.method is not None:
            try:
                parameters = comparison_parameters(table, column, [row], selection)
                configs[row.key] = comparison_plan(parameters, None, selection.seeds[:1]).runs[0].config
            except ConfigError as error:
                configs[row.key] = error
    return configs


def _known_seconds(
    config: Config | ConfigError, selection: TableSelection, look_up: bool
) -> float | ProtoflError | None:
    """Return the known seconds of one run of a row, or why it cannot be run."""
    if isinstance(config, ConfigError):
        return config
    seconds = Cache.here().cost(kind_of(config)).seconds if look_up else None
    if selection.max_hours is not None and seconds is not None and seconds > 3600 * selection.max_hours:
        takes = f"takes about {seconds / 3600:.1f} hours on one core"
        return RunError(f"{takes}, above --max-hours {selection.max_hours:g}")
    return seconds


def cells(table: PaperTable) -> Iterator[tuple[Row, Column]]:
    """Yield the cells with a printed figure, row by row."""
    for row in table.rows:
        for column in table.columns:
            if (row.key, column.key) in table.printed:
                yield row, column


def comparison_parameters(
    table: PaperTable, column: Column, rows: Sequence[Row], selection: TableSelection
) -> dict[str, Any]:
    """Return the unchecked parameters of the comparison of a column's rows."""
    values = {row.key: _own_values(table, column, row, selection) for row in rows}
    # A method's settings also apply to its variants, but a row's values must apply to that row only.
    several = {row.method for row in table.rows if row.key != row.method}
    plain = {row.key for row in rows if row.key == row.method and not (values[row.key] and row.method in several)}
    variants = {row.key: {"method": row.method, **values[row.key]} for row in rows if row.key not in plain}
    settings = {row.key: values[row.key] for row in rows if row.key in plain and values[row.key]}
    methods = [row.key for row in rows]
    common = _common(table, column, selection)
    return {
        **common,
        "compare": {
            "methods": methods,
            "seeds": list(selection.seeds),
            "partition_seeds": None if selection.partition_seeds is None else list(selection.partition_seeds),
            "baseline": table.baseline if table.baseline in methods else methods[0],
            "settings": settings,
            "variants": variants,
        },
    }


def _own_values(table: PaperTable, column: Column, row: Row, selection: TableSelection) -> dict[str, Any]:
    """Return a cell's values; assignments for all cells override them."""
    assigned = {key_of(assignment) for assignment in selection.assignments}
    values = {
        key: value
        for key, value in table.values_of(row, column).items()
        if not any(key == other or key.startswith(f"{other}.") for other in assigned)
    }
    if values.keys() & {ROUNDS, SNAPSHOTS}:
        reached = _at_budget({**table.common, **column.values, **table.values_of(row, column)}, selection)
        values |= {key: value for key, value in reached.items() if key == ROUNDS or key not in assigned}
    return values


def _common(table: PaperTable, column: Column, selection: TableSelection) -> dict[str, Any]:
    values = {**table.common, **column.values}
    parameters = with_values({}, {**values, **_at_budget(values, selection)}, f"{table.id}: ")
    return override(parameters, selection.assignments)


def _at_budget(values: Mapping[str, Any], selection: TableSelection) -> dict[str, Any]:
    """Return the rounds of a cell at the requested budget, and its snapshots within them."""
    printed = values.get(ROUNDS, FederationConfig().rounds)
    rounds = max(1, round(printed * selection.rounds_scale))
    within = {SNAPSHOTS: [n for n in values[SNAPSHOTS] if n <= rounds or n > printed]} if SNAPSHOTS in values else {}
    return {ROUNDS: rounds, **within}


def snapshots_beyond(plan: TablePlan) -> list[int]:
    """Return the snapshot rounds that no run reaches at this budget."""
    table = plan.table
    wanted, reached = set[int](), set[int]()
    for column in (column for setting in plan.settings for column in setting.columns):
        for row in table.rows:
            values = {**table.common, **column.values, **table.values_of(row, column)}
            wanted.update(values.get(SNAPSHOTS, ()))
            reached.update(_at_budget(values, plan.selection).get(SNAPSHOTS, ()))
    return sorted(wanted - reached)


def _missing_data(table: PaperTable, column: Column, selection: TableSelection) -> DataError | None:
    try:
        config = Config.from_mapping(_common(table, column, selection))
        Cache.here().prepared(config)
    except DataError as error:
        return DataError(f"data: {str(error).replace(chr(10), '; ')}")
    except ConfigError:  # every row reports it with its own values
        pass
    return None


def estimated_duration(plan: TablePlan, finished: Mapping[str, int] | None = None) -> str:
    """Return a text with the number of runs and their estimated time on one core; ``finished`` counts by setting."""
    finished_runs = finished or {}
    done = sum(finished_runs.values())
    remaining = {setting.name: 1 - finished_runs.get(setting.name, 0) / setting.num_runs for setting in plan.settings}
    waiting = [setting for setting in plan.settings if remaining[setting.name] > 0]
    known = [setting.seconds * remaining[setting.name] for setting in waiting if setting.seconds is not None]
    words = f"{plural(plan.num_runs, 'run')} in {plural(len(plan.settings), 'setting')}"
    words += f" ({len(plan.left_out)} others left out)" if plan.left_out else ""
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


def refused_by_reason(plan: TablePlan) -> dict[str, str]:
    """Return the refused cells by reason as text, grouping rows with the same columns."""
    table, by_reason = plan.table, dict[str, dict[str, list[str]]]()
    for (row, column), reason in plan.refused.items():
        by_reason.setdefault(reason, {}).setdefault(row, []).append(column)
    texts = {}
    for reason, by_row in by_reason.items():
        rows_of: dict[frozenset[str], list[str]] = {}
        for row, columns in by_row.items():
            rows_of.setdefault(frozenset(columns), []).append(row)
        texts[reason] = ", ".join(
            f"{_titles(table.rows, set(rows), ', ')} ({_titles(table.columns, columns, '; ')})"
            for columns, rows in rows_of.items()
        )
    return texts


def _titles(of: Sequence[Row] | Sequence[Column], keys: Collection[str], between: str) -> str:
    """Return the titles of keys, in the table's order."""
    return "all" if len(keys) == len(of) else between.join(one.title for one in of if one.key in keys)
