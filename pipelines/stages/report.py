"""Stage *report*: the analyses that were asked for, figures and a page of one finished run."""

from __future__ import annotations

from pathlib import Path

from flcore.config import Config
from pipelines.runs import analyses
from pipelines.runs.layout import RunFiles


def report(partition: Path, directory: Path, *, config: Config | None = None, prepared: Path | None = None) -> Path:
    """Write ``analyses/``, ``figures/`` and ``report.html`` of an evaluated run, and return the page's path.

    Args:
        partition: the run's partition.
        directory: of the run.
        config: its ``evaluation.analyses`` are computed; those that lie there already stay, and are shown too.
        prepared: the run's data, for these. Without either no analysis is computed.
    """
    if config is not None and prepared is not None:
        analyses.compute(config, prepared, partition, directory, config.evaluation.analyses)
    # Tables and figures take seconds to import, which the other stages need not spend.
    from pipelines.reporting.figures.analyses import write_analyses
    from pipelines.reporting.figures.charts import load_partition
    from pipelines.reporting.figures.sets import write_figures
    from pipelines.reporting.html import write_run_report
    from pipelines.runs.record import load_run

    files = RunFiles(directory)
    run = load_run(directory)
    write_figures([run], files.figures, load_partition(partition))
    write_analyses(analyses.load(directory), run, files.figures)
    return write_run_report(directory, partition, files.report)
