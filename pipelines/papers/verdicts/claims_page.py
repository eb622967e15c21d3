"""Page of the papers' claims with verdicts: ``docs/claims.md``, and ``protofl paper claims --write``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from pipelines.papers.catalogue import PaperTable, table_named
from pipelines.papers.caveats import changed
from pipelines.papers.published import PUBLISHED_DIR, PublishedTable, origins, published_tables
from pipelines.papers.results import paper_tables, title
from pipelines.papers.runs import describe_pairs
from pipelines.papers.verdicts.claim_files import Claim, claims
from pipelines.papers.verdicts.judge import JudgedClaim, judged
from pipelines.reporting.claims import Judgement
from pipelines.reporting.tables import markdown_table

_VERDICTS: Mapping[Judgement, str] = {
    "holds": "hold",
    "holds on one division": "hold on one division",
    "does not hold": "do not hold",
    "does not hold on one division": "do not hold on one division",
    "undecided": "undecided",
    "not run": "not run",
}
_HEAD = """\
# What the papers claim, and what holds

Computed from finished tables (`protofl paper run`). A claim **holds** if the 95 % interval of the paired difference is
above the claimed lead, and does **not** hold if it is below. It is **undecided** if the interval contains the lead, or
if all runs of a method diverged. The runs of a pair have the same seed and division of the data. With several divisions
the interval is over their means. With one it is over seeds, and the verdict is **on one division**: that one only.

Claims that were not run need hours of a machine, or images. Each command runs the missing ones
(`--set data.root=DIR`: where the images are; `--part 1/2`: half of the runs, for one of two machines)."""


def counts(claims_judged: Sequence[JudgedClaim]) -> str:
    """Return a sentence with the number of claims per verdict."""
    words = (f"{sum(one.verdict == verdict for one in claims_judged)} {word}" for verdict, word in _VERDICTS.items())
    return f"{len(claims_judged)} claims: {', '.join(words)}."


def published_page() -> str:
    """Return ``docs/claims.md``, from the figures kept with the code."""
    stored = published_tables()
    lines = [
        markdown(judged(claims(), None, PUBLISHED_DIR), published={one.table.id for one in stored}),
        "## Measured figures",
        "",
        "Mean ± sample standard deviation over runs, next to the printed figures. `protofl paper show TABLE` prints",
        "what the paper leaves open and how it is read here.",
        "",
        origins(stored) if stored else "None.",
        "",
    ]
    for one in stored:
        lines += _figures(one)
    return "\n".join(lines)


def _figures(one: PublishedTable) -> Iterator[str]:
    """Yield a kept table's lines: what is measured, by which runs, and the figures."""
    results = one.results()
    overrides = sorted({f"`{each}`" for run in one.runs for each in run.assignments})
    runs = dict.fromkeys(describe_pairs(cell.pairs) for cell in results.cells.values() if cell.pairs)
    yield from (f"### {title(results)}", "", results.plan.table.about, "")
    yield from ("Runs: " + "; ".join([*runs, *([f"set: {', '.join(overrides)}"] if overrides else [])]) + ".", "")
    yield from markdown_table(paper_tables(results, measured=True)[0])[2:]


def markdown(claims_judged: Sequence[JudgedClaim], *, published: Collection[str] = ()) -> str:
    """Return the decided claims by paper, others' measurements, and the commands for claims that are not run.

    ``published`` are tables with figures kept in the code, so the commands skip their runs.
    """
    lines = [_HEAD, "", counts(claims_judged), ""]
    for paper in dict.fromkeys(one.claim.id.partition(".")[0] for one in claims_judged):
        of_paper = [one for one in claims_judged if one.claim.id.partition(".")[0] == paper]
        measured = [one for one in of_paper if one.verdict != "not run"]
        lines += [f"## {paper}", ""]
        for where in dict.fromkeys(one.claim.where for one in measured):
            lines += [f"{where}:", ""] if where else []
            lines += ["| claim | verdict, difference [95 %] | pairs, divisions |", "| :--- | :--- | ---: |"]
            lines += [*_rows([one for one in measured if one.claim.where == where]), ""]
        for id in dict.fromkeys(one.claim.table for one in measured):
            if remark := table_named(id).beside:
                lines += [f"Another measurement of `{id}`: {remark}", ""]
        waiting = list(_not_run([one.claim for one in of_paper if one.verdict == "not run"], published))
        lines += ["Not run:", "", *waiting, ""] if waiting else []
    return "\n".join(lines)


def _rows(measured: Sequence[JudgedClaim]) -> Iterator[str]:
    """Yield the rows of a table of verdicts; claims that differ in the rival alone share a row."""
    groups: dict[str, list[JudgedClaim]] = {}
    for one in measured:
        groups.setdefault(_without_rival(one.claim), []).append(one)
    for says, group in groups.items():
        runs = "; ".join(dict.fromkeys(map(_runs, group)))
        if len(group) == 1:
            yield f"| {group[0].claim.says} | {_verdict(group[0])} | {runs} |"
        else:
            verdicts = (f"{_rival(one.claim)} {_verdict(one)}" for one in group)
            yield f"| {says} | {'; '.join(verdicts)} | {runs} |"


def _rival(claim: Claim) -> str:
    """Return the title of the only row that a claim is against; empty if there are several or none."""
    return table_named(claim.table).row(claim.than[0]).title if len(claim.than) == 1 else ""


def _without_rival(claim: Claim) -> str:
    before, rival, after = claim.says.rpartition(f" {_rival(claim)}") if _rival(claim) else ("", "", "")
    return f"{before} …{after}" if rival else claim.says


def _verdict(one: JudgedClaim) -> str:
    difference, lost = one.difference, f"({', '.join(one.lost)})" if one.lost else ""
    interval = "" if difference.low is None else f" [{difference.low:+.2f}, {difference.high:+.2f}]"
    shown = "" if difference.mean is None else f"{difference.mean:+.2f}{interval}"
    return " ".join(words for words in (f"**{one.verdict}**", shown, lost) if words)


def _runs(one: JudgedClaim) -> str:
    budget = "" if one.rounds_scale == 1 else f", {one.rounds_scale:g} of the rounds"
    return f"{one.difference.n}, {len(one.divisions)}{budget}{changed(one.overrides)}"


def _not_run(claims_open: Sequence[Claim], published: Collection[str]) -> Iterator[str]:
    """Yield per table the number of open claims and their command, and the reasons why others cannot be run."""
    for id in dict.fromkeys(claim.table for claim in claims_open):
        table = table_named(id)
        reasons: dict[str, int] = {}
        columns: set[str] = set()
        open_ = 0
        for claim in claims_open:
            if claim.table == id:
                if (why := _why_never(table, claim)) is None:
                    open_ += 1
                    columns |= {*claim.columns}
                else:
                    reasons[why] = reasons.get(why, 0) + 1
        if open_:
            wanted = [column.key for column in table.columns if column.key in columns]
            part = "" if len(wanted) == len(table.columns) else f" --columns {','.join(wanted)}"
            option = " --not-kept" if id in published else ""
            yield f"- {open_} of `{id}`: `protofl paper run {id}{part}{option}`"
        for why, number in reasons.items():
            yield f"- {number} of `{id}` cannot be run: {why}"


def _why_never(table: PaperTable, claim: Claim) -> str | None:
    """Return the reason of the table's file why a claim cannot be decided here; None if it can."""
    for key, column in claim.weights:
        row = table.row(key)
        why = f"{row.title} is not built" if row.method is None else table.why_missing(row, table.column(column))
        if why is not None:
            return why
    return None
