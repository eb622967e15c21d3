"""``protofl paper``: tables and claims of the five papers. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flcore.core.errors import ConfigError, DataError
from pipelines.cli.options import (
    SEVERAL_RUNS,
    Assignments,
    Common,
    Flow,
    Folder,
    Json,
    Names,
    Number,
    Numbers,
    Out,
    Restart,
    exclusive,
    refuse_without_effect,
)

_ONE_OUTPUT = exclusive()
_Id = Annotated[str, Parameter(metavar="ID", help="see 'protofl paper list'")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Selection:
    """A part of a table.

    Attributes:
        rows: only these (default: all)
        columns: only these (default: all)
        seeds: of every cell
        partition_seeds: seeds of partitions, each with every seed (default: the table's)
        rounds_scale: share of the printed rounds to run, marked in every output
        part: every N-th run from the K-th on: N machines share the table; then use 'keep'
        not_kept: skip runs with published figures (see 'paper list')
        max_hours: refuse runs known to take longer on one core (default: none)
        assignments: set a value in all cells, such as data.root=DIR; repeatable
    """

    rows: Names | None = None
    columns: Names | None = None
    seeds: Numbers = (0, 1, 2)
    partition_seeds: Numbers | None = None
    rounds_scale: Number = 1.0
    part: Annotated[str | None, Parameter(metavar="K/N")] = None
    not_kept: bool = False
    max_hours: Annotated[Number | None, Parameter(metavar="H")] = None
    assignments: Assignments = ()

    def request(self) -> Any:
        """Return the request for :mod:`pipelines.papers.plan`.

        Raises:
            ConfigError: options contradict each other.
        """
        from pipelines.papers.plan import TableSelection
        from pipelines.plan.params import override

        of_partitions = {"partition.seed": "the seeds of partitions come from --partition-seeds"}
        refuse_without_effect(self.assignments, {**SEVERAL_RUNS, **(of_partitions if self.partition_seeds else {})})
        override({}, self.assignments)  # refuse contradictions once, not for every cell
        return TableSelection(**{field.name: getattr(self, field.name) for field in fields(TableSelection)})

    def plan(self, table_id: str) -> Any:
        """Return the plan of these runs of a table."""
        from pipelines.papers.catalogue import table_named
        from pipelines.papers.shard import plan_shard

        return plan_shard(table_named(table_id), self.request(), self.part, not_kept=self.not_kept)


def paper_list(*, as_json: Json = False, common: Common = Common()) -> int:
    """List all tables: printed figures, how many can be configured here, how many are measured and published."""
    from pipelines.papers.catalogue import tables
    from pipelines.papers.plan import TableSelection, cells, plan_table
    from pipelines.papers.published import published_tables

    published = published_tables()
    described: list[dict[str, Any]] = []
    for table in tables().values():
        refused = plan_table(table, TableSelection(), with_data=False).refused
        printed = [(row.key, column.key) for row, column in cells(table)]
        kept = {f"{one.rounds_scale:g}": one for one in published if one.table.id == table.id}
        described.append(
            {
                "id": table.id,
                "title": table.title,
                "printed": len(printed),
                "configurable": sum(key not in refused for key in printed),
                "kept": {scale: one.results().num_measured for scale, one in kept.items()},
                "kept_runs": {scale: len(one.runs) for scale, one in kept.items()},
            }
        )
    if as_json:
        print(json.dumps(described, indent=2))
        return 0
    for entry in described:
        of_budgets = [_kept_words(scale, n, entry["kept_runs"][scale]) for scale, n in entry["kept"].items()]
        title = entry["title"] + (f" ({', '.join(of_budgets)})" if of_budgets else "")
        # A drawn figure has no printed values to compare with.
        count = f"{entry['configurable']:>3} of {entry['printed']:>3} cells" if entry["printed"] else f"{'drawn':>16}"
        print(f"{entry['id']:<16} {count}  {title}")
    total = (sum(entry[key] for entry in described) for key in ("configurable", "printed"))
    print("{:<16} {:>3} of {:>3} cells".format("all", *total))
    return 0


def _kept_words(scale: str, num_cells: int, num_runs: int) -> str:
    """Return the published cells and runs in words; a drawn figure has runs only."""
    from pipelines.reporting.formats import plural

    runs = plural(num_runs, "run")
    counted = f"{num_cells} kept, by {runs}" if num_cells else f"{runs} kept"
    return counted + ("" if scale == "1" else f" at x{scale}")


def paper_show(
    table_id: _Id,
    /,
    *,
    selection: Selection = Selection(),
    measure: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    common: Common = Common(),
) -> int:
    """Show a table's setting and cells, what is refused and why, and how long it takes.

    Prepares the data of these columns in .protofl/cache; with data.download=true downloads them.

    Args:
        measure: time three rounds of each kind of run that has not finished here yet
        as_json: print an object, and nothing else, on standard output
    """
    from pipelines.papers.caveats import budget, changed
    from pipelines.papers.listing import listing
    from pipelines.papers.plan import cells, estimated_duration, refused_by_reason

    plan = selection.plan(table_id)
    if measure:
        from pipelines.orchestration.commands import operation
        from pipelines.papers.run_table import folder_of
        from pipelines.papers.timing_probe import measure as learn_times

        with operation({**plan.parameters, "tracking": {"enabled": False}}) as (how, _):
            if learn_times(plan, folder_of(plan) / "trial", how):
                plan = selection.plan(table_id)
    table = plan.table
    if as_json:
        settings = [{"columns": [c.key for c in s.columns], "parameters": s.parameters} for s in plan.settings]
        refused = [{"row": row, "column": column, "why": why} for (row, column), why in plan.refused.items()]
        print(json.dumps({"id": table.id, "settings": settings, "refused": refused}, indent=2))
        return 0
    print(f"{table.id}: {table.title}{budget(plan)}\n{table.about}\n")
    print(f"{listing(table, selection.rows, selection.columns)}\n")
    for setting in plan.settings:
        titles = ", ".join(column.title for column in setting.columns)
        print(f"{titles}: {', '.join(row.key for row in setting.rows)}{changed(setting.overrides)}")
    print(f"{sum(1 for _ in cells(table))} printed cells; {estimated_duration(plan)}")
    for reason, where in refused_by_reason(plan).items():
        print(f"not run here: {where}: {reason}")
    for note in table.notes:
        print(f"note: {note}")
    return 0


def paper_run(
    table_id: _Id,
    /,
    *,
    selection: Selection = Selection(),
    out: Out | None = None,
    flow: Flow = Flow(),
    restart: Restart = False,
    common: Common = Common(),
) -> int:
    """Run what can be run of a table, setting by setting.

    what can be run here        protofl paper show fedpa.table2 --set data.root=DIR
    one column of it            protofl paper run fedpa.table2 --columns mnist_0.1 --set data.root=DIR
    at a fifth of the rounds    protofl paper run gfpl.table1 --rounds-scale 0.2 --set data.root=DIR
    what is not published yet   protofl paper run gfpl.table1 --not-kept --part 1/2 --set data.root=DIR
    over divisions too          protofl paper run fedpa.table2 --columns mnist_0.1 --partition-seeds 42,43,44

    Reuses finished runs, also from protofl compare; the same command resumes after an interruption.

    Args:
        out: the table's folder; {date} becomes today's date (UTC) (default: runs/papers/<id>)
    """
    from pipelines.orchestration import commands
    from pipelines.orchestration.as_flow import as_flow, uses_prefect
    from pipelines.papers.run_table import folder_of, run_table
    from pipelines.papers.shard import nothing_to_do

    plan = selection.plan(table_id)
    if plan.is_kept:
        print(nothing_to_do(plan))
        return 0
    folder = out or folder_of(plan)
    with commands.operation(plan.parameters, wait=not flow.no_wait, restart=restart) as (how, _):
        if uses_prefect(flow.is_wanted, how):
            from pipelines.orchestration.paper_flow import paper_table

            # Prefect keeps parameters: the address of a store may hold a password, and the follower has it already.
            shown = [
                one for one in selection.assignments if one.partition("=")[0].strip().partition(".")[0] != "tracking"
            ]
            parameters = {**asdict(replace(selection, assignments=tuple(shown))), "id": table_id, "out": str(folder)}
            outcome = as_flow(how, paper_table, restart=restart, **parameters)
        else:
            outcome = run_table(plan, folder, how)
    commands.say_table(outcome, plan.num_runs)
    return 0


def paper_keep(
    folder: Folder,
    /,
    *,
    into: Folder | None = None,
    again: bool = False,
    common: Common = Common(),
) -> int:
    """Publish the figures of a table's finished runs, so that it can be completed elsewhere.

    Args:
        folder: folder of the table, such as runs/papers/fedpa.table2
        into: folder of published figures (default: with the code)
        again: replace published runs that have other figures now
    """
    from pipelines.papers.publish import publish
    from pipelines.papers.published import PUBLISHED_DIR

    target = into or PUBLISHED_DIR
    try:
        print(publish(folder, target, again=again))
    except OSError as error:
        path = None if error.filename is None else Path(os.fsdecode(error.filename))
        if path is None or not (target in (path, *path.parents) or path in target.parents):
            raise
        raise ConfigError(f"--into {target}: cannot be written ({error.strerror}); name another folder") from error
    return 0


def paper_claims(
    *,
    home: Folder = Path("runs/papers"),
    kept: Annotated[Path | bool, Parameter(metavar="[DIR]")] = False,
    papers: Names | None = None,
    write: Annotated[Path | None, Parameter(metavar="FILE.md", group=_ONE_OUTPUT)] = None,
    as_json: Annotated[Json, Parameter(group=_ONE_OUTPUT)] = False,
    common: Common = Common(),
) -> int:
    """Judge the papers' sentences by finished tables.

    of what was run here        protofl paper claims --papers fedpa
    of what this project ran    protofl paper claims --kept

    Args:
        home: folder of tables
        kept: use published figures for tables that were not run there, from DIR (default: those with the code)
        papers: only sentences of these papers
        write: write a page instead of printing
    """
    from pipelines.papers.catalogue import PAPERS
    from pipelines.papers.published import PUBLISHED_DIR, published_tables
    from pipelines.papers.verdicts.claim_files import sentences
    from pipelines.papers.verdicts.claims_page import markdown
    from pipelines.papers.verdicts.judge import counts, judged
    from pipelines.runs.layout import write_text

    for paper in papers or ():
        if paper not in PAPERS:
            raise ConfigError(f"--papers {paper}: not known; one of {', '.join(PAPERS)}")
    if isinstance(kept, Path) and not any(kept.glob("*.json")):
        raise DataError(f"--kept {kept}: no kept figures there; `protofl paper keep` writes them")
    which = [one for one in sentences() if papers is None or one.paper in papers]
    verdicts = judged(which, home, PUBLISHED_DIR if kept is True else kept or None)
    if write is not None:
        published = {one.table.id for one in published_tables()} if kept is True else ()
        write_text(write, markdown(verdicts, published=published))
        print(write)
    elif as_json:
        print(json.dumps([_described(one) for one in verdicts], indent=2))
    else:
        for one in verdicts:
            if one.verdict != "not run":
                held = f"{one.count('holds')} of {one.num_pairs} pairs"
                print(f"{one.sentence.id:<22} {one.verdict:<14} {one.sentence.says} ({held})")
        print(counts(verdicts))
        if not kept and all(one.verdict == "not run" for one in verdicts):
            print(f"no table in {home}; --kept asks the figures that come with protofl")
    return 0


def _described(one: Any) -> dict[str, Any]:
    return {
        "id": one.sentence.id,
        "says": one.sentence.says,
        "where": one.sentence.where,
        "verdict": one.verdict,
        "p": one.p,
        "p_holm": one.p_holm,
        "df": list(one.df),
        "stand_in": one.is_stand_in,
        "false_in_print": one.is_false_in_print,
        "flags": dict(one.sentence.flags),
        "takes": one.sentence.takes,
        "pairs": [_described_pair(pair) for pair in one.pairs],
    }


def _described_pair(one: Any) -> dict[str, Any]:
    difference = {
        key: getattr(one.difference, key) for key in ("mean", "low", "high", "n", "df", "p", "p_bh", "p_holm")
    }
    rest = {"rounds_scale": one.rounds_scale, "assignments": list(one.overrides), "reasons": list(one.reasons)}
    return {"id": one.lead.id, "says": one.lead.says, "by": one.lead.by, "verdict": one.verdict, **difference, **rest}
