"""A comparison of finished runs: tables and curves as files, figures, and a page.

What it leaves for DVC: ``metrics.json`` (means by method) and ``curves.csv``, a row per method, seed and round, which
``dvc plots`` draws with the template ``.dvc/plots/methods.json``, whatever methods there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flcore.config.sections import CompareConfig
from flcore.core.errors import DataError
from flcore.core.params import build
from flcore.io import disk
from pipelines.reporting import comparison as comparisons
from pipelines.reporting.claims import claims_of
from pipelines.reporting.comparison import Comparison, Tuned, tuned_name
from pipelines.reporting.comparison_files import write
from pipelines.reporting.comparison_tables import comparison_tables, definitions
from pipelines.reporting.figures.sets import Drawing, comparison_drawings, write_csv, write_drawings
from pipelines.reporting.figures.style import method_styles
from pipelines.reporting.formats import plural
from pipelines.reporting.frame import curves_table
from pipelines.reporting.page import (
    Block,
    Section,
    communication,
    ending,
    lead,
    plot,
    plots,
    who_holds_what,
    write_page,
)
from pipelines.reporting.page_tables import page_facts
from pipelines.reporting.partition_table import load_partition
from pipelines.reporting.statements import after_correction, statements
from pipelines.reporting.tables import MARKS_MEAN, Table, write_texts
from pipelines.reporting.time_table import time_csv, time_table, times_of
from pipelines.runs.folder import has_whole_results
from pipelines.runs.inputs import inputs_of
from pipelines.runs.record import load_run

_log = logging.getLogger(__name__)


def compare(
    parameters: Mapping[str, Any],
    runs: Sequence[Path],
    directory: Path,
    failed: Mapping[str, str] | None = None,
    *,
    rows: Sequence[str] = (),
    draws: Sequence[int | None] = (),
    tuning: Sequence[Mapping[str, Any]] | None = None,
    budget: str | None = None,
    with_times: bool = True,
    command: str | None = None,
) -> Comparison:
    """Write ``comparison.csv``, ``.json``, ``.md``, ``.tex``, ``runs.csv``, ``metrics.json``, ``curves.csv``,
    ``times.csv``, ``figures/`` and ``report.html``.

    Args:
        parameters: as read from a file; of ``compare`` count ``baseline``, ``target_fraction``, ``claims``, ``smooth``.
        runs: directories, in the order in which methods shall appear. Who holds what is shown where their partitions
            are still there.
        directory: where the results go.
        failed: why some of these runs have no result, by what they are called.
        rows: of each run, what its method is called here; empty: by its name.
        draws: of each run, the seed of its division, where each seed is run with several; None or empty: it has one.
        tuning: what the methods' studies found, as :class:`~pipelines.reporting.comparison.Tuned` has it.
        budget: in a sentence, what every run may spend, where that is not a number of rounds.
        with_times: whether ``times.csv`` and the page have seconds and joules, and the page date, commit and command,
            which differ on another machine.
        command: that made the comparison.

    Returns:
        The comparison.

    Raises:
        ConfigError: the section ``compare`` is wrong. DataError: more runs have not finished than failed, or one is
            damaged. ProtoflError: none has finished, or they do not belong together.
    """  # noqa: D205
    comparison = collect(parameters, runs, failed, rows=rows, draws=draws, tuning=tuning, budget=budget)
    write(comparison, directory)
    write_csv(curves_table(comparison.runs), directory / "curves.csv")
    times = times_of(comparison) if with_times else None
    if times is None:
        disk.remove(directory / "times.csv", missing_ok=True)
    else:
        write_texts({"times.csv": time_csv(times)}, directory)
    facts = page_facts(comparison.runs, command) if with_times else ()
    write_comparison_page(comparison, _partitions(comparison), directory, time_table(times) if times else None, facts)
    return comparison


def collect(
    parameters: Mapping[str, Any],
    runs: Sequence[Path],
    failed: Mapping[str, str] | None = None,
    *,
    rows: Sequence[str] = (),
    draws: Sequence[int | None] = (),
    tuning: Sequence[Mapping[str, Any]] | None = None,
    budget: str | None = None,
) -> Comparison:
    """Read finished runs and set them against ``compare.baseline``, methods in the order of the runs.

    Arguments and errors are those of :func:`compare`; nothing is written.
    """
    settings = build(CompareConfig, parameters.get("compare") or {}, "compare")
    named = list(zip(runs, rows or [""] * len(runs), draws or [None] * len(runs), strict=True))
    unfinished = [run for run in runs if not has_whole_results(run)]
    if len(unfinished) <= len(failed or {}):
        named = [entry for entry in named if entry[0] not in unfinished]
    records = [(load_run(run), row, draw) for run, row, draw in named]
    found = [Tuned(**values) for values in tuning or ()]
    compared = comparisons.compare(
        [replace(record, method=row or record.method, draw=draw) for record, row, draw in records],
        tuned_name(settings.baseline) if found else settings.baseline,
        target_fraction=settings.target_fraction,
        failed=failed,
        tuning=found,
        budget=budget,
        claims=claims_of(settings.claims),
    )
    return replace(compared, smooth=settings.smooth)


def write_comparison_page(
    comparison: Comparison,
    partitions: Mapping[int, Path],
    directory: Path,
    times: Table | None = None,
    facts: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write ``report.html`` and ``figures/`` of a comparison and return the page.

    Args:
        comparison: of finished runs.
        partitions: partition directory by seed; the heatmap shows that of the lowest seed. May be empty.
        directory: where both go; made if it is not there.
        times: seconds and joules by method, where the page has them. facts: below its title, such as date and commit.

    Raises:
        DataError: a file is missing or damaged.
    """
    names = next((run.class_names for run in comparison.runs if run.class_names), ())
    held = {seed: load_partition(folder, names) for seed, folder in sorted(partitions.items())}
    drawings = comparison_drawings(comparison, next(iter(held.values()), None))
    write_drawings(drawings.values(), directory / "figures")
    tables = comparison_tables(comparison)
    sections = [
        *_answer(comparison, tables, drawings),
        *plots(drawings, ("tradeoff", "accuracy", "bytes"), several=True),
        *_tables(tables, ("target",)),
        *_tables(tables, ("strict_target",), folded=True),
        *_tables(tables, ("stream",), plot(drawings, "stream", several=True), plot(drawings, "tasks", several=True)),
        *plots(drawings, ("clients", "classes"), several=True),
        *communication(comparison, tables["traffic"]),
        *([Section("times", times.title, (Block("table", times),))] if times else []),
        *plots(drawings, ("loss",), several=True),
        *who_holds_what(drawings, held),
        *_tables(tables, ("further",), folded=True),
        *ending(definitions([*tables.values(), *([times] if times else [])]), comparison.runs),
    ]
    page = {
        "kicker": "comparison",
        "title": f"{plural(comparison.count, 'method')} on {comparison.dataset}",
        "facts": facts,
    }
    styles = method_styles([row.method for row in comparison.methods])
    colours = {method: style.colour for method, style in styles.items()}
    return write_page(directory / "report.html", page, lead(comparison, held), sections, colours=colours)


