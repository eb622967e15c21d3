"""The result of a sweep: how accuracy and traffic depend on what was varied, as a table (evaluation.md, V9, V10, V16).

Reads what finished runs leave behind, as a comparison does, and with its arithmetic: means and sample standard
deviations over seeds, differences seed by seed. A run that is missing is a dash, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pipelines.config.grid import Plan, Point, describe_federation, short_names, show
from pipelines.reporting.comparison_tables import (
    DEFINITIONS,
    TIED_MARK,
    PrintedTable,
    column,
    csv_text,
    difference_values,
    fingerprints,
    format_difference,
    json_text,
    lengths_and_seeds,
    markdown_end,
    markdown_table,
    print_printed,
    run_values,
    score_cell,
    score_values,
    table_of,
    write_texts,
)
from pipelines.reporting.formats import MISSING, format_bytes, format_count, format_percent, listed
from pipelines.reporting.statistics import (
    CONFIDENCE,
    PairedDifference,
    Summary,
    marks,
    paired_differences,
    summarise_runs,
)
from pipelines.runs.layout import RunFiles
from pipelines.runs.record import COMMUNICATION, HEADLINE_METRICS, SCORES, TASK_SCORES, RunRecord, load_run

YES, NO = "✓", "✗"

_COLUMNS: Mapping[str, str] = {
    "Δ": "row minus reference in percentage points, seed by seed, over the seeds both have; in brackets the two-sided "
    "95 % Student-t interval of the mean of these differences (needs two seeds). The reference has the configured "
    "values, and the row's partition. An interval, not a claim of significance.",
    "scalars up / round": "trainable values, prototypes and statistics that all clients together send in a round, "
    "measured, mean over all rounds and over seeds.",
    "up, down": "bytes that all clients together send and receive in the whole run, measured, mean over seeds.",
}


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
        """The other rows."""
        return tuple(row for row in self.rows if row.point.is_baseline)


def collect(plan: Plan, directories: Sequence[Path], metric: str) -> Sweep:
    """Read the runs of a plan, one directory for each, and summarise those that have finished."""
    runs: dict[int, list[RunRecord]] = {place: [] for place in range(len(plan.points))}
    for number, directory in enumerate(directories):
        if RunFiles(directory).metrics.exists():
            runs[number // len(plan.seeds)].append(load_run(directory))
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
    """Mean, spread, differences and costs of every point.

    Args:
        points: each with its finished runs; those of the grid first, in its order, then baselines.
        configured: the values of the varied keys in the configuration.
        seeds: that were asked for.
        metric: the score of the table and the figure: ``top1_global``, ``mean_local`` or ``pooled_local``.
        subject: method, dataset, partition and clients, for titles.

    Returns:
        The sweep. Differences are taken to the point of the configured values with the same partition, where there is
        one: clients that hold other images are no pairs.
    """
    keys = tuple(points[0][0].values)
    everything = [run for _, runs in points for run in runs]
    scores = (*SCORES, *TASK_SCORES) if any(run.tasks for run in everything) else SCORES
    rows = [_row(point, runs, points, configured, scores) for point, runs in points]
    title = f"{subject}, {lengths_and_seeds(everything)}" if everything else subject
    notes = tuple(_notes(rows, configured, seeds, metric))
    return Sweep(title, keys, configured, metric, tuple(seeds), tuple(rows), notes)


def _row(
    point: Point,
    runs: Sequence[RunRecord],
    points: Sequence[tuple[Point, Sequence[RunRecord]]],
    configured: Mapping[str, Any],
    scores: Sequence[str],
) -> Row:
    wanted = {**configured, **{key: value for key, value in point.values.items() if key.startswith("partition.")}}
    is_reference = not point.is_baseline and point.values == wanted
    reference = next((found for other, found in points if not other.is_baseline and other.values == wanted), ())
    return Row(
        point,
        is_reference,
        tuple(sorted(runs, key=lambda run: run.seed)),
        summarise_runs(runs, scores),
        paired_differences(runs, () if is_reference else reference, HEADLINE_METRICS),
        summarise_runs(runs, COMMUNICATION),
    )


def _notes(rows: Sequence[Row], configured: Mapping[str, Any], seeds: Sequence[int], metric: str) -> Iterator[str]:
    values = {key: value for key, value in configured.items() if not key.startswith("partition.")}
    if not values:
        yield "Points differ in who holds what alone: each is the reference of its own partition."
    elif not any(row.is_reference for row in rows):
        named = ", ".join(f"{key} = {show(value)}" for key, value in values.items())
        yield f"The configured point ({named}) is not among these: no differences."
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


def printed_table(sweep: Sweep) -> PrintedTable:
    """The table for eyes: a row per point, then the baselines; switches are check-marks, the best mean is marked."""
    rows, names = sweep.rows, short_names(sweep.keys)
    columns = [
        *([column("method", [row.point.method for row in rows])] if _names_methods(sweep) else []),
        *(
            column(names[key], [_value_cell(row.point, key) for row in rows])
            for key in sweep.keys
            if key != "method.name"
        ),
        column("n", [str(len(row.runs)) for row in rows]),
        column(
            sweep.metric,
            [score_cell(row.scores[sweep.metric], len(row.runs)) for row in rows],
            marks([row.scores[sweep.metric] for row in rows]),
        ),
        column("client_std", [format_percent(row.scores["client_std"].mean) for row in rows]),
        column(f"Δ {sweep.metric}", [_difference_cell(row, sweep.metric) for row in rows]),
        column("scalars up / round", [format_count(row.costs["scalars_up_per_round"].mean) for row in rows]),
        column("up, total", [format_bytes(row.costs["bytes_up"].mean) for row in rows]),
        column("down, total", [format_bytes(row.costs["bytes_down"].mean) for row in rows]),
    ]
    return table_of("Accuracy in %, mean ± std over n seeds; Δ to the configured values [95 % interval]", columns)


def _names_methods(sweep: Sweep) -> bool:
    return bool(sweep.baselines) or "method.name" in sweep.keys


def _value_cell(point: Point, key: str) -> str:
    if key not in point.values:
        return MISSING
    value = point.values[key]
    if isinstance(value, bool):
        return YES if value else NO
    return show(value)


def _difference_cell(row: Row, metric: str) -> str:
    return "reference" if row.is_reference else format_difference(row.differences[metric])


def print_table(sweep: Sweep, console: Console) -> None:
    """Print the sweep on a terminal."""
    console.print(Text(f"{sweep.subject}.", style="bold"))
    print_printed([printed_table(sweep)], sweep.notes, console)


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
    """The table as Markdown, with the figure, the notes and what columns mean."""
    terms = (sweep.metric, "client_std", "±")
    definitions = {term: DEFINITIONS[term] for term in terms} | {**_COLUMNS, TIED_MARK: DEFINITIONS[TIED_MARK]}
    lines = [f"# Influence of {listed(sweep.keys)}", "", f"{sweep.subject}.", "", "![sweep](sweep.png)", ""]
    return "\n".join([*lines, *markdown_table(printed_table(sweep)), *markdown_end(sweep.notes, definitions)]) + "\n"


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
            **score_values(row.scores),
            **difference_values(row.differences),
            **{f"{key}_mean": summary.mean for key, summary in row.costs.items()},
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
