"""All figures of runs: drawn once, for the page and for files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pandas as pd

from flcore.io import disk
from flcore.io.files import remove_stale_temp
from pipelines.reporting import frame
from pipelines.reporting.comparison import PAIRED_METRICS, Comparison
from pipelines.reporting.figures import cells, curves, points
from pipelines.reporting.figures.style import LineStyle, house_style, method_styles, svg_text, write_svg
from pipelines.reporting.partition_table import PartitionTable
from pipelines.runs.layout import write_text
from pipelines.runs.record import RunRecord, group_by_method

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


def drawing(name: str, panels: curves.Panels, data: pd.DataFrame | None = None) -> Drawing:
    """Render each panel, once."""
    stems = {f"{name}-{_file_name(panel)}" if panel else name: figure for panel, figure in panels.items()}
    return Drawing(name, {stem: svg_text(figure, f"plot-{stem}") for stem, figure in stems.items()}, data)


def _file_name(panel: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in panel)


def run_drawings(run: RunRecord, partition: PartitionTable | None = None) -> dict[str, Drawing]:
    """Draw all figures that one run has values for; a partition adds the heatmap.

    Returns:
        By name: `accuracy`, `loss`, `stream`, `tasks`, `clients`, `classes`, `partition`; those without data are left
        out.
    """
    rounds = frame.rounds_frame([run])
    shown = [*frame.curve_metrics(rounds), "top1_vote"]
    table = frame.over_seeds(rounds, [metric for metric in frame.RUN_CURVES if metric in shown])
    with house_style():
        accuracy = [] if table.empty else [drawing("accuracy", curves.draw_accuracy_of_run(table), table)]
        return _by_name([*accuracy, *_of_any([run], rounds, method_styles([run.method]), partition)])


def comparison_drawings(comparison: Comparison, partition: PartitionTable | None = None) -> dict[str, Drawing]:
    """Draw all figures that a comparison has values for, methods in its order.

    Returns:
        By name: `tradeoff`, `accuracy`, `bytes`, `differences`, and those of :func:`run_drawings`.
    """
    runs, smooth = comparison.runs, comparison.smooth
    rounds, styles = frame.rounds_frame(runs), method_styles(list(group_by_method(runs)))
    accuracy = frame.smoothed(frame.over_seeds(rounds, frame.curve_metrics(rounds)), smooth)
    differences, costs = frame.differences(comparison, PAIRED_METRICS), frame.tradeoff(runs, PAIRED_METRICS)
    drawings: list[Drawing] = []
    with house_style():
        if (costs["bytes"] > 0).any():
            drawings.append(drawing("tradeoff", points.draw_tradeoff(costs, styles), costs))
        if not accuracy.empty:
            drawings.append(drawing("accuracy", curves.draw_accuracy_curves(accuracy, styles, smooth), accuracy))
        if (rounds.loc[rounds["metric"] == "bytes", "value"] > 0).any():
            traffic = frame.bytes_accuracy(rounds, PAIRED_METRICS)
            drawings.append(drawing("bytes", curves.draw_bytes_against_accuracy(traffic, styles), traffic))
        if not differences.empty:
            forest = points.draw_differences(comparison, differences, styles)
            drawings.append(drawing("differences", forest, differences))
        return _by_name([*drawings, *_of_any(runs, rounds, styles, partition)])


def _of_any(
    runs: Sequence[RunRecord], rounds: pd.DataFrame, styles: Mapping[str, LineStyle], partition: PartitionTable | None
) -> Iterator[Drawing]:
    clients, classes, losses = frame.client_accuracy(runs), frame.class_accuracy(runs), frame.training_losses(rounds)
    if partition is not None:
        yield partition_drawing(partition)
    if not clients.empty:
        yield drawing("clients", points.draw_client_spread(clients, styles), clients)
    if not classes.empty:
        by_class = classes.rename_axis("method").reset_index()
        yield drawing("classes", cells.draw_class_accuracy(classes), by_class)
    if any(run.tasks for run in runs):
        borders = sorted({end + 0.5 for run in runs for end in run.block_ends[:-1]})
        stream, tasks = frame.over_seeds(rounds, curves.STREAM_METRICS), frame.task_accuracy(rounds)
        yield drawing("stream", curves.draw_stream(stream, styles, borders), stream)
        yield drawing("tasks", curves.draw_by_task(tasks, borders), tasks)
    if not losses.empty:
        yield drawing("loss", curves.draw_training_loss(losses, styles), losses)


@lru_cache(maxsize=16)
def partition_drawing(partition: PartitionTable) -> Drawing:
    """Draw who holds what; the runs of a seed share it."""
    table = partition.to_frame().rename_axis("client").reset_index()
    return drawing("partition", {"": cells.draw_partition(partition)}, table)


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
