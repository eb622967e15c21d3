"""The flow of a paper's table, for commands and deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from flcore.config.schema import Config
from pipelines.orchestration import working_folder
from pipelines.orchestration.flow_runs import (
    OPTIONS,
    Hours,
    Seed,
    dated,
    finish_all,
    operation,
    refuse_stores,
    show_table,
)
from pipelines.papers.catalogue import table_named
from pipelines.papers.plan import TableSelection
from pipelines.papers.run_table import folder_of, run_table
from pipelines.papers.shard import nothing_to_do, plan_shard

working_folder.enter()


@flow(name="protofl-paper-table", flow_run_name="paper {id}", **OPTIONS)
def paper_table(
    id: str,
    rows: list[str] | None = None,
    columns: list[str] | None = None,
    seeds: list[Seed] | None = None,
    partition_seeds: list[Seed] | None = None,
    rounds_scale: Annotated[float, Field(gt=0)] = 1.0,
    assignments: list[str] | None = None,
    max_hours: Hours | None = None,
    part: Annotated[str, Field(pattern=r"^\d+/\d+$")] | None = None,
    not_kept: bool = False,
    out: str | None = None,
    restart: bool = False,
    limit_hours: Hours | None = None,
) -> str | State[str]:
    """A table of a paper: what can be run here, and our figures next to the printed ones.

    Args:
        id: of the table, such as ``fedpa.table2``.
        rows: their keys; None: all.
        columns: their keys; None: all.
        seeds: of every cell; None: 0, 1, 2.
        partition_seeds: divisions, each with every seed; None: as the table has it.
        rounds_scale: share of the printed rounds.
        assignments: ``KEY=VALUE`` for all cells, such as where data lie.
        max_hours: runs that are known to take longer on one core are refused; None: none.
        part: ``K/N``, every N-th of these runs from the K-th on; None: all.
        not_kept: leave out runs with published figures.
        out: the table's folder; ``{date}`` as for ``federated-experiment``; None: ``runs/papers/<id>``.
        restart: discard unusable checkpoints and damaged results.
        limit_hours: stop after this many hours; the same parameters resume it. None: no limit.

    Returns:
        The table's folder; where nothing is left that is not kept, a state that says so, with the folder as its data.
    """
    refuse_stores("assignments", assignments or (), "MLFLOW_TRACKING_URI where the worker runs")
    selection = TableSelection(
        rows,
        columns,
        (0, 1, 2) if seeds is None else tuple(seeds),
        None if partition_seeds is None else tuple(partition_seeds),
        rounds_scale,
        tuple(assignments or ()),
        max_hours,
    )
    planned = plan_shard(table_named(id), selection, part, not_kept=not_kept)
    folder = folder_of(planned) if out is None else Path(dated(out))
    if planned.is_kept:
        return Completed(name="Unchanged", message=nothing_to_do(planned), data=str(folder))
    config = Config.from_mapping(planned.parameters)
    with operation(config, ["paper", id.partition(".")[0]], limit_hours=limit_hours, restart=restart) as how:
        outcome = run_table(planned, folder, how)
        show_table(outcome)
    return finish_all(outcome, planned.num_runs)
