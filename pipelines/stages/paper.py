"""Stage of ``partitions/dvc.yaml``: the partitions of one setting of a paper, as artifacts of DVC."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flcore.data.partition import Partition
from pipelines.papers.catalogue import table_named
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.runs.cache import Cache
from pipelines.runs.ownership import claim_folder
from pipelines.stages.partition import partition


def paper_partitions(table: str, column: str, assignments: Sequence[str], directory: Path) -> dict[int, Partition]:
    """Divide images as a column of a paper's table says, into ``<directory>/seed-<seed>`` for each of its seeds.

    Raises:
        ConfigError: no such table or column, or the folder has other content. DataError: images are missing.
    """
    claim_folder("partitions", directory)
    selection = TableSelection(columns=(column,), assignments=tuple(assignments))
    planned = plan_table(table_named(table), selection, with_data=False)
    if not planned.settings:
        raise planned.nothing_to_run()
    config = planned.settings[0].plan.runs[0].config
    return partition(config, selection.seeds, Cache.here().prepared(config), directory)
