"""The page of one finished run, with its figures and its analyses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.config.analyses import without_round
from pipelines.reporting import page_tables
from pipelines.reporting.comparison import compare
from pipelines.reporting.comparison_tables import comparison_tables, definitions
from pipelines.reporting.figures.analyses import CAPTIONS, analysis_drawings, heading
from pipelines.reporting.figures.sets import Drawing, run_drawings, write_drawings
from pipelines.reporting.page import (
    LEGENDS,
    Block,
    Section,
    communication,
    ending,
    lead,
    panels,
    plots,
    who_holds_what,
    write_page,
)
from pipelines.reporting.partition_table import load_partition
from pipelines.runs import analyses
from pipelines.runs.folder import RunFolder
from pipelines.runs.record import record_of

if TYPE_CHECKING:
    from flcore.config.schema import Config

_LEARNING = "Learning curves"


def report(
    directory: Path, *, config: Config | None = None, prepared: Path | None = None, partition: Path | None = None
) -> Path:
    """Write ``figures/`` and ``report.html`` of a finished run, and ``analyses/`` where a configuration asks for some.

    Args:
        directory: of the run.
        config: its ``evaluation.analyses`` are computed first, by which torch is imported; those that lie there already
            stay, and are shown too. None only shows what is there.
        prepared: the run's data, which analyses need. partition: its partition. None: those that the run names.

    Returns:
        The page.

    Raises:
        DataError: the run has not finished, is damaged, or its data or partition are not there any more.
    """
    run = RunFolder(directory)
    if partition is None or (config is not None and prepared is None):
        prepared, partition = prepared or run.inputs.prepared, partition or run.inputs.partition
    if config is not None:
        assert prepared is not None  # found above
        analyses.compute(config, prepared, partition, directory, analyses.asked(config))
    return write_run_page(run, partition)


def write_run_page(folder: RunFolder, partition_dir: Path | None) -> Path:
    """Write ``report.html`` and ``figures/`` of one finished run, with the analyses that lie there.

    Args:
        folder: of the run.
        partition_dir: holds the partition's `manifest.json`; None leaves the partition out.

    Returns:
        The page.
    """
    files, run = folder.files, record_of(folder)
    comparison = compare([run], baseline=run.method)
    partitions = {} if partition_dir is None else {run.seed: load_partition(partition_dir, run.class_names)}
    stored = analyses.load(folder)
    drawings, analysed = run_drawings(run, partitions.get(run.seed)), analysis_drawings(stored, run)
    write_drawings((*drawings.values(), *analysed.values()), files.figures)
    tables = comparison_tables(comparison)
    explained = [tables[name] for name in ("accuracy", "stream", "further") if name in tables]
    meanings = {term: meaning for term, meaning in definitions(explained).items() if term != "±"}
    sections = [
        *_learning(drawings),
        *plots(drawings, ("stream", "tasks", "clients", "classes"), several=False),
        *_analyses(stored, analysed),
        *who_holds_what(drawings, partitions),
        *communication(comparison),
        Section("values", "All values", (Block("table", page_tables.run_values(run)),)),
        *ending(meanings, [run]),
    ]
    page = {"kicker": "run", "title": f"{run.method} on {run.dataset}", "tiles": page_tables.run_tiles(run)}
    return write_page(files.report, page, lead(comparison, partitions), sections, colours={})


def _learning(drawings: Mapping[str, Drawing]) -> Iterator[Section]:
    """Yield accuracy and loss over rounds, side by side."""
    names = [name for name in ("accuracy", "loss") if name in drawings]
    if names:
        caption = " ".join(f"{name.capitalize()}: {LEGENDS[name].caption}" for name in names)
        curves = panels(_LEARNING, caption, *(drawings[name] for name in names))
        yield Section("accuracy", _LEARNING, (curves,))


def _analyses(stored: Sequence[analyses.StoredAnalysis], drawn: Mapping[str, Drawing]) -> Iterator[Section]:
    if stored:
        yield Section("analyses", "Analyses", ())
    for analysis in stored:
        block = Block("words", f"Left out: {analysis.skipped}.")
        if analysis.name in drawn:
            caption = " ".join((CAPTIONS[without_round(analysis.name)[0]], *analysis.notes))
            block = panels(heading(analysis.name), caption, drawn[analysis.name])
        yield Section(f"analysis-{analysis.name}", heading(analysis.name), (block,), level=3)
