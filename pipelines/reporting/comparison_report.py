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
from pipelines.runs.folder import RunFolder
from pipelines.runs.record import record_of

_log = logging.getLogger(__name__)


def collect(
    parameters: Mapping[str, Any],
    runs: Sequence[RunFolder],
    failed: Mapping[str, str] | None = None,
    *,
    rows: Sequence[str] = (),
    draws: Sequence[int | None] = (),
    tuning: Sequence[Mapping[str, Any]] | None = None,
    budget: str | None = None,
) -> Comparison:
    """Compare finished runs with ``compare.baseline``, methods in the order of the runs.

    Args:
        parameters: nested; of ``compare``, ``baseline``, ``target_fraction``, ``claims`` and ``smooth`` are used.
        runs: their folders.
        failed: reasons of runs without a result, by label.
        rows: name of each run's method or variant; empty: its method.
        draws: partition seed of each run, where seeds are run with several; None or empty: one partition per seed.
        tuning: values of :class:`~pipelines.reporting.comparison.Tuned`.
        budget: sentence on the limit of every run, if that is not a number of rounds.

    Raises:
        ConfigError: the section ``compare`` is wrong. DataError: more runs have not finished than failed, or one is
            damaged. ProtoflError: none has finished, or they do not belong together.
    """
    settings = build(CompareConfig, parameters.get("compare") or {}, "compare")
    named = list(zip(runs, rows or [""] * len(runs), draws or [None] * len(runs), strict=True))
    whole = [entry for entry in named if entry[0].is_whole]
    if len(named) - len(whole) <= len(failed or {}):
        named = whole
    records = [(record_of(run), row, draw) for run, row, draw in named]
    tuned = [Tuned(**values) for values in tuning or ()]
    compared = comparisons.compare(
        [replace(record, method=row or record.method, draw=draw) for record, row, draw in records],
        tuned_name(settings.baseline) if tuned else settings.baseline,
        target_fraction=settings.target_fraction,
        failed=failed,
        tuning=tuned,
        budget=budget,
        claims=claims_of(settings.claims),
    )
    return replace(compared, smooth=settings.smooth)


def write_report(
    comparison: Comparison, directory: Path, *, with_times: bool = True, command: str | None = None
) -> Path:
    """Write tables and curves as files, ``figures/`` and ``report.html``, and return the page.

    Args:
        comparison: of finished runs. directory: of the results.
        with_times: also write what differs on another machine: ``times.csv``, and on the page seconds, joules, date,
            commit and command.
        command: that made the comparison.
    """
    write(comparison, directory)
    write_csv(curves_table(comparison.runs), directory / "curves.csv")
    by_method = times_of(comparison) if with_times else None
    if by_method is None:
        disk.remove(directory / "times.csv", missing_ok=True)
    else:
        write_texts({"times.csv": time_csv(by_method)}, directory)
    times = time_table(by_method) if by_method else None
    names = next((run.class_names for run in comparison.runs if run.class_names), ())
    partitions = {seed: load_partition(folder, names) for seed, folder in sorted(_partitions(comparison).items())}
    drawings = comparison_drawings(comparison, next(iter(partitions.values()), None))
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
        *who_holds_what(drawings, partitions),
        *_tables(tables, ("further",), folded=True),
        *ending(definitions([*tables.values(), *([times] if times else [])]), comparison.runs),
    ]
    page = {
        "kicker": "comparison",
        "title": f"{plural(comparison.count, 'method')} on {comparison.dataset}",
        "facts": page_facts(comparison.runs, command) if with_times else (),
    }
    styles = method_styles([row.method for row in comparison.methods])
    colours = {method: style.colour for method, style in styles.items()}
    return write_page(directory / "report.html", page, lead(comparison, partitions), sections, colours=colours)


def _answer(comparison: Comparison, tables: Mapping[str, Table], drawings: Mapping[str, Drawing]) -> Iterator[Section]:
    """Yield verdicts, accuracies and differences to the baseline, then claims, tuning and failures."""
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
    """Yield a section for each of these tables that exists, with figures of the same values."""
    for name in names:
        if name in tables:
            drawn = [block for figure in figures for block in figure]
            yield Section(name, tables[name].title, (Block("table", tables[name]), *drawn), folded=folded)


def _partitions(comparison: Comparison) -> dict[int, Path]:
    """Return the partition by its seed, from the first run with an existing one."""
    partitions: dict[int, Path] = {}
    for run in comparison.runs:
        seed = run.seed if run.draw is None else run.draw
        if seed not in partitions and run.partition_fingerprint is not None:
            try:
                partitions[seed] = run.folder.inputs.partition
            except DataError as error:
                _log.warning("the page does not show who holds what with seed %d: %s", seed, error)
    return partitions
