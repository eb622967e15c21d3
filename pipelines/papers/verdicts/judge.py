"""Verdicts on the papers' sentences from tables' runs (:mod:`pipelines.papers.verdicts.claim_files`).

A pair is decided as a claim of a comparison (:mod:`pipelines.reporting.claims`), with p adjusted for all pairs of the
paper. It is *withdrawn* if a cell is not what the paper compares (``unlike`` in the table's file), at other rounds than
the paper's, or in a changed setting. It has *no rival* if runs of the rival failed.

A sentence holds if enough of its pairs hold, does not hold if too few can still hold, is withdrawn if all its pairs
are, and is undecided otherwise. Pairs without a rival do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal

from pipelines.papers.catalogue import PAPERS, name_at, table_named
from pipelines.papers.caveats import changed, mark, overrides_of
from pipelines.papers.plan import plan_table
from pipelines.papers.published import published_tables
from pipelines.papers.results import TableResults, results
from pipelines.papers.runs import table_file
from pipelines.papers.verdicts.claim_files import Lead, Sentence, difference_of, sentences
from pipelines.reporting.claims import Judgement, is_counted, judgement, without_test
from pipelines.reporting.formats import format_difference, format_p, plural
from pipelines.reporting.statistics import CONFIDENCE, PairedDifference, paired_difference, with_adjusted_p
from pipelines.reporting.tables import Column, Table

Verdict = Judgement | Literal["withdrawn", "no rival"]
PLURAL: Mapping[str, str] = {
    "holds": "hold",
    "does not hold": "do not hold",
    "undecided": "undecided",
    "not run": "not run",
    "withdrawn": "withdrawn",
}
_OPEN = ("not run", "withdrawn", "undecided")  # what says least comes first


@dataclass(frozen=True)
class JudgedLead:
    """A pair and its verdict.

    Attributes:
        difference: ``better`` minus ``than``; for costs reversed. counted: traffic, without a test.
        sides: mean figures of ``better`` and ``than``, where they are counted.
        reasons: why it is withdrawn or has no rival. against: reasons that matter only if it does not hold.
        rounds_scale: fraction of the paper's rounds. overrides: assignments that override the table's values.
    """

    lead: Lead
    verdict: Verdict
    difference: PairedDifference
    reasons: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    rounds_scale: float = 1.0
    overrides: tuple[str, ...] = ()
    counted: bool = False
    sides: tuple[float, ...] = ()

    @property
    def is_tested(self) -> bool:
        """Whether it has a p that counts among those of its paper."""
        return self.verdict == "undecided" and self.difference.p is not None


@dataclass(frozen=True)
class JudgedSentence:
    """A sentence, its verdict and the pairs that it is from; ``others`` are pairs that did not decide.

    ``p`` and ``p_holm`` are of the pair with which the verdict is reached; None if undecided, 0 if arithmetic decides.
    """

    sentence: Sentence
    verdict: Verdict
    pairs: tuple[JudgedLead, ...]
    others: tuple[JudgedLead, ...] = ()
    p: float | None = None
    p_holm: float | None = None

    @property
    def is_stand_in(self) -> bool:
        """Whether pairs of a smaller setting decided."""
        return bool(self.pairs) and self.pairs[0].lead in self.sentence.stand_in

    def count(self, verdict: str) -> int:
        """Return the number of pairs with a verdict, on any number of divisions."""
        return sum(one.verdict.startswith(verdict) for one in self.pairs)

    @property
    def num_pairs(self) -> int:
        """Number of pairs that count."""
        return len(self.pairs) - self.count("no rival")

    @property
    def df(self) -> tuple[int, ...]:
        """Degrees of freedom of the pairs that have the sentence's verdict, without duplicates."""
        decided = (one for one in self.pairs if one.verdict.startswith(self.verdict) and self.p is not None)
        return tuple(sorted({one.difference.df for one in decided if one.difference.df is not None}))

    @property
    def survives_holm(self) -> bool:
        """Whether the verdict is the same with the stricter adjustment."""
        return self.p_holm is not None and self.p_holm <= 1 - CONFIDENCE

    @property
    def printed(self) -> tuple[int, int]:
        """How many pairs hold in the paper's own tables, and how many are printed."""
        leads = [(one.by, one.printed) for one in self.sentence.pairs]
        return sum(p is not None and p >= by for by, p in leads), sum(p is not None for _, p in leads)

    @property
    def is_false_in_print(self) -> bool:
        """Whether the paper's own figures contradict it."""
        holding, pairs = self.printed
        return bool(self.sentence.in_print) or (pairs > 0 and holding < self.sentence.needed(pairs))


