"""Page of the papers' sentences with verdicts: ``docs/claims.md``, and ``protofl paper claims --write``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pipelines.papers.catalogue import PAPERS, PaperTable, table_named
from pipelines.papers.published import PUBLISHED_DIR, PublishedTable, origins, published_tables
from pipelines.papers.results import paper_tables, title
from pipelines.papers.runs import describe_pairs
from pipelines.papers.verdicts.claim_files import FLAGS, Lead, Sentence, sentences
from pipelines.papers.verdicts.judge import PLURAL, JudgedLead, JudgedSentence, counts, judged
from pipelines.reporting.formats import format_p, listed, plural
from pipelines.reporting.tables import markdown_table

_HEAD = """\
# What the papers claim, and what holds

Claims of five papers, and sentences on our own ProtoLDA that this project set out to test, judged by pairs of finished
runs (`protofl paper run`). Many ran in a smaller setting (\\*: a stand-in, described at its figures). Why a verdict
might be due to this project is said in a few words beside it, with details at the sentence. Privacy, proofs and what
has no figure of ours (FedPG's balance of classes) are not judged. `protofl paper claims --kept` prints the verdicts,
and `make docs` writes this page."""
_RULES = """\
A sentence **holds** if all its pairs hold (more than half, where most are needed), **does not hold** if too many fail
for the others to suffice, and is **undecided** otherwise. Where a sentence can be read in several ways, each
reading has a verdict.

A pair is the lead of one row over another, positive in the claim's favour, over the seeds and divisions of the data
that both have run. It is decided if the lead is above or below the claimed one with p ≤ 0.05, adjusted for all pairs
of the paper (Benjamini-Hochberg; intervals are not adjusted); **Holm** says that it also survives the stricter
adjustment. Other readings, and sentences declared when their figures were known, are adjusted together with all
pairs of the paper and change no other sentence's p, so a pair may have another p there. Degrees of freedom (df) count
divisions, not seeds. A sentence has the largest p that its verdict needs. Traffic is arithmetic: both figures, and no
p. **Withdrawn** pairs were run at other values than their table's, or fail with our defaults where the authors' values
have not run. A rival with diverged runs is **no rival**: its pairs do not count. **False in print**: the paper's own
figures contradict it."""
_DECIDED = ("holds", "does not hold")
_FLAGS = "Why it might be us: " + "; ".join(f"**{flag}**, {meaning}" for flag, meaning in FLAGS.items()) + "."


def published_page() -> str:
    """Return ``docs/claims.md``, from the figures kept with the code."""
    stored = published_tables()
    lines = [
        markdown(judged(sentences(), None, PUBLISHED_DIR), published={one.table.id for one in stored}),
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


def markdown(verdicts: Sequence[JudgedSentence], *, published: Collection[str] = ()) -> str:
    """Return an overview, the table of sentences, then by paper pairs, others' measurements, commands for missing runs.

    ``published`` are tables with figures kept in the code, so the commands skip their runs.
    """
    lines = [_HEAD, "", counts(verdicts), "", *_overview(verdicts), "", _RULES, "", _FLAGS, ""]
    for verdict in PLURAL:
        if of_verdict := [one for one in verdicts if one.verdict == verdict]:
            beside = "evidence" if verdict in _DECIDED else "what it takes"
            lines += [f"**{verdict.capitalize()}:**", ""]
            lines += [f"| sentence | pairs that hold | {beside} | why it might be us |"]
            lines += ["| :--- | :--- | :--- | :--- |", *map(_summary, of_verdict), ""]
    for paper in PAPERS:
        of_paper = [one for one in verdicts if one.sentence.paper == paper]
        pairs = [pair for one in of_paper for pair in (*one.pairs, *one.others)]
        lines += [f"## {paper}", ""] if of_paper else []
        for one in of_paper:
            lines += _behind(one)
        for id in dict.fromkeys(pair.lead.table for pair in pairs if pair.verdict != "not run"):
            if remark := table_named(id).beside:
                lines += [f"Another measurement of `{id}`: {remark}", ""]
        waiting = list(_not_run([pair.lead for pair in pairs if pair.verdict == "not run"], published))
        lines += ["Not run:", "", *waiting, ""] if waiting else []
    return "\n".join(lines)


def _overview(verdicts: Sequence[JudgedSentence]) -> Iterator[str]:
    """Yield a table with the short names of each paper's sentences by verdict; a verdict without one has no column."""
    columns = [verdict for verdict in PLURAL if any(one.verdict == verdict for one in verdicts)]
    yield f"| paper | {' | '.join(columns)} |"
    yield "| :--- |" + " :--- |" * len(columns)
    for paper in PAPERS:
        names: dict[str, list[str]] = {verdict: [] for verdict in columns}
        for one in verdicts:
            if one.sentence.paper == paper:
                mark = r"\*" if one.is_stand_in else ""
                names[one.verdict].append(one.sentence.id.partition(".")[2].replace("_", " ") + mark)
        if any(names.values()):
            yield f"| [{paper}](#{paper}) | {' | '.join(', '.join(each) or '–' for each in names.values())} |"


def _summary(one: JudgedSentence) -> str:
    """Return a sentence's line in the table of its verdict."""
    sentence = one.sentence
    pairs = [f"{one.count('holds')} of {one.num_pairs}" + ", most needed" * (sentence.holds_if == "most")]
    pairs += [f"{one.count(key)} {word}" for key, word in PLURAL.items() if key != "holds" and one.count(key)]
    beside = _evidence(one) if one.verdict in _DECIDED else sentence.takes
    says = f"{sentence.says} ([{sentence.id}](#{_anchor(sentence)})){_false_in_print(one)}"
    return f"| {says} | {'; '.join(pairs)} | {beside} | {', '.join(_flags(one))} |"


def _anchor(sentence: Sentence) -> str:
    """Return the anchor of a sentence's heading."""
    return sentence.id.replace(".", "")


def _evidence(one: JudgedSentence) -> str:
    """Return p, degrees of freedom and the rows that are ahead."""
    words = ["arithmetic"]
    if one.p is not None and one.df:
        words = [f"p {format_p(one.p)}{' (Holm too)' if one.survives_holm else ''}, df {listed(one.df)}"]
    behind = [pair.lead for pair in one.pairs if pair.verdict.startswith("does not hold")]
    rivals = dict.fromkeys(_rival(lead) for lead in behind if (lead.by, lead.times) == (0, 1) and _rival(lead))
    words += [f"ahead of it: {listed(rivals)}"] if rivals else []
    return "; ".join(words)


def _false_in_print(one: JudgedSentence) -> str:
    printed, all_printed = one.printed
    why = one.sentence.in_print or f"{all_printed - printed} of {all_printed} printed pairs contradict it"
    return f"; **false in print** ({why})" if one.is_false_in_print else ""


def _flags(one: JudgedSentence) -> dict[str, str]:
    """Return why a verdict might be due to this project, in a few words with details: as declared, and by the runs."""
    flags = dict(one.sentence.flags)
    if one.sentence.late:
        flags["declared late"] = "when its figures were known"
    if one.is_stand_in:
        flags["stand-in"] = listed(dict.fromkeys(f"`{pair.lead.table}`" for pair in one.pairs))
    if any("data.name=imagefolder" in pair.overrides for pair in one.pairs):
        flags["JPEG copies"] = ""
    if any(pair.verdict.endswith("on one division") for pair in one.pairs):
        flags["one division"] = ""
    return flags


def _behind(one: JudgedSentence) -> Iterator[str]:
    """Yield what is behind a sentence: flags in full, and pairs; those that differ in the rival alone share a row."""
    sentence = one.sentence
    yield from (f"### {sentence.id}", "", f"{sentence.says} ({sentence.where}): **{one.verdict}**", "")
    details = [f"- {flag}: {detail}" for flag, detail in _flags(one).items() if detail]
    reasons = dict.fromkeys(reason for pair in one.pairs for reason in pair.reasons)
    yield from (*details, *(f"- not counted: {reason}" for reason in reasons))
    yield from [""] * bool(details or reasons)
    groups: dict[str, list[JudgedLead]] = {}
    for pair in one.pairs:
        if pair.verdict != "not run":
            groups.setdefault(_without_rival(pair.lead), []).append(pair)
    if not groups:
        return
    yield from ("| pair | verdict, lead [95 %], adjusted p | runs (df) |", "| :--- | :--- | ---: |")
    for says, group in groups.items():
        runs = ", ".join(dict.fromkeys(map(_runs, group)))
        if len(group) == 1:
            yield f"| {group[0].lead.says} | {_verdict(group[0])} | {runs} |"
        else:
            yield f"| {says} | {'; '.join(f'{_rival(pair.lead)} {_verdict(pair)}' for pair in group)} | {runs} |"
    yield ""


def _rival(lead: Lead) -> str:
    """Return the title of the only row that a lead is over; empty if there are several or none."""
    return table_named(lead.table).row(lead.than[0]).title if len(lead.than) == 1 else ""


def _without_rival(lead: Lead) -> str:
    before, rival, after = lead.says.rpartition(f" {_rival(lead)}") if _rival(lead) else ("", "", "")
    return f"{before} …{after}" if rival else lead.says


def _verdict(one: JudgedLead) -> str:
    difference, why = one.difference, f"({'; '.join(one.reasons)})" if one.verdict == "no rival" else ""
    interval = "" if difference.low is None else f" [{difference.low:+.2f}, {difference.high:+.2f}]"
    shown = "" if difference.mean is None else f"{difference.mean:+.2f}{interval}"
    if one.sides:
        shown = "{:.2f} against {:.2f}".format(*one.sides)
    p = "" if difference.p_bh is None else f"p {format_p(difference.p_bh)}"
    return " ".join(words for words in (f"**{one.verdict}**", shown, p, why) if words)


def _runs(one: JudgedLead) -> str:
    return f"{one.difference.n} ({one.difference.df if one.difference.df is not None else '–'})"


def _not_run(leads: Sequence[Lead], published: Collection[str]) -> Iterator[str]:
    """Yield per table the command that runs the missing pairs, and the reasons why others cannot be run."""
    for id in dict.fromkeys(lead.table for lead in leads):
        table, of_table = table_named(id), [lead for lead in leads if lead.table == id]
        never = [why for lead in of_table if (why := _why_never(table, lead)) is not None]
        can_run = [lead for lead in of_table if _why_never(table, lead) is None]
        if can_run:
            wanted = {key for lead in can_run for cell in lead.weights for key in cell}
            rows = [row.key for row in table.rows if row.key in wanted]
            columns = [column.key for column in table.columns if column.key in wanted]
            options = f" --rows {','.join(rows)}" * (len(rows) < len(table.rows))
            options += f" --columns {','.join(columns)}" * (len(columns) < len(table.columns))
            options += " --not-kept" * (id in published)
            yield f"- {plural(len(can_run), 'pair')}: `protofl paper run {id}{options}`"
        for why in dict.fromkeys(never):
            yield f"- {plural(never.count(why), 'pair')} of `{id}` cannot be run: {why}"


def _why_never(table: PaperTable, lead: Lead) -> str | None:
    """Return the reason of the table's file why a lead cannot be decided here; None if it can."""
    for key, column in lead.weights:
        row = table.row(key)
        why = f"{row.title} is not built" if row.method is None else table.why_missing(row, table.column(column))
        if why is not None:
            return why
    return None
