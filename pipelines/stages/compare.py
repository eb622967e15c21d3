"""Stage *compare*: many finished runs to one table, figures and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.config import Config

if TYPE_CHECKING:
    from pipelines.reporting.statistics import Comparison


def compare(config: Config, runs: Sequence[Path], partitions: Path, directory: Path) -> Comparison:
    """Write ``comparison.csv``, ``.md``, ``.json``, ``runs.csv``, ``figures/`` and ``report.html``.

    Args:
        config: its ``compare`` section says baseline and target; its partition seed finds the partitions.
        runs: run directories, in the order in which methods shall appear.
        partitions: folder with a partition ``seed-<n>`` per seed.
        directory: where the results go.

    Returns:
        The comparison.
    """
    # Tables and figures take seconds to import, which the other stages need not spend.
    from pipelines.reporting.comparison_tables import write
    from pipelines.reporting.figures.charts import load_partition
    from pipelines.reporting.figures.sets import write_figures
    from pipelines.reporting.html import write_comparison_report

    comparison = collect(config, runs)
    records = comparison.runs
    write(comparison, directory)
    seeds = sorted({record.seed for record in records})
    by_seed = {seed: partition_folder(config, partitions, seed) for seed in seeds}
    write_figures(records, directory / "figures", load_partition(by_seed[seeds[0]]))
    write_comparison_report(comparison, records, by_seed, directory / "report.html")
    return comparison


def collect(config: Config, runs: Sequence[Path]) -> Comparison:
    """Read finished runs and set them against ``compare.baseline``, methods in the order of the runs."""
    from pipelines.reporting.statistics import compare as summarise
    from pipelines.runs.record import load_run

    records = [load_run(run) for run in runs]
    return summarise(records, config.compare.baseline, target_fraction=config.compare.target_fraction)


def comparison_runs(config: Config, directory: Path) -> list[Path]:
    """Where `dvc.yaml` puts the runs of ``compare.methods`` and ``compare.seeds``."""
    pairs = ((method, seed) for method in config.compare.methods for seed in config.compare.seeds)
    return [directory / "runs" / f"{method}-s{seed}" for method, seed in pairs]


def partition_folder(config: Config, partitions: Path, seed: int) -> Path:
    """The partition of a run with ``seed``: its own, or the common one where ``partition.seed`` is set."""
    return partitions / f"seed-{seed if config.partition.seed is None else config.partition.seed}"
