"""Verdicts on a paper's claims from a table's runs (:mod:`pipelines.papers.verdicts.claim_files`).

A claim *holds* if the 95 % interval of the difference is above ``by``, *does not hold* if it is below, and is
*undecided* if it contains ``by`` or there is no interval, such as when all runs of a row diverged. Differences are
paired by seed and partition. With several partitions the interval is over them; with one it is over seeds, and the
claim holds, or does not, *on one division*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.papers.catalogue import table_named
from pipelines.papers.caveats import mark, overrides_of
from pipelines.papers.plan import plan_table
from pipelines.papers.published import published_tables
from pipelines.papers.results import TableResults, results
from pipelines.papers.runs import table_file
from pipelines.papers.verdicts.claim_files import Claim, claims, difference_of
from pipelines.reporting.claims import Judgement, judgement
from pipelines.reporting.formats import format_difference
from pipelines.reporting.statistics import PairedDifference, paired_difference
from pipelines.reporting.tables import Column, Table


@dataclass(frozen=True)
class JudgedClaim:
    """A claim and its verdict.

    Attributes:
        difference: ``better`` minus ``than``; for costs reversed.
        seeds, divisions: of its runs, divisions as partition seeds. rounds_scale: fraction of the paper's rounds.
        lost: texts on rows with runs without a result. overrides: assignments that override the table's values.
    """

    claim: Claim
    verdict: Judgement
    difference: PairedDifference
    seeds: tuple[int, ...] = ()
    divisions: tuple[int, ...] = ()
    rounds_scale: float = 1.0
    lost: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def judge(claim: Claim, results: TableResults) -> JudgedClaim:
    """Judge a claim by the results of its table."""
    difference = difference_of(claim, results)
    pairs = [pair for pair in difference.by_seed if isinstance(pair, tuple)]
    divisions, seeds = (tuple(sorted({pair[place] for pair in pairs})) for place in (0, 1))
    cells = [results.cells[place] for place in claim.weights]
    lost = tuple(dict.fromkeys(f"{cell.row.title}: {cell.lost}" for cell in cells if cell.failed))
    verdict, scale = judgement(difference, claim.by), results.plan.selection.rounds_scale
    if verdict == "not run" and lost and all(cell.ours.n or cell.failed for cell in cells):
        verdict = "undecided"  # another run would fail as well
    columns = [results.plan.table.column(key) for key in claim.columns]
    overrides = tuple(dict.fromkeys(one for column in columns for one in overrides_of(results.plan, column)))
    return JudgedClaim(claim, verdict, difference, seeds, divisions, scale, lost, overrides)


def judged(claims_asked: Sequence[Claim], home: Path | None, published: Path | None = None) -> list[JudgedClaim]:
    """Judge claims by finished tables, at the budget nearest to the paper's; smaller ones before larger ones.

    Args:
        home: a folder of ``protofl paper run`` tables, which precede kept ones. published: a folder of kept tables.
    """
    known: dict[str, list[TableResults]] = {}
    stored = published_tables(published) if published is not None else []
    answers = []
    for claim in claims_asked:
        if claim.table not in known:
            known[claim.table] = [] if home is None else _results_of(home, claim.table)
            known[claim.table] += [one.results() for one in stored if one.table.id == claim.table]
        tried = [judge(claim, found) for found in known[claim.table]]
        measured = [one for one in tried if one.verdict != "not run"]
        none = JudgedClaim(claim, "not run", paired_difference({}, {}))
        answers.append(max(measured, key=lambda one: _closeness(one.rounds_scale), default=none))
    return answers


def _closeness(scale: float) -> tuple[bool, bool, float]:
    """Return a sort key for budgets: the paper's own, then smaller, then larger ones, the nearest first."""
    return scale == 1, scale < 1, scale if scale < 1 else -scale


def _results_of(home: Path, table: str) -> list[TableResults]:
    """Return the results of a table at every budget that was run."""
    results_by_budget = []
    for folder in sorted(home.glob(f"{table}*")):
        ending = folder.name.removeprefix(table)
        if (folder / "table.json").exists() and (not ending or _is_share(ending)):
            results_by_budget.append(
                results(plan_table(table_named(table), table_file(folder).selection, with_data=False), folder)
            )
    return results_by_budget


def _is_share(ending: str) -> bool:
    """Return whether a folder name's suffix is a budget, such as ``-x0.1`` or ``-x1e-05``."""
    try:
        return ending.startswith("-x") and float(ending.removeprefix("-x")) > 0
    except ValueError:
        return False


_MEANING = (
    "holds: the 95 % interval of the difference, paired by seed and division, lies above the lead that is claimed; "
    "does not hold: below it; undecided: it contains it, or there is no interval."
)


def verdict_table(results: TableResults) -> Table | None:
    """Return a table of the decided claims; None without any."""
    every = [judge(claim, results) for claim in claims() if claim.table == results.plan.table.id]
    judged = [one for one in every if one.verdict != "not run"]
    if not judged:
        return None
    return Table(
        f"What is claimed, and what these runs say of it{mark(results.plan)}",
        (
            Column("claim", [one.claim.says for one in judged], is_text=True),
            Column("verdict", [one.verdict for one in judged], is_text=True, meaning=_MEANING),
            Column("claimed lead", [f"{one.claim.by:g}" for one in judged], is_text=True),
            Column("lead [95 % interval]", [format_difference(one.difference, "points") for one in judged]),
            Column("pairs of runs", [one.difference.n for one in judged]),
            Column("seeds", [len(one.seeds) for one in judged]),
            Column("divisions", [len(one.divisions) for one in judged]),
            Column("where", [one.claim.where for one in judged], is_text=True),
        ),
    )
