"""Select a part of a table's runs, every N-th or those not kept, so several machines can share a table."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from flcore.core.errors import ConfigError
from pipelines.papers.catalogue import PaperTable
from pipelines.papers.keeping import kept_places
from pipelines.papers.kept import KeptTable, kept_so_far
from pipelines.papers.plan import Asked, Place, TablePlan, comparison_parameters, place_of, plan
from pipelines.reporting.formats import plural


def plan_of_share(table: PaperTable, asked: Asked, part: str | None = None, *, not_kept: bool = False) -> TablePlan:
    """Plan some of the requested runs.

    Args:
        part: ``K/N``, every N-th run from the K-th on. Runs are counted by setting, row, partition seed and seed, kept
            or not, so N machines with the same command run each once.
        not_kept: leave out runs with figures kept in the code.

    Raises:
        ConfigError: a wrong ``part``, or more parts than runs; or as :func:`pipelines.papers.plan.plan`.
    """
    number, slash, of = (part or "1/1").partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ConfigError(f"--part {part}: expected K/N, the K-th of N parts, such as 1/2")
    kept = kept_so_far(table, asked.rounds_scale) if not_kept else None
    return share(plan(table, asked), (int(number), int(of)), kept)


def share(found: TablePlan, part: tuple[int, int] = (1, 1), kept: KeptTable | None = None) -> TablePlan:
    """Return the plan of the K-th of N parts, without kept runs.

    Raises:
        ConfigError: there are more parts than runs.
    """
    number, of = part
    every = [place_of(setting, run) for setting in found.settings for run in setting.plan.runs]
    own = every[number - 1 :: of]
    if every and not own:
        runs = plural(len(every), "run")
        raise ConfigError(f"--part {number}/{of}: {found.table.id} has {runs} here; take no more parts than that")
    done = kept_places(found, kept) if kept is not None else set[Place]()
    left = {place for place in own if place not in done}
    return _with_runs(found, left, frozenset(every)) if len(left) < len(every) else found


def told_kept(found: TablePlan) -> str:
    """Return the message for a plan that has only kept runs."""
    return f"{found.table.id}: nothing to run: all that was asked for is kept, and is made again without --not-kept"


def _with_runs(found: TablePlan, wanted: Set[Place], every: frozenset[Place]) -> TablePlan:
    """Return the plan with only the wanted runs, without empty settings and rows."""
    settings = []
    for setting in found.settings:
        only = frozenset(place for place in wanted if place[0] == setting.name)
        rows = tuple(row for row in setting.rows if any(place[1] == row.key for place in only))
        if rows:
            parameters = comparison_parameters(found.table, setting.columns[0], rows, found.asked)
            seconds = None if setting.seconds is None else setting.seconds * len(only) / setting.num_runs
            settings.append(replace(setting, rows=rows, parameters=parameters, seconds=seconds, only=only))
    return replace(found, settings=tuple(settings), left_out=every - wanted)