def measure(lead: Lead, results: TableResults) -> JudgedLead:
    """Return a pair with its difference, undecided unless it is withdrawn, not run or without a rival."""
    plan, difference = results.plan, difference_of(lead, results)
    table, scale = plan.table, plan.selection.rounds_scale
    cells = [results.cells[place] for place in lead.weights]
    lost = tuple(dict.fromkeys(f"{c.row.title}: {c.lost}" for c in cells if c.failed and c.row.key in lead.than))
    columns = [table.column(key) for key in lead.columns]
    overrides = tuple(dict.fromkeys(one for column in columns for one in overrides_of(plan, column)))
    unlike = dict.fromkeys(one for row, column in lead.weights for one in table.unlike_in(row, column))
    reasons = [one.why for one in unlike if not one.against]
    reasons += [f"{scale:g} of the rounds"] if scale != 1 else []
    setting = changed(overrides).strip()
    reasons += [setting] if setting else []
    if lost and all(cell.ours.n or cell.failed for cell in cells):
        verdict: Verdict = "no rival"
    elif difference.n == 0:
        verdict = "not run"
    else:
        verdict = "withdrawn" if reasons else "undecided"
    against = tuple(one.why for one in unlike if one.against)
    counted = all(is_counted(column.metric) for column in columns)
    difference = without_test(difference) if counted else difference
    shown = {"no rival": lost, "withdrawn": tuple(reasons)}.get(verdict, ())
    sides: tuple[float, ...] = ()
    if counted and difference.n:
        sides = tuple(
            fmean(results.cells[place].ours.mean or 0.0 for place in product(rows, keys))
            for rows, keys in ((lead.better, lead.column), (lead.than, lead.than_column or lead.column))
        )
    return JudgedLead(lead, verdict, difference, shown, against, scale, overrides, counted, sides)


def decide(measured: Sequence[JudgedLead]) -> list[JudgedLead]:
    """Decide the pairs of a paper together; the same lead in several sentences counts once."""
    keys = [(one.lead.table, tuple(one.lead.weights.items()), one.lead.by) for one in measured]
    tested = {key: one.difference for key, one in zip(keys, measured, strict=True) if one.is_tested}
    adjusted = with_adjusted_p(tested)
    decided = []
    for key, one in zip(keys, measured, strict=True):
        difference = adjusted.get(key, one.difference) if one.is_tested else one.difference
        verdict = judgement(difference, one.lead.by, counted=one.counted) if one.verdict == "undecided" else one.verdict
        excused = verdict.startswith("does not hold") and one.against
        reasons = one.against if excused else one.reasons
        decided.append(
            replace(one, verdict="withdrawn" if excused else verdict, difference=difference, reasons=reasons)
        )
    return decided


def judge_sentence(sentence: Sentence, pairs: Sequence[JudgedLead]) -> JudgedSentence:
    """Judge a sentence by its decided pairs."""
    undecided = JudgedSentence(sentence, "undecided", tuple(pairs))
    if all(one.verdict == "not run" for one in pairs):
        return replace(undecided, verdict="not run")
    if 0 < undecided.count("withdrawn") == undecided.num_pairs:
        return replace(undecided, verdict="withdrawn")
    needed = sentence.needed(undecided.num_pairs)
    enough: dict[Judgement, int] = {"holds": needed, "does not hold": undecided.num_pairs - needed + 1}
    for verdict, number in enough.items():
        if number and undecided.count(verdict) >= number:
            deciding = [one.difference for one in pairs if one.verdict.startswith(verdict)]
            p, p_holm = (
                sorted(getattr(one, name) or 0.0 for one in deciding)[number - 1] for name in ("p_bh", "p_holm")
            )
            return replace(undecided, verdict=verdict, p=p, p_holm=p_holm)
    return undecided


