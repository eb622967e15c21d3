"""Seconds and joules of runs, beside a comparison: what the clock of the machines that trained them said.

They are no part of a comparison's result. Accuracies and bytes are the same wherever runs are made again, and so are
the files that hold them; seconds are not, so they stand in a table and a file of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flcore.core.errors import DataError
from flcore.experiment.run_folder import RunFiles
from flcore.io.files import read_json
from pipelines.reporting.comparison import Comparison
from pipelines.reporting.formats import MISSING
from pipelines.reporting.statistics import Summary, summarise
from pipelines.reporting.tables import NUMBER_SUMMARY, WORDS, Column, Format, Table, csv_text, records
from pipelines.runs import kinds
from pipelines.runs.record import RunRecord

_log = logging.getLogger(__name__)

_COLUMNS: Mapping[str, tuple[str, str]] = {
    "seconds": (
        "seconds",
        "of a run's rounds, evaluation with them, as the clock went by where it was made. Runs that shared a machine "
        "made each other slow, and a run that was found again has the seconds of the machine that once made it: for "
        "a ratio that can be told to others take protofl bench.",
    ),
    "evaluation_seconds": ("of them evaluation", "all evaluations of a run."),
    "seconds_per_round": ("seconds / round", "without evaluation."),
    "steps_per_second": ("steps / s", "local steps of all clients divided by the seconds in which clients trained."),
    "joules": ("joules", "of the devices that tell what they use; nothing where none does."),
}


def _text(summary: Summary) -> str:
    """Three figures, or whole numbers, of the mean and its spread: clocks are not told apart by more."""
    told = [
        f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in (summary.mean, summary.std) if value is not None
    ]
    partial = [f"(n = {summary.n})"] if 0 < summary.n < len(summary.by_seed) else []
    return " ".join([" ± ".join(told), *partial]) if told else MISSING


_MEASURED = Format(_text, NUMBER_SUMMARY.fields)


def time_table(comparison: Comparison) -> Table | None:
    """Seconds, steps per second and joules by method, mean ± std over seeds; None where no run says any.

    A run without a whole ``timing.json``, such as one that came by DVC, does not count.
    """
    times = {(run.method, run.pair): _times(run) for run in comparison.runs}

    def summary(method: str, key: str) -> Summary:
        return summarise({pair: found.get(key) for (name, pair), found in times.items() if name == method})

    methods = [row.method for row in comparison.methods]
    by_key = {key: [summary(method, key) for method in methods] for key in _COLUMNS}
    columns = [
        Column(key, heading, by_key[key], _MEASURED, meaning)
        for key, (heading, meaning) in _COLUMNS.items()
        if any(each.n for each in by_key[key])
    ]
    if not columns:
        return None
    what = "Time and energy" if any(each.n for each in by_key["joules"]) else "Time"
    return Table(f"{what}, mean ± std over n seeds", (Column("method", "method", methods, WORDS), *columns))


def time_csv(table: Table) -> str:
    """The same for machines: means, spreads and counts."""
    return csv_text(records(table.columns))


def _times(run: RunRecord) -> dict[str, float | None]:
    """Figures of one run by the keys of the columns; none where it says none."""
    path = RunFiles(run.directory).timing
    try:
        timing = read_json(path, kinds.CURE) if path.exists() else {}
        kinds.check(timing, kinds.TIMING, str(path))
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
