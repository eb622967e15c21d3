"""``protofl paper``: tables and claims of the five papers. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flcore.core.errors import ConfigError, DataError
from pipelines.cli import options
from pipelines.cli.arguments import Parser, names, positive, whole_numbers

_SHOW_EPILOG = """\
Prepares the data of these columns in .protofl/cache; with data.download=true downloads them.
"""
_RUN_EPILOG = """\
what can be run here        protofl paper show fedpa.table2 --set data.root=DIR
one column of it            protofl paper run fedpa.table2 --columns mnist_0.1 --set data.root=DIR
at a fifth of the rounds    protofl paper run gfpl.table1 --rounds-scale 0.2 --set data.root=DIR
what is not published yet   protofl paper run gfpl.table1 --not-kept --part 1/2 --set data.root=DIR
over divisions too          protofl paper run fedpa.table2 --columns mnist_0.1 --partition-seeds 42,43,44

Reuses finished runs, also those of protofl compare; the same command resumes after an interruption.
"""

_CLAIMS_EPILOG = """\
of what was run here        protofl paper claims --papers fedpa
of what this project ran    protofl paper claims --kept
"""
_WITH_THE_CODE = ""


def add_to(group: Callable[[str, str, str], Callable[..., Parser]]) -> None:
    """Add the command and its subcommands.

    Args:
        group: makes a command with subcommands.
    """
    add = group(
        "paper", "papers", "Run tables of the five papers, next to the printed figures, and judge their claims."
    )
    about = "List all tables: printed figures, how many can be configured here, how many are measured and published."
    listing = add("list", list_, about)
    options.as_json(listing, "a list of objects")

    shown = add(
        "show",
        show,
        "Show a table's setting and cells, what is refused and why, and how long it takes.",
        _SHOW_EPILOG,
    )
    _which(shown)
    about = "time three rounds of each kind of run that has not finished here yet"
    shown.add_argument("--measure", action="store_true", help=about)
    options.as_json(shown, "an object")

    run = add("run", run_, "Run what can be run of a table, setting by setting.", _RUN_EPILOG)
    _which(run)
    options.out(run, "runs/papers/<id>", "the table's folder")
    options.orchestration(run)

    keeping = add(
        "keep", keep_, "Publish the figures of a table's finished runs, so that it can be completed elsewhere."
    )
    keeping.add_argument(
        "folder", type=Path, metavar="DIR", help="folder of the table, such as runs/papers/fedpa.table2"
    )
    about = "folder of published figures (default: with the code)"
    keeping.add_argument("--into", type=Path, metavar="DIR", help=about)
    about = "replace published runs whose figures differ now"
    keeping.add_argument("--again", action="store_true", help=about)

    claims = add("claims", claims_, "Judge the papers' claims by finished tables.", _CLAIMS_EPILOG)
    claims.add_argument(
        "--home", type=Path, default=Path("runs/papers"), metavar="DIR", help="folder of tables (default: runs/papers)"
    )
    about = "use published figures for tables that were not run there, from DIR (default: those with the code)"
    claims.add_argument("--kept", nargs="?", const=_WITH_THE_CODE, metavar="DIR", help=about)
    claims.add_argument("--papers", type=names, metavar="A,B,...", help="only claims of these papers")
    claims.add_argument("--write", type=Path, metavar="FILE.md", help="write a page instead of printing")
    options.as_json(claims, "a list of objects")


def _which(parser: Parser) -> None:
    parser.add_argument("id", metavar="ID", help="see 'protofl paper list'")
    parser.add_argument("--rows", type=names, metavar="A,B,...", help="default: all")
    parser.add_argument("--columns", type=names, metavar="A,B,...", help="default: all")
    parser.add_argument("--seeds", type=whole_numbers, default=(0, 1, 2), metavar="0,1,...", help="default: 0,1,2")
    about = "seeds of partitions, each with every seed (default: the table's)"
    parser.add_argument("--partition-seeds", type=whole_numbers, metavar="0,1,...", help=about)
    about = "share of the printed rounds to run, marked in every output (default: 1)"
    parser.add_argument("--rounds-scale", type=positive, default=1.0, metavar="F", help=about)
    about = "every N-th run from the K-th on: N machines share the table; then use 'keep'"
    parser.add_argument("--part", metavar="K/N", help=about)
    about = "skip runs with published figures (see 'paper list')"
    parser.add_argument("--not-kept", action="store_true", help=about)
    about = "refuse runs known to take longer on one core (default: none)"
    parser.add_argument("--max-hours", type=positive, metavar="H", help=about)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="set a value in all cells, such as data.root=DIR; repeatable",
    )


def list_(arguments: argparse.Namespace) -> int:
    """Print the tables of papers (``protofl paper list``)."""
    from pipelines.papers.catalogue import tables
    from pipelines.papers.kept import kept_tables
    from pipelines.papers.plan import Asked, cells, plan

    kept: dict[str, dict[str, tuple[int, int]]] = {}  # by table and share of its rounds: printed cells filled, runs
    for one in kept_tables():
        kept.setdefault(one.table.id, {})[f"{one.rounds_scale:g}"] = one.results().num_measured, len(one.runs)
    described: list[dict[str, Any]] = []
    for table in tables().values():
        refused = plan(table, Asked(), look_at_data=False).refused
        printed = [(row.key, column.key) for row, column in cells(table)]
        budgets = kept.get(table.id, {})
        described.append(
            {
                "id": table.id,
                "title": table.title,
                "printed": len(printed),
                "configurable": sum(key not in refused for key in printed),
                "kept": {scale: num_cells for scale, (num_cells, _) in budgets.items()},
                "kept_runs": {scale: num_runs for scale, (_, num_runs) in budgets.items()},
            }
        )
    if arguments.json:
        print(json.dumps(described, indent=2))
        return 0
    for found in described:
        of_budgets = [_kept_words(scale, *counts) for scale, counts in kept.get(found["id"], {}).items()]
        title = found["title"] + (f" ({', '.join(of_budgets)})" if of_budgets else "")
        # A drawn figure has no printed values to compare with.
        count = f"{found['configurable']:>3} of {found['printed']:>3} cells" if found["printed"] else f"{'drawn':>16}"
        print(f"{found['id']:<16} {count}  {title}")
    total = (sum(found[key] for found in described) for key in ("configurable", "printed"))
    print("{:<16} {:>3} of {:>3} cells".format("all", *total))
    return 0


def _kept_words(scale: str, num_cells: int, num_runs: int) -> str:
    """Return the published cells and runs in words; a drawn figure has runs only."""
    from pipelines.reporting.formats import plural

    runs = plural(num_runs, "run")
    told = f"{num_cells} kept, by {runs}" if num_cells else f"{runs} kept"
    return told + ("" if scale == "1" else f" at x{scale}")


def show(arguments: argparse.Namespace) -> int:
    """Print a table's settings (``protofl paper show``)."""
    from pipelines.papers.listing import listing
    from pipelines.papers.marks import budget, changed
    from pipelines.papers.plan import cells, refused_by_reason, told_length
    from pipelines.papers.share import plan_of_share

    planned = partial(plan_of_share, _table(arguments), _asked(arguments), arguments.part, not_kept=arguments.not_kept)
    found = planned()
    if arguments.measure:
        from pipelines.orchestration.papers import learn_times

        found = planned() if learn_times(found) else found
    table = found.table
    if arguments.json:
        settings = [{"columns": [c.key for c in s.columns], "parameters": s.parameters} for s in found.settings]
        refused = [{"row": row, "column": column, "why": why} for (row, column), why in found.refused.items()]
        print(json.dumps({"id": table.id, "settings": settings, "refused": refused}, indent=2))
        return 0
    print(f"{table.id}: {table.title}{budget(found)}\n{table.about}\n")
    print(f"{listing(table, arguments.rows, arguments.columns)}\n")
    for setting in found.settings:
        titles = ", ".join(column.title for column in setting.columns)
        print(f"{titles}: {', '.join(row.key for row in setting.rows)}{changed(setting.besides)}")
    print(f"{sum(1 for _ in cells(table))} printed cells; {told_length(found)}")
    for reason, where in refused_by_reason(found).items():
        print(f"not run here: {where}: {reason}")
    for note in table.notes:
        print(f"note: {note}")
    return 0


