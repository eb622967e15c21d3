"""All figures that some runs have values for, as reports show them and as files beside the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from pipelines.reporting.figures.charts import (
    CURVE_METRICS,
    PartitionTable,
    bytes_accuracy_data,
    class_accuracy_data,
    client_accuracy_data,
    curve_data,
    draw_accuracy_curves,
    draw_bytes_against_accuracy,
    draw_class_accuracy,
    draw_client_spread,
    draw_partition,
    draw_training_loss,
    partition_data,
    save,
    training_loss_data,
)
from pipelines.reporting.figures.tasks import by_task_data, draw_by_task, draw_stream, stream_data
from pipelines.runs.record import RunRecord


def comparison_figures(
    runs: Sequence[RunRecord], partition: PartitionTable | None = None
) -> dict[str, tuple[Figure, pd.DataFrame]]:
    """All figures that these runs have values for, each with its data, in reading order.

    Args:
        runs: any methods and seeds, in the order in which methods shall appear.
        partition: adds the heatmap and gives class names.

    Returns:
        By name: `accuracy`, `bytes`, `partition`, `clients`, `classes`, `stream`, `tasks`, `loss`; those without data
        are left out.
    """
    names = partition.class_names if partition is not None else ()
    curves = _stacked(runs, curve_data)
    clients, classes, losses = client_accuracy_data(runs), class_accuracy_data(runs), training_loss_data(runs)
    figures: dict[str, tuple[Figure, pd.DataFrame]] = {}
    if not curves.empty:
        figures["accuracy"] = (draw_accuracy_curves(runs), curves)
        if any(record.total_bytes > 0 for run in runs for record in run.history):
            figures["bytes"] = (draw_bytes_against_accuracy(runs), _stacked(runs, bytes_accuracy_data))
    if partition is not None:
        figures["partition"] = (
            draw_partition(partition),
            partition_data(partition).rename_axis("client").reset_index(),
        )
    if not clients.empty:
        figures["clients"] = (draw_client_spread(runs), clients)
    if not classes.empty:
        figures["classes"] = (draw_class_accuracy(runs, names), classes.rename_axis("method").reset_index())
    if any(run.tasks for run in runs):
        figures["stream"] = (draw_stream(runs), stream_data(runs))
        figures["tasks"] = (draw_by_task(runs), by_task_data(runs))
    if not losses.empty:
        figures["loss"] = (draw_training_loss(runs), losses)
    return figures


def write_figures(
    runs: Sequence[RunRecord],
    directory: Path,
    partition: PartitionTable | None = None,
    formats: Sequence[str] = ("svg",),
) -> tuple[Path, ...]:
    """Write every figure and, beside it, its data as CSV.

    Args:
        runs: any methods and seeds, in the order in which methods shall appear.
        directory: made if it is not there.
        partition: adds the heatmap and gives class names.
        formats: of `svg` and `png`.

    Returns:
        The files, `<name>.<format>` and `<name>.csv`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (figure, table) in comparison_figures(runs, partition).items():
        written += [save(figure, directory / f"{name}.{suffix}") for suffix in formats]
        data = directory / f"{name}.csv"
        data.write_text(table.round(12).to_csv(index=False, lineterminator="\n"), encoding="utf-8", newline="")
        written.append(data)
    return tuple(written)


def _stacked(runs: Sequence[RunRecord], data: Callable[[Sequence[RunRecord], str], pd.DataFrame]) -> pd.DataFrame:
    tables = [table.assign(metric=metric) for metric in CURVE_METRICS if not (table := data(runs, metric)).empty]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
