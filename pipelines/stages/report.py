"""Stage *report*: a page and figures of one finished run."""

from __future__ import annotations

from pathlib import Path

from pipelines.files import RunFiles


def report(partition: Path, directory: Path) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` of an evaluated run, and return the page's path."""
    # Tables and figures take seconds to import, which the other stages need not spend.
    from pipelines.comparison import load_run
    from pipelines.figures import load_partition, write_figures
    from pipelines.report import write_run_report

    files = RunFiles(directory)
    run = load_run(directory)
    write_figures([run], directory / "figures", load_partition(partition))
    return write_run_report(directory, partition, files.report)