def run_(arguments: argparse.Namespace) -> int:
    """Run a table's settings (``protofl paper run``)."""
    from pipelines.orchestration.papers import run_paper

    run_paper(
        arguments.id,
        _asked(arguments),
        arguments.out,
        part=arguments.part,
        not_kept=arguments.not_kept,
        prefect=arguments.prefect,
        restart=arguments.restart,
        wait=arguments.wait,
    )
    return 0


def keep_(arguments: argparse.Namespace) -> int:
    """Publish a table's results (``protofl paper keep``)."""
    from pipelines.papers.keeping import keep
    from pipelines.papers.kept import HERE

    into = arguments.into or HERE
    try:
        print(keep(arguments.folder, into, again=arguments.again))
    except OSError as error:
        if error.filename is None or not _is_about(Path(os.fsdecode(error.filename)), into):
            raise
        raise ConfigError(f"--into {into}: cannot be written ({error.strerror}); name another folder") from error
    return 0


def _is_about(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder, inside it, or one of its parents."""
    return folder in (path, *path.parents) or path in folder.parents


def claims_(arguments: argparse.Namespace) -> int:
    """Judge the claims of papers (``protofl paper claims``)."""
    from pipelines.papers.catalogue import PAPERS
    from pipelines.papers.kept import HERE, kept_tables
    from pipelines.papers.verdicts.claim_files import claims
    from pipelines.papers.verdicts.claims_page import counts, markdown
    from pipelines.papers.verdicts.judged import judged
    from pipelines.runs.layout import write_text

    for paper in arguments.papers or ():
        if paper not in PAPERS:
            raise ConfigError(f"--papers {paper}: not known; one of {', '.join(PAPERS)}")
    if arguments.kept and not any(Path(arguments.kept).glob("*.json")):
        raise DataError(f"--kept {arguments.kept}: no kept figures there; `protofl paper keep` writes them")
    which = [claim for claim in claims() if arguments.papers is None or claim.id.partition(".")[0] in arguments.papers]
    found = judged(which, arguments.home, None if arguments.kept is None else Path(arguments.kept or HERE))
    if arguments.write is not None:
        kept = {one.table.id for one in kept_tables()} if arguments.kept == _WITH_THE_CODE else ()
        write_text(arguments.write, markdown(found, kept=kept))
        print(arguments.write)
    elif arguments.json:
        print(json.dumps([_described(one) for one in found], indent=2))
    else:
        for one in found:
            if one.verdict != "not run":
                print(f"{one.claim.id:<14} {one.verdict:<14} {one.claim.says} ({_measured(one)})")
        print(counts(found))
        if arguments.kept is None and all(one.verdict == "not run" for one in found):
            print(f"no table in {arguments.home}; --kept asks the figures that come with protofl")
    return 0


def _measured(one: Any) -> str:
    """Return the evidence for a verdict: the difference and its interval, numbers of runs, and the budget."""
    from pipelines.papers.marks import changed
    from pipelines.reporting.formats import format_difference, plural

    counted = ((one.difference.n, "pair"), (len(one.seeds), "seed"), (len(one.divisions), "division"))
    budget = "" if one.rounds_scale == 1 else f"; {one.rounds_scale:g} of the rounds"
    over = ", ".join(plural(number, word) for number, word in counted)
    return f"{format_difference(one.difference, 'points')}; {over}{budget}{changed(one.besides)}"


def _described(one: Any) -> dict[str, Any]:
    difference = one.difference
    return {
        "id": one.claim.id,
        "says": one.claim.says,
        "verdict": one.verdict,
        "difference": difference.mean,
        "low": difference.low,
        "high": difference.high,
        "n": difference.n,
        "seeds": list(one.seeds),
        "divisions": list(one.divisions),
        "rounds_scale": one.rounds_scale,
        "assignments": list(one.besides),
    }


def _table(arguments: argparse.Namespace) -> Any:
    from pipelines.papers.catalogue import table_named

    return table_named(arguments.id)


def _asked(arguments: argparse.Namespace) -> Any:
    from pipelines.cli.commands import refuse_without_effect
    from pipelines.papers.plan import Asked
    from pipelines.plan.params import override

    refuse_without_effect(arguments)
    override({}, arguments.assignments)  # refuse contradictions once, not for every cell
    return Asked(
        arguments.rows,
        arguments.columns,
        tuple(arguments.seeds),
        None if arguments.partition_seeds is None else tuple(arguments.partition_seeds),
        arguments.rounds_scale,
        tuple(arguments.assignments),
        arguments.max_hours,
    )
