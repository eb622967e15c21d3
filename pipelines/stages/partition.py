"""Stage *partition*: which client holds what."""

from __future__ import annotations

from pathlib import Path

from flcore.config import Config
from flcore.data.partition import Partition
from flcore.data.summary import summarise
from flcore.running import divide


def partition(config: Config, prepared: Path, directory: Path) -> Partition:
    """Divide the prepared data into ``directory``, and draw samples by class and client in ``<directory>.svg``.

    The figure lies beside the folder, because its bytes also depend on the version of matplotlib.
    """
    division = divide(config, prepared, directory)
    draw_heatmap(directory)
    return division


def draw_heatmap(directory: Path) -> Path:
    """Draw a stored partition in ``<directory>.svg``."""
    from pipelines.reporting.figures import charts as figures

    figure = figures.draw_partition(figures.load_partition(directory))
    return figures.save(figure, directory.with_name(f"{directory.name}.svg"))


def partition_table(division: Partition) -> list[str]:
    """The lines that ``protofl stage partition`` prints."""
    rows = summarise(division)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]
