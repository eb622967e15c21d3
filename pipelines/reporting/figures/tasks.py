"""Figures of runs on a stream of tasks: A_glo, A_loc and A_sel over rounds, and accuracy on earlier tasks over time.

As in `pipelines/reporting/figures/charts.py`, `*_data` gives the table that tests check and `draw_*` draws it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipelines.reporting.figures.charts import INK, WIDTH, house_style, method_styles, over_seeds, percent_axis
from pipelines.runs.record import RoundRecord, RunRecord, group_by_method

STREAM_PANELS: Mapping[str, str] = {
    "a_glo": "A_glo: global model",
    "a_loc": "A_loc: own models, all classes",
    "a_sel": "A_sel: own models, classes met",
}
# Light to dark in the order in which tasks are met; the lightest can still be seen on white.
_TASK_COLOURS = LinearSegmentedColormap.from_list("tasks", ["#f0b43c", "#d9662b", "#a3265a", "#4b1d6e"])


def stream_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """A_glo, A_loc, A_sel and their minority parts by round.

    Returns:
        Columns metric, method, round, mean, std (NaN for one seed), n.
    """
    runs = list(runs)
    names = [name for metric in STREAM_PANELS for name in (metric, f"{metric}_minority")]
    tables = [over_seeds(runs, _reader(name), "mean").assign(metric=name) for name in names]
    return pd.concat(tables, ignore_index=True)[["metric", "method", "round", "mean", "std", "n"]]


def by_task_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Accuracy of clients' own models on the classes of each task, by round; a task has rows once it has begun.

    Returns:
        Columns task (from 1), method, round, mean, std, n.
    """
    runs = list(runs)
    count = max((len(record.tasks.get("by_task") or ()) for run in runs for record in run.history), default=0)
    tables = [over_seeds(runs, _task_reader(task), "mean").assign(task=task + 1) for task in range(count)]
    columns = ["task", "method", "round", "mean", "std", "n"]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def _reader(name: str) -> Callable[[RoundRecord], float | None]:
    return lambda record: record.tasks.get(name)


def _task_reader(task: int) -> Callable[[RoundRecord], float | None]:
    return lambda record: record.tasks["by_task"][task] if record.tasks else None


def borders(runs: Iterable[RunRecord]) -> list[float]:
    """Between which rounds the next task begins for everybody; empty where tasks return in every epoch."""
    return sorted({end + 0.5 for run in runs for end in run.block_ends[:-1]})


def draw_stream(runs: Sequence[RunRecord]) -> Figure:
    """A panel each for A_glo, A_loc and A_sel: a line per method, dashed on minority classes; mean over seeds."""
    table, styles, lines = stream_data(runs), method_styles(list(group_by_method(runs))), borders(runs)
    with house_style():
        rows = math.ceil((len(styles) + 1) / 7)
        figure = Figure(figsize=(WIDTH, 2.9 + 0.22 * rows))
        first: Axes | None = None
        for position, (metric, title) in enumerate(STREAM_PANELS.items()):
            axes = figure.add_subplot(1, 3, position + 1, sharey=first)
            first = first or axes
            for method, style in styles.items():
                for name, dashes, width in ((metric, "solid", 1.5), (f"{metric}_minority", (0, (3, 2)), 0.9)):
                    curve = table[(table["metric"] == name) & (table["method"] == method)]
                    axes.plot(curve["round"], curve["mean"], color=style.colour, linestyle=dashes, linewidth=width)
            _frame(axes, title, lines)
            if position:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel("accuracy")
        handles = [matplotlib.lines.Line2D([], [], color=style.colour) for style in styles.values()]
        handles.append(matplotlib.lines.Line2D([], [], color=INK, linestyle=(0, (3, 2)), linewidth=0.9))
        names = [*styles, "minority classes"]
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 7), frameon=False)
        return figure


def draw_by_task(runs: Sequence[RunRecord]) -> Figure:
    """A panel per method, a line per task from the round it begins: what becomes of what was learnt earlier."""
    table, lines = by_task_data(runs), borders(runs)
    methods = [method for method in group_by_method(runs) if method in set(table["method"])]
    tasks = sorted(set(table["task"]))
    columns = min(len(methods), 3) or 1
    rows = math.ceil(len(methods) / columns) or 1
    with house_style():
        figure = Figure(figsize=(WIDTH if columns > 1 else WIDTH * 0.62, 2.3 * rows + 0.3))
        colours = {task: _TASK_COLOURS(position / max(len(tasks) - 1, 1)) for position, task in enumerate(tasks)}
        first: Axes | None = None
        for position, method in enumerate(methods):
            axes = figure.add_subplot(rows, columns, position + 1, sharex=first, sharey=first)
            first = first or axes
            for task in tasks:
                curve = table[(table["method"] == method) & (table["task"] == task)]
                marker = "o" if len(curve) <= 8 else None
                axes.plot(curve["round"], curve["mean"], color=colours[task], marker=marker, markersize=2.5)
            _frame(axes, method, lines)
            if position % columns == 0:
                axes.set_ylabel("accuracy")
        handles = [matplotlib.lines.Line2D([], [], color=colour) for colour in colours.values()]
        names = [f"task {task}" for task in tasks]
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 8), frameon=False)
        return figure


def _frame(axes: Axes, title: str, lines: Sequence[float]) -> None:
    axes.set_title(title)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    percent_axis(axes.yaxis)
    for line in lines:
        axes.axvline(line, color=INK, linewidth=0.6, alpha=0.5, zorder=0)
