"""All figures that some runs have values for: drawn once, for the page and for the files beside the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pandas as pd

from flcore.io import disk
from flcore.io.files import remove_stale_temp
from pipelines.reporting.comparison import Comparison
from pipelines.reporting.figures import charts
from pipelines.reporting.figures.data import (
    PANEL_TITLES,
    bytes_accuracy_data,
    class_accuracy_data,
    client_accuracy_data,
    curve_data,
    curve_titles,
    difference_data,
    run_curves,
    stacked,
    tradeoff_data,
    training_loss_data,
)
from pipelines.reporting.figures.partition import PartitionTable, draw_partition, partition_data
from pipelines.reporting.figures.style import house_style, svg_text, write_svg
from pipelines.reporting.figures.tasks import by_task_data, draw_by_task, draw_stream, stream_data
from pipelines.reporting.figures.tradeoff import draw_tradeoff
from pipelines.runs.layout import write_text
from pipelines.runs.record import RunRecord

_KINDS = (".svg", ".csv", ".png")


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure as it is shown and stored: its panels as SVG elements, and the table behind it (None: stored elsewhere).

    ``panels`` are by the stem of their file's name, which also makes the ids in them unique.
    """

    name: str
    panels: Mapping[str, str]
    data: pd.DataFrame | None = None

    @property
    def svgs(self) -> tuple[str, ...]:
        """The panels in their order."""
        return tuple(self.panels.values())


def drawing(name: str, panels: charts.Panels, data: pd.DataFrame | None = None) -> Drawing:
    """Render each panel, once."""
    stems = {f"{name}-{_file_name(panel)}" if panel else name: figure for panel, figure in panels.items()}
    return Drawing(name, {stem: svg_text(figure, f"plot-{stem}") for stem, figure in stems.items()}, data)


def _file_name(panel: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in panel)


def run_drawings(run: RunRecord, partition: PartitionTable | None = None) -> dict[str, Drawing]:
    """All figures that one run has values for.

    Args:
        run: a finished one.
        partition: adds the heatmap.

    Returns:
        By name: `accuracy`, `loss`, `stream`, `tasks`, `clients`, `classes`, `partition`; those without data are left
        out.
    """
    curves = stacked({metric: curve_data([run], metric) for metric in run_curves(run)}, "metric")
    found: list[Drawing] = []
    with house_style():
        if not curves.empty:
            found.append(drawing("accuracy", charts.draw_accuracy_of_run(run), curves))
        return _by_name([*found, *_of_any([run], partition)])


def comparison_drawings(comparison: Comparison, partition: PartitionTable | None = None) -> dict[str, Drawing]:
    """All figures that a comparison has values for.

    Args:
        comparison: its methods stand in figures in the order in which they stand there.
        partition: as in :func:`run_drawings`.

    Returns:
        By name: `tradeoff`, `accuracy`, `bytes`, `differences`, and those of :func:`run_drawings`.
    """
    runs, smooth = comparison.runs, comparison.smooth
    curves = stacked({metric: curve_data(runs, metric, smooth) for metric in curve_titles(runs)}, "metric")
    differences, costs = difference_data(comparison), tradeoff_data(runs)
    found: list[Drawing] = []
    with house_style():
        if (costs["bytes"] > 0).any():
            found.append(drawing("tradeoff", draw_tradeoff(runs), costs))
        if not curves.empty:
            found.append(drawing("accuracy", charts.draw_accuracy_curves(runs, smooth), curves))
            if any(record.total_bytes > 0 for run in runs for record in run.history):
                traffic = stacked({metric: bytes_accuracy_data(runs, metric) for metric in PANEL_TITLES}, "metric")
                found.append(drawing("bytes", charts.draw_bytes_against_accuracy(runs), traffic))
        if not differences.empty:
            found.append(drawing("differences", charts.draw_differences(comparison), differences.drop(columns="seeds")))
        return _by_name([*found, *_of_any(runs, partition)])


def _of_any(runs: Sequence[RunRecord], partition: PartitionTable | None) -> Iterator[Drawing]:
    clients, classes, losses = client_accuracy_data(runs), class_accuracy_data(runs), training_loss_data(runs)
    if partition is not None:
        yield partition_drawing(partition)
    if not clients.empty:
        yield drawing("clients", charts.draw_client_spread(runs), clients)
    if not classes.empty:
        by_class = classes.rename_axis("method").reset_index()
        yield drawing("classes", charts.draw_class_accuracy(runs), by_class)
    if any(run.tasks for run in runs):
        yield drawing("stream", draw_stream(runs), stream_data(runs))
        yield drawing("tasks", draw_by_task(runs), by_task_data(runs))
    if not losses.empty:
        yield drawing("loss", charts.draw_training_loss(runs), losses)


@lru_cache(maxsize=16)
def partition_drawing(partition: PartitionTable) -> Drawing:
    """Who holds what; the runs of a seed share it."""
    held = partition_data(partition).rename_axis("client").reset_index()
    return drawing("partition", {"": draw_partition(partition)}, held)


def _by_name(drawings: Iterable[Drawing]) -> dict[str, Drawing]:
    return {each.name: each for each in drawings if each.panels}


def write_drawings(drawings: Iterable[Drawing], directory: Path) -> tuple[Path, ...]:
    """Write every panel as SVG and, beside it, the figure's data as CSV; figures of an earlier time are removed.

    Returns:
        The files: `<name>.svg`, or `<name>-<panel>.svg` for each of several panels, and `<name>.csv`.
    """
    disk.make_folder(directory)
    remove_stale_temp(directory)
    written = []
    for each in drawings:
        written += [write_svg(svg, directory / f"{stem}.svg") for stem, svg in each.panels.items()]
        if each.data is not None:
            path = directory / f"{each.name}.csv"
            write_csv(each.data, path)
            written.append(path)
    for path in directory.iterdir():
        if path.suffix in _KINDS and path not in written:
            disk.remove(path)
    return tuple(written)


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table; floats to twelve decimals, since the last bits of a mean may differ between machines."""
    write_text(path, table.round(12).to_csv(index=False, lineterminator="\n"))
