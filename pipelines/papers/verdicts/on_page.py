"""What the runs of a table say of what its paper claims by it, as a table of its page."""

from __future__ import annotations

from functools import partial

from pipelines.papers.marks import mark
from pipelines.papers.results import TableResults
from pipelines.papers.verdicts.claim_files import claims
from pipelines.papers.verdicts.judged import judge
from pipelines.reporting.formats import format_number_difference
from pipelines.reporting.tables import WORDS, Column, Format, Table

_MEANING = (
    "holds: the 95 % interval of the difference, paired by seed and division, lies above the lead that is claimed; "
    "does not hold: below it; undecided: it contains it, or there is no interval."
)
_LEAD = Format(partial(format_number_difference, spec=".2f"))


def verdicts(found: TableResults) -> Table | None:
    """The claims of a table that its runs say something of; None where there are none."""
    judged = [judge(claim, found) for claim in claims() if claim.table == found.plan.table.id]
    judged = [one for one in judged if one.verdict != "not run"]
    if not judged:
        return None
    return Table(
        f"What is claimed, and what these runs say of it{mark(found.plan)}",
        (
            Column("claim", "claim", [one.claim.says for one in judged], WORDS),
            Column("verdict", "verdict", [one.verdict for one in judged], WORDS, _MEANING),
            Column("claimed", "claimed lead", [f"{one.claim.by:g}" for one in judged], WORDS),
            Column("lead", "lead [95 % interval]", [one.difference for one in judged], _LEAD),
            Column("runs", "pairs of runs", [one.difference.n for one in judged]),
            Column("seeds", "seeds", [len(one.seeds) for one in judged]),
            Column("divisions", "divisions", [len(one.divisions) for one in judged]),
            Column("where", "where", [one.claim.where for one in judged], WORDS),
        ),
    )
