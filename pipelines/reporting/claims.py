"""Claims that one row of a comparison is better than another, and their verdicts.

In a parameter file, or in the file that ``protofl compare --claims`` names, claims stand by name::

    compare:
      claims:
        ours: {better: protolda, than: [fedavg, fedgen]}
        cheaper: {better: protolda, than: fedavg, metric: bytes_up}
        by_a_point: {better: protolda, than: fedavg, metric: mean_local, by: 1.0}

``metric`` is any number of ``metrics.json``; where none is named, the accuracy of the global model if both rows have
one, else the mean over clients. ``by`` is the lead that is claimed: in percentage points of accuracies, else in the
metric's own unit. Of costs less is better. Where ``than`` is a list the entry is a claim for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipelines.reporting.formats import format_difference, format_p
from pipelines.reporting.statistics import CONFIDENCE, PairedDifference, paired_difference, with_adjusted_p
from pipelines.reporting.tables import Column, Table
from pipelines.runs.metrics import check_direction, lower_is_better, unit
from pipelines.runs.record import Pair, RunRecord, score

Judgement = Literal[
    "holds", "holds on one division", "does not hold", "does not hold on one division", "undecided", "not run"
]
_COUNTED = re.compile(r"(bytes|scalars)_(up|down)(_per_round|_by_kind)?|num_parameters")
_MEANING = (
    "holds: the difference, paired as in the table of differences, is above the lead that is claimed, with p of 5 % at "
    "most after adjustment for all claims here (Benjamini-Hochberg); of traffic, above it in every run; does not hold: "
    "below it; undecided: neither; not run: no common seed has the figure. On one division: all seeds share it, and p "
    "says nothing of other divisions. Holm: p if no error at all is to be among the claims."
)


@dataclass(frozen=True)
class RowClaim:
    """A claim that one row is better than another.

    Attributes:
        name: in the file. better, than: rows. metric: of runs; None: the first accuracy that both have.
        by: the lead that is claimed. says: in words, where the file has them.
    """

    name: str
    better: str
    than: str
    metric: str | None = None
    by: float = 0.0
    says: str = ""


@dataclass(frozen=True)
class JudgedRow:
    """A claim, the metric that decided it, its verdict, and the difference in the claimed direction."""

    claim: RowClaim
    metric: str
    verdict: Judgement
    difference: PairedDifference


def is_counted(metric: str) -> bool:
    """Return whether a figure is traffic or a size: it follows from a formula, so that no test is made of it."""
    return _COUNTED.fullmatch(metric.removeprefix("formula.").partition(".")[0]) is not None


def without_test(difference: PairedDifference) -> PairedDifference:
    """Return the difference of counted figures, without interval and p."""
    return replace(difference, low=None, high=None, p=None)


def judgement(difference: PairedDifference, by: float = 0.0, *, counted: bool = False) -> Judgement:
    """Judge a claimed lead by a difference, adjusted for all claims with it; counted figures by every run.

    Args:
        difference: of the one that is claimed to be better, more being better. by: the lead that is claimed.
        counted: see :func:`is_counted`.
    """
    if difference.mean is None:
        return "not run"
    if counted:
        above = {value > by for value in difference.by_seed.values()}
        return "undecided" if len(above) > 1 else "holds" if True in above else "does not hold"
    if difference.p_bh is None or difference.p_bh > 1 - CONFIDENCE:
        return "undecided"
    if difference.mean > by:
        return "holds on one division" if difference.divisions == 1 else "holds"
    return "does not hold on one division" if difference.divisions == 1 else "does not hold"


def claims_of(entries: Mapping[str, Mapping[str, Any]]) -> tuple[RowClaim, ...]:
    """Return the claims of a checked section ``compare``: one per entry and rival."""
    claims = []
    for name, entry in entries.items():
        rivals = entry["than"]
        for than in rivals if isinstance(rivals, list | tuple) else [rivals]:
            claim_name = f"{name}.{than}" if isinstance(rivals, list | tuple) else name
            options = (entry.get("metric"), float(entry.get("by", 0.0)), entry.get("says", ""))
            claims.append(RowClaim(claim_name, entry["better"], than, *options))
    return tuple(claims)


def judge(claims: Sequence[RowClaim], runs: Sequence[RunRecord]) -> tuple[JudgedRow, ...]:
    """Judge each claim by the runs of its two rows.

    Runs are paired by division and seed, divisions told apart by their fingerprints: whether ``partition.seed`` or
    ``compare.partition_seeds`` asked for a division, its runs say the same.

    Raises:
        ConfigError: which way a claim's metric is better is not declared.
    """
    divisions: dict[str, int] = {}

    def pair(run: RunRecord) -> Pair:
        if run.partition_fingerprint is None:
            return run.pair
        return divisions.setdefault(run.partition_fingerprint, len(divisions)), run.seed

    def scores(row: str, metric: str) -> dict[Pair, float | None]:
        return {pair(run): score(run, metric) for run in runs if run.method == row}

    judged, leads = list[JudgedRow](), list[float]()
    for claim in claims:
        rows = (claim.better, claim.than)
        both = all(any(value is not None for value in scores(row, "top1_global").values()) for row in rows)
        metric = claim.metric or ("top1_global" if both else "mean_local")
        check_direction(metric, f"compare.claims.{claim.name}: metric")
        better, than = (scores(row, metric) for row in rows)
        lead = claim.by / 100 if unit(metric) == "share" else claim.by
        pairs = (than, better) if lower_is_better(metric) else (better, than)
        difference = paired_difference(*pairs, null=lead)
        difference = without_test(difference) if is_counted(metric) else difference
        judged.append(JudgedRow(claim, metric, "undecided", difference))
        leads.append(lead)
    adjusted = with_adjusted_p(dict(enumerate(one.difference for one in judged)))
    return tuple(
        replace(one, difference=adjusted[n], verdict=judgement(adjusted[n], leads[n], counted=is_counted(one.metric)))
        for n, one in enumerate(judged)
    )


def claims_table(judged: Sequence[JudgedRow]) -> Table:
    """Return the table of claims and verdicts."""

    def text(one: JudgedRow) -> str:
        ahead = "has less than" if lower_is_better(one.metric) else "is ahead of"
        lead = f" by {one.claim.by:g}" if one.claim.by else ""
        return one.claim.says or f"{one.claim.better} {ahead} {one.claim.than}{lead}"

    return Table(
        "Claims, and what these runs say of them",
        (
            Column("claim", [text(one) for one in judged], is_text=True),
            Column("metric", [one.metric for one in judged], is_text=True),
            Column("lead [95 % interval]", [format_difference(one.difference, unit(one.metric)) for one in judged]),
            Column("adjusted p", [format_p(one.difference.p_bh) for one in judged]),
            Column("Holm", [format_p(one.difference.p_holm) for one in judged]),
            Column("df", [one.difference.df for one in judged]),
            Column("verdict", [one.verdict for one in judged], is_text=True, meaning=_MEANING),
        ),
    )
