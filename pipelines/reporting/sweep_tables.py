"""The result of a sweep: how accuracy and traffic depend on what was varied, as a table.

Reads what finished runs leave behind, as a comparison does, and with its arithmetic: means and sample standard
deviations over seeds, differences seed by seed. A run that is missing is a dash, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pipelines.plan.grid import Point, SweepPlan, describe_federation, short_names, show
from pipelines.reporting.comparison import lengths_and_seeds
from pipelines.reporting.comparison_files import (
    difference_values,
    fingerprints,
    markdown_end,
    mean_values,
    run_values,
    summary_values,
)
from pipelines.reporting.comparison_tables import definitions, spread_column
from pipelines.reporting.formats import listed
from pipelines.reporting.statistics import (
    CONFIDENCE,
    PairedDifference,
    Summary,
    marks,
    paired_differences,
    summarise_runs,
    with_adjusted_p,
)
from pipelines.reporting.tables import (
    Column,
    Table,
    csv_text,
    difference_column,
    json_text,
    markdown_table,
    print_tables,
    score_column,
    write_texts,
)
from pipelines.runs.folder import RunFolder
from pipelines.runs.metrics import METRICS, direction, heading, unit
from pipelines.runs.record import COMMUNICATION, HEADLINE_METRICS, SCORES, TASK_SCORES, RunRecord, record_of

YES, NO = "✓", "✗"

_DIFFERENCE = (
    "row minus reference in percentage points, seed by seed, over the seeds both have; in brackets the two-sided 95 % "
    "Student-t interval of the mean of these differences (needs two seeds). The reference has the configured values, "
    "and the row's partition. p: of the two-sided paired t-test, adjusted for all rows by Holm's method."
)


@dataclass(frozen=True)
class Row:
    """A point or a baseline over its seeds; differences are to the reference, the point as it is configured."""

    point: Point
    is_reference: bool
    runs: tuple[RunRecord, ...]
    scores: Mapping[str, Summary]
    differences: Mapping[str, PairedDifference]
    costs: Mapping[str, Summary]


@dataclass(frozen=True)
class Sweep:
    """Points in the order of the grid, then baselines; ``subject`` is what all runs have in common, in words."""

    subject: str
    keys: tuple[str, ...]
    configured: Mapping[str, Any]
    metric: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def points(self) -> tuple[Row, ...]:
        """The rows of the grid."""
        return tuple(row for row in self.rows if not row.point.is_baseline)

    @property
    def baselines(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.point.is_baseline)


def collect(plan: SweepPlan, folders: Sequence[RunFolder], metric: str) -> Sweep:
    """Summarise the runs of a plan, one folder for each, that have finished."""
    runs: dict[int, list[RunRecord]] = {index: [] for index in range(len(plan.points))}
    for number, folder in enumerate(folders):
        if folder.is_whole:
            runs[number // len(plan.seeds)].append(record_of(folder))
    subject = f"{plan.base.method.name} on " if "method.name" not in plan.keys else ""
    subject += describe_federation(plan.base, plan.keys)
    return summarise(list(zip(plan.points, runs.values(), strict=True)), plan.configured, plan.seeds, metric, subject)


def summarise(
    points: Sequence[tuple[Point, Sequence[RunRecord]]],
    configured: Mapping[str, Any],
    seeds: Sequence[int],
    metric: str,
    subject: str,
) -> Sweep:
    """Return mean, spread, differences and costs of every point.

    Args:
        points: each with its finished runs; those of the grid first, in its order, then baselines.
        configured: the values of the varied keys in the configuration.
        seeds: that were asked for.
        metric: the figure of the table and the picture: any number of ``metrics.json``.
        subject: method, dataset, partition and clients, for titles.

    Returns:
        The sweep. Differences are taken to the point of the configured values with the same partition, where there is
        one: clients that hold other images are no pairs.
    """
    keys = tuple(points[0][0].values)
    everything = [run for _, runs in points for run in runs]
    scores = (*SCORES, *TASK_SCORES) if any(run.tasks for run in everything) else SCORES
    scores = tuple(dict.fromkeys((*scores, metric)))
    rows = [_row(point, runs, points, configured, scores, metric) for point, runs in points]
    # Of each figure alone: the table shows one of them.
    adjusted = {
        key: with_adjusted_p(dict(enumerate(row.differences[key] for row in rows))) for key in rows[0].differences
    }
    rows = [replace(row, differences={key: adjusted[key][index] for key in adjusted}) for index, row in enumerate(rows)]
    title = f"{subject}, {lengths_and_seeds(everything)}" if everything else subject
    notes = tuple(_notes(rows, configured, seeds, metric))
    return Sweep(title, keys, configured, metric, tuple(seeds), tuple(rows), notes)


def _row(
    point: Point,
    runs: Sequence[RunRecord],
    points: Sequence[tuple[Point, Sequence[RunRecord]]],
    configured: Mapping[str, Any],
    scores: Sequence[str],
    metric: str,
) -> Row:
    wanted = {**configured, **dict(_partition(point))}
    is_reference = not point.is_baseline and point.values == wanted
    reference = next(
        (reference_runs for other, reference_runs in points if not other.is_baseline and other.values == wanted), ()
    )
    return Row(
        point,
        is_reference,
        tuple(sorted(runs, key=lambda run: run.seed)),
        summarise_runs(runs, scores),
        paired_differences(runs, () if is_reference else reference, dict.fromkeys((*HEADLINE_METRICS, metric))),
        summarise_runs(runs, COMMUNICATION),
    )


def _partition(point: Point) -> tuple[tuple[str, Any], ...]:
    """Return the varied keys of the partition."""
    return tuple((key, value) for key, value in point.values.items() if key.startswith("partition."))


def _notes(rows: Sequence[Row], configured: Mapping[str, Any], seeds: Sequence[int], metric: str) -> Iterator[str]:
    values = {key: value for key, value in configured.items() if not key.startswith("partition.")}
    if not values:
        yield "Points differ in who holds what alone: each is the reference of its own partition."
    elif not any(row.is_reference for row in rows):
        named = ", ".join(f"{key} = {show(value)}" for key, value in values.items())
        yield f"The configured point ({named}) is not among these: no differences."
    if direction(metric) is None:
        yield f"Whether more or less {metric} is better is not declared: no row is marked as the best."
    for row in rows:
        missing = sorted(set(seeds) - {run.seed for run in row.runs})
        if missing:
            yield f"{row.point.name}: no finished run with seed {listed(missing)}."
        elif row.scores[metric].n == 0:
            yield f"{row.point.name}: has no {metric}."
    lengths = sorted({run.rounds for row in rows for run in row.runs})
    if len(lengths) > 1:
        yield f"The runs differ in length ({listed(lengths)} rounds)."


# ---------------------------------------------------------------------------------------------------------- printing


def sweep_table(sweep: Sweep) -> Table:
    """Return the table: a row per point, then baselines; switches are check-marks, the best mean is marked."""
    rows, names, metric = sweep.rows, short_names(sweep.keys), sweep.metric
    instead = {index: "reference" for index, row in enumerate(rows) if row.is_reference}
    methods = [row.point.method for row in rows]
    what = "Accuracy in %" if metric in METRICS else f"{metric} in %"
    what = what if unit(metric) == "share" else heading(metric)
    differences = [row.differences[metric] for row in rows]
    return Table(
        f"{what}, mean ± std over n seeds; Δ to the configured values [95 % interval], adjusted p",
        (
            *([Column("method", methods, is_text=True)] if sweep.baselines or "method.name" in sweep.keys else []),
            *(
                Column(names[key], [shown(row.point, key) for row in rows])
                for key in sweep.keys
                if key != "method.name"
            ),
            Column("n", [len(row.runs) for row in rows]),
            score_column(metric, [row.scores[metric] for row in rows], _marks(rows, metric)),
            spread_column([row.scores["client_std"] for row in rows]),
            difference_column(metric, differences, _DIFFERENCE, instead),
            *(
                score_column(key, [row.costs[key] for row in rows], ())
                for key in ("scalars_up_per_round", "bytes_up", "bytes_down")
                if key != metric
            ),
        ),
    )


def _marks(rows: Sequence[Row], metric: str) -> list[str]:
    """Rank rows among those that share their partition: clients that hold other images are no pairs."""
    marked, better = [""] * len(rows), direction(metric)
    for shared in dict.fromkeys(_partition(row.point) for row in rows) if better else ():
        indices = [index for index, row in enumerate(rows) if _partition(row.point) == shared]
        ranked = marks([rows[index].scores[metric] for index in indices], lower_is_better=better == "lower")
        for index, mark in zip(indices, ranked, strict=True):
            marked[index] = mark
    return marked


def shown(point: Point, key: str) -> str | None:
    """Return the text of a value in a cell; None for a key that does not concern the row."""
    if key not in point.values:
        return None
    value = point.values[key]
    if isinstance(value, bool):
        return YES if value else NO
    return show(value)


def print_table(sweep: Sweep, console: Console) -> None:
    """Print the sweep on a terminal."""
    console.print(Text(f"{sweep.subject}.", style="bold"))
    print_tables([sweep_table(sweep)], console)
    for note in sweep.notes:
        console.print(Text(f"Note: {note}"))


# ---------------------------------------------------------------------------------------------------------- writing


def write(sweep: Sweep, directory: Path) -> tuple[Path, ...]:
    """Write ``sweep.csv`` (a row per point and seed), ``sweep.json`` and ``sweep.md``; same runs, same bytes.

    CSV and JSON hold fractions and raw counts (missing: empty, null), Markdown percentages (missing: a dash).
    """
    contents = {
        "sweep.csv": csv_text([_run_values(sweep, row, run) for row in sweep.rows for run in row.runs]),
        "sweep.json": json_text(_document(sweep)),
        "sweep.md": markdown(sweep),
    }
    return write_texts(contents, directory)


def markdown(sweep: Sweep) -> str:
    """Return the table as Markdown, with the figure, the notes and the meanings of columns."""
    table = sweep_table(sweep)
    lines = [f"# Influence of {listed(sweep.keys)}", "", f"{sweep.subject}.", "", "![sweep](sweep.png)", ""]
    end = markdown_end(sweep.notes, definitions([table]))
    return "\n".join([*lines, *markdown_table(table), *end]) + "\n"


def _run_values(sweep: Sweep, row: Row, run: RunRecord) -> dict[str, Any]:
    point = row.point
    values = {key: show(point.values[key]) if key in point.values else None for key in sweep.keys}
    roles = {"is_baseline": show(point.is_baseline), "is_configured": show(point.is_configured)}
    return values | roles | run_values(run) | fingerprints(run)


def _document(sweep: Sweep) -> dict[str, Any]:
    rows = [
        {
            "method": row.point.method,
            "values": dict(row.point.values),
            "is_baseline": row.point.is_baseline,
            "is_configured": row.point.is_configured,
            "is_reference": row.is_reference,
            "seeds": [run.seed for run in row.runs],
            "rounds": sorted({run.rounds for run in row.runs}),
            **summary_values(row.scores),
            **difference_values(row.differences),
            **mean_values(row.costs),
        }
        for row in sweep.rows
    ]
    return {
        "subject": sweep.subject,
        "keys": list(sweep.keys),
        "configured": dict(sweep.configured),
        "metric": sweep.metric,
        "confidence": CONFIDENCE,
        "seeds": list(sweep.seeds),
        "rows": rows,
        "runs": [
            {"values": dict(row.point.values), **run_values(run), **fingerprints(run)}
            for row in sweep.rows
            for run in row.runs
        ],
        "notes": list(sweep.notes),
    }
