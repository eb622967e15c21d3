"""Select a part of a table's runs, every N-th or those not kept, so several machines can share a table."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from flcore.core.errors import ConfigError
from pipelines.papers.catalogue import PaperTable
from pipelines.papers.plan import RunKey, TablePlan, TableSelection, comparison_parameters, plan_table, run_key
from pipelines.papers.publish import published_keys
from pipelines.papers.published import PublishedTable, published_so_far
from pipelines.reporting.formats import plural


def plan_shard(
    table: PaperTable, selection: TableSelection, part: str | None = None, *, not_kept: bool = False
) -> TablePlan:
    """Plan some of the requested runs: ``part`` is ``K/N``, every N-th from the K-th on; ``not_kept`` skips kept ones.

    Runs are counted by setting, row, partition seed and seed, kept or not, so N machines with the same command run each
    once.

    Raises:
        ConfigError: a wrong ``part``, or more parts than runs; or as :func:`pipelines.papers.plan.plan_table`.
    """
    number, slash, of = (part or "1/1").partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ConfigError(f"--part {part}: expected K/N, the K-th of N parts, such as 1/2")
    published = published_so_far(table, selection.rounds_scale) if not_kept else None
    return shard(plan_table(table, selection), (int(number), int(of)), published)


def shard(plan: TablePlan, part: tuple[int, int] = (1, 1), published: PublishedTable | None = None) -> TablePlan:
    """Return the plan of the K-th of N parts, without published runs; ConfigError if there are more parts than runs."""
    number, of = part
    all_runs = [run_key(setting, run) for setting in plan.settings for run in setting.plan.runs]
    part_runs = all_runs[number - 1 :: of]
    if all_runs and not part_runs:
        runs = plural(len(all_runs), "run")
        raise ConfigError(f"--part {number}/{of}: {plan.table.id} has {runs} here; take no more parts than that")
    done = published_keys(plan, published) if published is not None else set[RunKey]()
    remaining = {key for key in part_runs if key not in done}
    return _with_runs(plan, remaining, frozenset(all_runs)) if len(remaining) < len(all_runs) else plan


def nothing_to_do(plan: TablePlan) -> str:
    """Return the message for a plan that has only kept runs."""
    return f"{plan.table.id}: nothing to run: all that was asked for is kept, and is made again without --not-kept"


def _with_runs(plan: TablePlan, wanted: Set[RunKey], all_runs: frozenset[RunKey]) -> TablePlan:
    """Return the plan with only the wanted runs, without empty settings and rows."""
    settings = []
    for setting in plan.settings:
        only = frozenset(key for key in wanted if key[0] == setting.name)
        rows = tuple(row for row in setting.rows if any(key[1] == row.key for key in only))
        if rows:
            parameters = comparison_parameters(plan.table, setting.columns[0], rows, plan.selection)
            seconds = None if setting.seconds is None else setting.seconds * len(only) / setting.num_runs
            settings.append(replace(setting, rows=rows, parameters=parameters, seconds=seconds, only=only))
    return replace(plan, settings=tuple(settings), left_out=all_runs - wanted)