def judged(asked: Sequence[Sentence], home: Path | None, published: Path | None = None) -> list[JudgedSentence]:
    """Judge sentences by finished tables, at the budget nearest to the paper's; smaller ones before larger ones.

    p is adjusted for all sentences of a paper. Other readings of them and late sentences have their p adjusted for
    all of both, so that one more of these decides nothing of a sentence. Tables of ``protofl paper run`` in the folder
    ``home`` come first, then kept ones in the folder ``published``.
    """
    known: dict[str, list[TableResults]] = {}
    stored = published_tables(published) if published is not None else []

    def best(lead: Lead) -> JudgedLead:
        if lead.table not in known:
            known[lead.table] = [] if home is None else _results_of(home, lead.table)
            known[lead.table] += [one.results() for one in stored if one.table.id == lead.table]
        tried = [measure(lead, found) for found in known[lead.table]]
        ran = [one for one in tried if one.verdict != "not run"]
        none = JudgedLead(lead, "not run", paired_difference({}, {}))
        # The paper's own budget, then the nearest of the smaller, then of the larger ones.
        return max(ran, key=lambda one: (one.rounds_scale <= 1, -abs(one.rounds_scale - 1)), default=none)

    answers = []
    for paper in PAPERS:
        of_paper = [one for one in asked if one.paper == paper]
        others = _other_readings([one.id for one in of_paper]) | {one.id for one in of_paper if one.late}
        measured = {one.id: [best(lead) for lead in (*one.pairs, *one.stand_in)] for one in of_paper}
        first = iter(decide([pair for id, pairs in measured.items() if id not in others for pair in pairs]))
        every = decide([pair for pairs in measured.values() for pair in pairs])
        for sentence in of_paper:
            number = len(measured[sentence.id])
            of_all, every = every[:number], every[number:]
            decided = iter(of_all) if sentence.id in others else first
            found = judge_sentence(sentence, [next(decided) for _ in sentence.pairs])
            instead = judge_sentence(sentence, [next(decided) for _ in sentence.stand_in])
            says = [_OPEN.index(one.verdict) if one.verdict in _OPEN else len(_OPEN) for one in (found, instead)]
            if not sentence.pairs or says[1] > says[0]:
                found, instead = instead, found
            answers.append(replace(found, others=instead.pairs))
    return answers


def _other_readings(ids: Collection[str]) -> set[str]:
    """Return the sentences that are other readings of one; their names begin with its name."""
    return {id for id in ids if any(id.startswith(f"{other}_") for other in ids)}


def _results_of(home: Path, table: str) -> list[TableResults]:
    """Return the results of a table at every budget that was run."""
    folders = [folder for folder in sorted(home.glob(f"{table}*")) if (folder / "table.json").exists()]
    found = [(folder, table_file(folder)) for folder in folders]
    return [
        results(plan_table(table_named(table), file.selection, with_data=False), folder)
        for folder, file in found
        if folder.name == name_at(table, file.rounds_scale)
    ]


_MEANING = (
    "holds: the difference, paired by seed and division, is above the lead that is claimed, with p adjusted for all "
    "pairs here (Benjamini-Hochberg, 5 %); does not hold: below it; withdrawn: not what the paper compares."
)


def verdict_table(results: TableResults) -> Table | None:
    """Return a table of the pairs that were run; None without any."""
    leads = {lead.id: lead for one in sentences() for lead in (*one.pairs, *one.stand_in)}
    every = decide([measure(lead, results) for lead in leads.values() if lead.table == results.plan.table.id])
    judged = [one for one in every if one.verdict != "not run"]
    if not judged:
        return None
    return Table(
        f"What is claimed, and what these runs say of it{mark(results.plan)}",
        (
            Column("claim", [one.lead.says for one in judged], is_text=True),
            Column("verdict", [one.verdict for one in judged], is_text=True, meaning=_MEANING),
            Column("claimed lead", [f"{one.lead.by:g}" for one in judged], is_text=True),
            Column("lead [95 % interval]", [format_difference(one.difference, "points") for one in judged]),
            Column("adjusted p", [format_p(one.difference.p_bh) for one in judged]),
            Column("df", [one.difference.df for one in judged]),
            Column("why", ["; ".join(one.reasons) for one in judged], is_text=True),
        ),
    )


def counts(verdicts: Sequence[JudgedSentence]) -> str:
    """Return a sentence with the number of sentences per verdict; each reading of one has a verdict of its own."""
    readings = len(_other_readings([one.sentence.id for one in verdicts]))
    also = f" and {plural(readings, 'other reading')} of them" if readings else ""
    words = (f"{sum(one.verdict == verdict for one in verdicts)} {word}" for verdict, word in PLURAL.items())
    return f"{plural(len(verdicts) - readings, 'sentence')}{also}: {', '.join(words)}."
