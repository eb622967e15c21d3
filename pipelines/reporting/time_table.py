"""Seconds and joules of runs next to a comparison.

They differ between machines, unlike accuracies and bytes, so they have a table and a file of their own.
"""

from __future__ import annotations

import logging

from flcore.core.errors import DataError
from pipelines.reporting.comparison import Comparison
from pipelines.reporting.comparison_files import summary_values
from pipelines.reporting.statistics import Summary, summarise
from pipelines.reporting.tables import Column, Table, csv_text, score_column
from pipelines.runs.record import RunRecord

_log = logging.getLogger(__name__)
_MEASURED = ("seconds", "evaluation_seconds", "seconds_per_round", "steps_per_second", "joules")

Times = dict[str, dict[str, Summary]]
"""By method and figure; a figure that no run has is left out."""


def times_of(comparison: Comparison) -> Times | None:
    """Return seconds, steps per second and joules over seeds; None where no run has any.

    A run without a whole ``timing.json``, such as one that came by DVC, does not count.
    """
    times = {(run.method, run.pair): _times(run) for run in comparison.runs}
    known = [key for key in _MEASURED if any(values.get(key) is not None for values in times.values())]
    if not known:
        return None
    return {
        row.method: {
            key: summarise({pair: values.get(key) for (name, pair), values in times.items() if name == row.method})
            for key in known
        }
        for row in comparison.methods
    }


def time_table(times: Times) -> Table:
    """Return the times for people, mean ± std over seeds; none is marked as the best."""
    by_metric = {key: [row[key] for row in times.values()] for key in next(iter(times.values()))}
    what = "Time and energy" if "joules" in by_metric else "Time"
    columns = [score_column(key, summaries, marked=()) for key, summaries in by_metric.items()]
    return Table(f"{what}, mean ± std over n seeds", (Column("method", list(times), is_text=True), *columns))


def time_csv(times: Times) -> str:
    """Return the times for machines: means, spreads and counts."""
    return csv_text([{"method": method, **summary_values(row)} for method, row in times.items()])


def _times(run: RunRecord) -> dict[str, float | None]:
    """Return the times of one run by metric; none where its file has none."""
    try:
        timing = run.folder.timing
    except DataError as error:  # what it says is no part of any result
        _log.warning("the table of times leaves %s out: %s", run.label, error)
        return {}
    seconds, joules = (
        {phase: value for phase, value in (timing.get(key) or {}).items() if value is not None}
        for key in ("seconds", "joules")
    )
    if not seconds:
        return {}
    evaluation = seconds.get("evaluate", 0.0)
    total = sum(seconds.values())
    return {
        "seconds": total,
        "seconds_per_round": (total - evaluation) / run.rounds if run.rounds else None,
        "evaluation_seconds": evaluation,
        "steps_per_second": timing.get("steps_per_second"),
        "joules": sum(joules.values()) if joules else None,
    }
