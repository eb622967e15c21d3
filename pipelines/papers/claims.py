"""What a table's runs say of what a paper claims (:mod:`pipelines.papers.claim_files`).

A claim *holds* if the 95 % interval of the difference lies above ``by``, *does not hold* if it lies below it, and is
*undecided* if it contains it, or if there is no interval. Interval: paired by seed and division, over divisions where
there are several, else over seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.papers.catalogue import table_named
from pipelines.papers.claim_files import Claim, claims, difference_of
from pipelines.papers.keeping import HERE, kept_tables, made_by
from pipelines.papers.plan import plan
from pipelines.papers.results import TableResults, lead, paper_tables, results, title
from pipelines.papers.runs import asked_of
from pipelines.reporting.claims import Judgement, judgement
from pipelines.reporting.statistics import PairedDifference, paired_difference
from pipelines.reporting.tables import markdown_table


@dataclass(frozen=True)
class Judged:
    """A claim and what was found.

    Attributes:
        claim: which. verdict: of it. difference: of ``better`` to ``than``; of costs the other way round.
        seeds: over which. divisions: over which, by the seeds that drew them; runs' fingerprints tell them apart.
        rounds_scale: of the paper's rounds.
    """

    claim: Claim
    verdict: Judgement
    difference: PairedDifference
    seeds: tuple[int, ...] = ()
    divisions: tuple[int, ...] = ()
    rounds_scale: float = 1.0


def judge(claim: Claim, found: TableResults) -> Judged:
    """A claim by the results of its table."""
    difference = difference_of(claim, found)
    pairs = [pair for pair in difference.by_seed if isinstance(pair, tuple)]
    divisions, seeds = (tuple(sorted({pair[place] for pair in pairs})) for place in (0, 1))
    return Judged(claim, judgement(difference, claim.by), difference, seeds, divisions, found.plan.asked.rounds_scale)


def judged(which: Sequence[Claim], home: Path | None, kept: Path | None = None) -> list[Judged]:
    """Claims by finished tables: at the paper's budget where that was run, else at the largest share of its rounds.

    A table in a folder stands above the same that is kept; figures of the two are never put together.

    Args:
        which: claims.
        home: with a folder per table, as ``protofl paper run`` leaves them; None: none.
        kept: folder of kept tables (:mod:`pipelines.papers.keeping`); None: none.

    Raises:
        DataError: a file there is damaged.
    """
    known: dict[str, list[TableResults]] = {}
    stored = kept_tables(kept) if kept is not None else []
    answers = []
    for claim in which:
        if claim.table not in known:
            known[claim.table] = [] if home is None else _results_of(home, claim.table)
            known[claim.table] += [one.results() for one in stored if one.table.id == claim.table]
        tried = [judge(claim, found) for found in known[claim.table]]
        measured = [one for one in tried if one.verdict != "not run"]
        none = Judged(claim, "not run", paired_difference({}, {}))
        answers.append(max(measured, key=lambda one: one.rounds_scale, default=none))
    return answers


def _results_of(home: Path, table: str) -> list[TableResults]:
    """Of every budget with which a table was run."""
    found = []
    for folder in sorted(home.glob(f"{table}*")):
        share = folder.name.removeprefix(table).removeprefix("-x")
        if (folder / "table.json").exists() and (not share or share.replace(".", "", 1).isdigit()):
            found.append(results(plan(table_named(table), asked_of(folder), look_at_data=False), folder))
    return found


def counts(found: Sequence[Judged]) -> str:
    """How many there are of each verdict, in a sentence."""
    verdicts: Mapping[Judgement, str] = {
        "holds": "hold",
        "does not hold": "do not hold",
        "undecided": "undecided",
        "not run": "not run",
    }
    words = (f"{sum(one.verdict == verdict for one in found)} {word}" for verdict, word in verdicts.items())
    return f"{len(found)} claims: {', '.join(words)}."


def kept_page() -> str:
    """``docs/claims.md``: of the figures that this project measured itself, and keeps with its code."""
    stored = kept_tables()
    lines = [markdown(judged(claims(), None, HERE)), "# The figures", "", made_by(stored) if stored else "None.", ""]
    for one in stored:
        found = one.results()
        besides = sorted({f"`{key}={value}`" for run in one.runs for key, value in run.besides.items()})
        lines += [f"## {title(found)}", "", *lead(found), ""]
        lines += [f"Set beside the table's own values: {', '.join(besides)}.", ""] if besides else []
        for table in paper_tables(found, measured=True):
            lines += [f"### {table.title}", *markdown_table(table)[1:]]
    return "\n".join(lines)


def markdown(found: Sequence[Judged]) -> str:
    """By paper every claim that runs say something of, and how many of which table have still to be run."""
    lines = [
        "# What the papers claim, and what holds",
        "",
        "Written from figures of finished tables (`protofl paper run`). A claim holds if the 95 % interval of the",
        "difference lies above the lead that is claimed, does not hold if it lies below it, and is undecided if it",
        "contains it, or where there is none. Differences are paired by seed and division. Where divisions were asked",
        "for, the interval is over them, and one alone has none; else it is over seeds, each of which divides the data",
        "anew, or which share one division: as many as are told. Budget: share of the paper's rounds.",
        "",
        counts(found),
        "",
    ]
    for paper in dict.fromkeys(one.claim.id.partition(".")[0] for one in found):
        own = [one for one in found if one.claim.id.partition(".")[0] == paper]
        measured = [one for one in own if one.verdict != "not run"]
        lines += [f"## {paper}", ""]
        if measured:
            lines += ["| claim | where | verdict | difference [95 %] | seeds | divisions | budget |"]
            lines += ["| :--- | :--- | :--- | ---: | ---: | ---: | ---: |", *map(_line, measured), ""]
        open_ = Counter(one.claim.table for one in own if one.verdict == "not run")
        if open_:
            lines += [f"Not run: {', '.join(f'{number} of `{table}`' for table, number in open_.items())}.", ""]
    return "\n".join(lines)


def _line(one: Judged) -> str:
    difference = one.difference
    if difference.mean is None:
        return f"| {one.claim.says} | {one.claim.where} | **{one.verdict}** | | | | |"
    interval = "" if difference.low is None else f" [{difference.low:+.2f}, {difference.high:+.2f}]"
    seeds, divisions = len(one.seeds), len(one.divisions)
    return (
        f"| {one.claim.says} | {one.claim.where} | **{one.verdict}** | {difference.mean:+.2f}{interval} | {seeds} | "
        f"{divisions} | {one.rounds_scale:g} |"
    )