def _answer(comparison: Comparison, tables: Mapping[str, Table], drawings: Mapping[str, Drawing]) -> Iterator[Section]:
    """What people look at first: verdicts, accuracies, differences to the baseline; then claims, tuning, failures."""
    verdicts = (*statements(comparison), *after_correction(comparison))
    blocks = [Block("answer", verdicts)] if verdicts else []
    blocks.append(Block("table", tables["accuracy"]))
    if tables["accuracy"].has_marks:
        blocks.append(Block("words", MARKS_MEAN))
    if comparison.notes:
        blocks.append(Block("notes", comparison.notes))
    yield Section("summary", tables["accuracy"].title, tuple(blocks))
    if comparison.failed:
        failed = tuple(f"{label}: {reason}" for label, reason in comparison.failed.items())
        yield Section("failed", "Failed runs", (Block("notes", failed),))
    yield from _tables(tables, ("differences",), plot(drawings, "differences", several=True))
    yield from _tables(tables, ("claims", "tuning"))


def _tables(
    tables: Mapping[str, Table], names: Sequence[str], *figures: Iterable[Block], folded: bool = False
) -> Iterator[Section]:
    """A section for each of these tables that there is, with the figures that show the same."""
    for name in names:
        if name in tables:
            drawn = [block for figure in figures for block in figure]
            yield Section(name, tables[name].title, (Block("table", tables[name]), *drawn), folded=folded)


def _partitions(comparison: Comparison) -> dict[int, Path]:
    """By seed, of the division where that is another: of its first run whose partition is still there."""
    found: dict[int, Path] = {}
    for run in comparison.runs:
        seed = run.seed if run.draw is None else run.draw
        if seed not in found and run.partition_fingerprint is not None:
            try:
                found[seed] = inputs_of(run.directory).partition
            except DataError as error:
                _log.warning("the page does not show who holds what with seed %d: %s", seed, error)
    return found
