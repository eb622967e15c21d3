"""Figures of runs on a stream of tasks: A_glo, A_loc and A_sel over rounds, and accuracy on earlier tasks over time.

`*_data` gives the table that tests check, `draw_*` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from pipelines.reporting.figures.data import over_seeds, stacked
from pipelines.reporting.figures.parts import label_line_ends, panel, panel_height, percent_axis, round_axis
from pipelines.reporting.figures.style import INK, SMALL_PANEL, house_style, method_styles
from pipelines.runs.record import RoundRecord, RunRecord, group_by_method

STREAM_PANELS: Mapping[str, str] = {
    "a_glo": "A_glo: global model",
    "a_loc": "A_loc: own models, all classes",
    "a_sel": "A_sel: own models, classes met",
}
# Light to dark in the order in which tasks are met; the lightest can still be seen on white.
_TASK_COLOURS = LinearSegmentedColormap.from_list("tasks", ["#f0b43c", "#d9662b", "#a3265a", "#7b3fa6"])


def stream_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """A_glo (or the vote in its place), A_loc, A_sel and their minority parts by round.

    Returns:
        Columns metric, method, round, mean, std (NaN for one seed), n.
    """
    runs = list(runs)
    names = [name for metric in STREAM_PANELS for name, _, _ in _variants(metric)]
    return stacked({name: over_seeds(runs, _reader(name), "mean") for name in names}, "metric")


def by_task_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Accuracy of clients' own models on the classes of each task, by round; a task has rows once it has begun.

    Returns:
        Columns task (from 1), method, round, mean, std, n.
    """
    runs = list(runs)
    count = max((len(record.tasks.get("by_task") or ()) for run in runs for record in run.history), default=0)
    return stacked({task + 1: over_seeds(runs, _task_reader(task), "mean") for task in range(count)}, "task")


def _reader(name: str) -> Callable[[RoundRecord], float | None]:
    return lambda record: record.tasks.get(name)


def _task_reader(task: int) -> Callable[[RoundRecord], float | None]:
    return lambda record: record.tasks["by_task"][task] if record.tasks else None


def borders(runs: Iterable[RunRecord]) -> list[float]:
    """Between which rounds the next task begins for everybody; empty where tasks return in every epoch."""
    return sorted({end + 0.5 for run in runs for end in run.block_ends[:-1]})


def draw_stream(runs: Sequence[RunRecord]) -> dict[str, Figure]:
    """A panel each for A_glo, A_loc and A_sel, mean over seeds: a line per method, dashed on minority classes.

    Where no global model answers, A_glo is the vote of clients' models, dotted.
    """
    table, styles, lines = stream_data(runs), method_styles(list(group_by_method(runs))), borders(runs)
    panels = {}
    with house_style():
        for metric, title in STREAM_PANELS.items():
            panels[metric], axes = panel(title, panel_height(styles))
            ends, names = {}, {}
            for method, style in styles.items():
                for name, dashes, width in _variants(metric):
                    curve = table[(table["metric"] == name) & (table["method"] == method)]
                    if curve.empty:
                        continue
                    axes.plot(curve["round"], curve["mean"], color=style.colour, linestyle=dashes, linewidth=width)
                    if not name.endswith("_minority"):
                        ends[method] = (float(curve["round"].iloc[-1]), float(curve["mean"].iloc[-1]))
                        names[method] = f"{method} (vote)" if name.endswith("_vote") else method
            _frame(axes, lines)
            axes.set_ylabel("accuracy")
            label_line_ends(axes, ends, styles, names)
    return panels


def _variants(metric: str) -> list[tuple[str, Any, float]]:
    """Values of a panel, with the dashes and width of their lines."""
    whole, few, vote = "solid", (0, (3, 2)), (0, (1, 1.2))
    votes: list[tuple[str, Any, float]] = [(f"{metric}_vote", vote, 1.5), (f"{metric}_vote_minority", few, 0.9)]
    return [(metric, whole, 1.5), (f"{metric}_minority", few, 0.9), *(votes if metric == "a_glo" else [])]


def draw_by_task(runs: Sequence[RunRecord]) -> dict[str, Figure]:
    """A panel per method, a line per task from the round it begins: what becomes of what was learnt earlier."""
    table, lines = by_task_data(runs), borders(runs)
    tasks = sorted(set(table["task"]))
    top = float(table["mean"].max()) if len(table) else 1.0
    colours = {task: _TASK_COLOURS(position / max(len(tasks) - 1, 1)) for position, task in enumerate(tasks)}
    panels = {}
    with house_style():
        for method in (method for method in group_by_method(runs) if method in set(table["method"])):
            panels[method], axes = panel(method, 2.4, SMALL_PANEL)
            for task in tasks:
                curve = table[(table["method"] == method) & (table["task"] == task)]
                marker = "o" if len(curve) <= 8 else None
                axes.plot(curve["round"], curve["mean"], color=colours[task], marker=marker, markersize=2.5)
                if not curve.empty:
                    axes.annotate(
                        str(task),
                        (curve["round"].iloc[-1], curve["mean"].iloc[-1]),
                        xytext=(4, 0),
                        textcoords="offset points",
                        va="center",
                        color=colours[task],
                        annotation_clip=False,
                    )
            axes.set_ylim(-0.03 * top, 1.05 * top)  # the same for all, so that panels can be compared
            axes.set_ylabel("accuracy")
            _frame(axes, lines)
    return panels


def _frame(axes: Axes, lines: Sequence[float]) -> None:
    round_axis(axes, 5)
    percent_axis(axes.yaxis)
    for line in lines:
        axes.axvline(line, color=INK, linewidth=0.6, alpha=0.5, zorder=0)
