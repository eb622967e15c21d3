"""``protofl paper run``, as a command and as a flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipelines.orchestration.as_flow import as_flow, uses_prefect
from pipelines.orchestration.commands import operation, say_table
from pipelines.papers.catalogue import table_named
from pipelines.papers.plan import TablePlan, TableSelection
from pipelines.papers.run_table import folder_of, run_table
from pipelines.papers.shard import nothing_to_do, plan_shard
from pipelines.papers.timing_probe import measure


def run_paper(
    id: str,
    selection: TableSelection,
    out: Path | None,
    *,
    part: str | None = None,
    not_kept: bool = False,
    prefect: bool | None = None,
    restart: bool = False,
    wait: bool = True,
) -> None:
    """``protofl paper run``: what can be run of a table, then our figures beside the printed ones.

    Args:
        id: of the table. selection: what of it.
        out: its folder; None: ``runs/papers/<id>``.
        part, not_kept: which of its runs, see :func:`pipelines.papers.shard.plan_shard`.
        prefect: whether as a flow; None: if a configured server answers.
        restart: discard unusable checkpoints and damaged results.
        wait: for MLflow.

    Raises:
        ConfigError: no such table, row or column, or an assignment with which no cell can be run.
        DataError: no cell has its data here. RunError: nothing can be run for other reasons, or runs failed.
    """
    planned = plan_shard(table_named(id), selection, part, not_kept=not_kept)
    if planned.is_kept:
        print(nothing_to_do(planned))
        return
    folder = out or folder_of(planned)
    first: Mapping[str, Any] = planned.settings[0].parameters if planned.settings else {}
    with operation(first, wait=wait, restart=restart) as (how, _):
        if uses_prefect(prefect, how):
            from pipelines.orchestration.paper_flow import paper_table

            which = {**asdict(_to_be_kept(selection)), "part": part, "not_kept": not_kept}
            outcome = as_flow(how, paper_table, id=id, out=str(folder), restart=restart, **which)
        else:
            outcome = run_table(planned, folder, how)
    say_table(outcome, planned.num_runs)


def _to_be_kept(selection: TableSelection) -> TableSelection:
    """What Prefect may keep: the address of a store may hold a password, and the follower has it already."""
    kept = [one for one in selection.assignments if one.partition("=")[0].strip().partition(".")[0] != "tracking"]
    return replace(selection, assignments=tuple(kept))


def learn_times(planned: TablePlan) -> bool:
    """``protofl paper show --measure``: time a few rounds of each kind of run; whether a plan would now know more."""
    first: Mapping[str, Any] = planned.settings[0].parameters if planned.settings else {}
    with operation({**first, "tracking": {"enabled": False}}) as (how, _):
        return measure(planned, folder_of(planned) / "trial", how)
