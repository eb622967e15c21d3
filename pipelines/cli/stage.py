"""The stages of `dvc.yaml`: ``protofl stage``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipelines.cli.options import Assignments, Common, Restart, Results, Values

_PACKAGE = Path(__file__).parents[1]
"""The folder of `pipelines`."""


def stage_code(*, out: Results = Path("artifacts"), common: Common = Common()) -> int:
    """Write digests of the code that the other stages depend on, without comments."""
    from pipelines.stages.code import write_digests

    write_digests(out / "code")
    return 0


def stage_prepare(*, values: Values = Values(), out: Results = Path("artifacts")) -> int:
    """Convert the dataset's files to tensors."""
    return _stage("prepare", values, out)


def stage_partition(*, values: Values = Values(), out: Results = Path("artifacts")) -> int:
    """Divide the data among clients, for each seed."""
    return _stage("partition", values, out)


def stage_train(*, values: Values = Values(), out: Results = Path("artifacts"), restart: Restart = False) -> int:
    """Train and evaluate all runs of compare.methods and compare.seeds."""
    return _stage("train", values, out, restart=restart)


def stage_compare(*, values: Values = Values(), out: Results = Path("artifacts")) -> int:
    """Write the table, figures and page of these runs."""
    return _stage("compare", values, out)


def stage_paper(
    table: str,
    column: str,
    /,
    *,
    assignments: Assignments = (),
    out: Results = Path("partitions/paper"),
    common: Common = Common(),
) -> int:
    """Divide images among clients as a column of a paper's table says.

    Args:
        table: see 'protofl paper list'
        column: see 'protofl paper show ID'
        assignments: set a value, such as data.root=DIR; repeatable
    """
    from pipelines.stages.paper import paper_partitions
    from pipelines.stages.partition import partition_table

    for seed, partition in paper_partitions(table, column, assignments, out).items():
        print("\n".join([f"seed {seed}", *partition_table(partition)]))
    return 0


def _stage(name: str, values: Values, out: Path, *, restart: bool = False) -> int:
    """Run one stage of `dvc.yaml` without Prefect.

    DVC records parameters and code at the end of a stage as the inputs of its results, so neither may change meanwhile.
    """
    from flcore.core.loaded_code import EditedError, read_sources, refuse_edited
    from pipelines.plan.files import DEFAULT_FILE
    from pipelines.stages import commands

    params = values.params or DEFAULT_FILE

    def inputs() -> tuple[bytes | None, Mapping[str, bytes]]:
        return params.read_bytes() if params.is_file() else None, read_sources(_PACKAGE)

    before = inputs()
    raw = values.read({}, without_effect={"seed": "the seeds come from compare.seeds"})
    commands.stage(name, raw, out, restart=restart)
    refuse_edited()
    if inputs() != before:
        raise EditedError.of(f"{params} or a file of {_PACKAGE.name}")
    return 0
