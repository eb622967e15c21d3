"""Figures over rounds or traffic: accuracy, losses, and streams of tasks; a line per method, a panel per metric.

Each is a set of panels by name, so that a page can put them in one line or two. The tables behind them are those of
:mod:`pipelines.reporting.frame`. A panel without values is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from pipelines.reporting.figures.parts import (
    byte_axis,
    draw_line,
    name_lines,
    panel,
    panel_height,
    percent_axis,
    round_axis,
)
from pipelines.reporting.figures.style import INK, SILENT, SMALL_PANEL, LineStyle, house_style, method_styles
from pipelines.runs.metrics import heading

Panels = dict[str, Figure]
PANEL_TITLES: Mapping[str, str] = {
    "top1_global": "Global model on the global test set",
    "mean_local": "Mean over clients, own test data",
    "pooled_local": "Clients on their own test data, pooled",
    "a_glo": "A_glo: global model",
    "a_loc": "A_loc: own models, all classes",
    "a_sel": "A_sel: own models, classes met",
}
STREAM = ("a_glo", "a_loc", "a_sel")
STREAM_METRICS = tuple(
    f"{name}{part}" for name in ("a_glo", "a_glo_vote", "a_loc", "a_sel") for part in ("", "_minority")
)
_FEW_DASHES, _VOTE_DASHES = (0, (3, 2)), (0, (1, 1.2))
_MOST_BANDS = 3
"""Bands of more methods would hide each other: then a bar at the end of each line shows the spread over seeds."""
# Light to dark in the order in which tasks are met; the lightest can still be seen on white.
_TASK_COLOURS = LinearSegmentedColormap.from_list("tasks", ["#f0b43c", "#d9662b", "#a3265a", "#7b3fa6"])


def draw_accuracy_curves(table: pd.DataFrame, styles: Mapping[str, LineStyle], smooth: int = 1) -> Panels:
    """Draw accuracy against rounds, mean over seeds: a panel for each metric of the table.

    The spread (one sample standard deviation) is a band, of many methods a bar at the end. With ``smooth`` above 1
    lines are moving averages over so many evaluated rounds, and the axis says so.
    """
    y, label = ("mean", "accuracy") if smooth == 1 else ("smoothed", f"accuracy, moving average of {smooth}")
    panels = {}
    with house_style():
        for metric, rows in table.groupby("metric", sort=False):
            panels[str(metric)], axes = panel(PANEL_TITLES[str(metric)], panel_height(len(styles)))
            for method, curve in _by_method(rows):
                _draw_spread(axes, curve["round"], curve[y], curve["std"], styles[method], len(styles))
                draw_line(axes, curve["round"], curve[y], styles[method], method)
            _finish(axes, label)
    return panels


def draw_accuracy_of_run(table: pd.DataFrame) -> Panels:
    """Draw accuracy against rounds of one run, in one panel: global model, vote and clients."""
    styles = method_styles(["top1_global", "top1_vote", "mean_local", "pooled_local"])
    with house_style():
        figure, axes = panel("Accuracy")
        for metric, curve in table.groupby("metric", sort=False):
            draw_line(axes, curve["round"], curve["mean"], styles[str(metric)], heading(str(metric)))
        _finish(axes, "accuracy")
    return {"": figure}


def draw_bytes_against_accuracy(table: pd.DataFrame, styles: Mapping[str, LineStyle]) -> Panels:
    """Draw accuracy against cumulative bytes in both directions (log axis), mean over seeds.

    A method that sends nothing has no place on a log axis: its final accuracy is a horizontal dotted line.
    """
    panels = {}
    with house_style():
        for metric, rows in table.groupby("metric", sort=False):
            panels[str(metric)], axes = panel(PANEL_TITLES[str(metric)], panel_height(len(styles)))
            for method, curve in _by_method(rows):
                sent, style = curve[curve["bytes"] > 0], styles[method]
                if sent.empty:
                    draw_silent(axes, method, float(curve["accuracy"].iloc[-1]), style)
                else:
                    _draw_spread(axes, sent["bytes"], sent["accuracy"], sent["std"], style, len(styles))
                    draw_line(axes, sent["bytes"], sent["accuracy"], style, method)
            byte_axis(axes, "bytes up + down, all clients, cumulative")
            axes.set_ylabel("accuracy")
            percent_axis(axes.yaxis)
            name_lines(axes)
    return panels


def draw_silent(axes: Axes, method: str, accuracy: float, style: LineStyle) -> None:
    """Draw the accuracy of a method that sends nothing across a panel whose axis are bytes."""
    axes.axhline(accuracy, color=style.colour, linestyle=SILENT, linewidth=1.2, label=f"{method} (0 B)")


def draw_training_loss(table: pd.DataFrame, styles: Mapping[str, LineStyle]) -> Panels:
    """Draw training-loss terms against rounds, mean over seeds: a panel per term, since their scales differ.

    A line per method. Of several methods only terms that two or more share are drawn: the page of a run has its own.
    """
    panels = {}
    with house_style():
        for term, rows in table.groupby("term", sort=False):
            curves = _by_method(rows)
            if len(curves) == 1 and len(styles) > 1:
                continue
            panels[str(term)], axes = panel(f"Training loss: {term}")
            for method, curve in curves:
                draw_line(axes, curve["round"], curve["mean"], styles[method], method)
            round_axis(axes)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
            whole = ScalarFormatter(useOffset=False)
            whole.set_scientific(False)  # a power of ten would stand apart, where the title is
            axes.yaxis.set_major_formatter(whole)
            if len(curves) > 1:
                name_lines(axes)
    return panels


def draw_stream(table: pd.DataFrame, styles: Mapping[str, LineStyle], borders: Sequence[float]) -> Panels:
    """Draw A_glo, A_loc and A_sel, mean over seeds: a line per method, dashed on minority classes.

    Where no global model answers, A_glo is the vote of clients' models, dotted.
    """
    panels = {}
    with house_style():
        for metric in STREAM:
            panels[metric], axes = panel(PANEL_TITLES[metric], panel_height(len(styles)))
            for name in (name for name in STREAM_METRICS if name.startswith(metric)):
                few, vote = name.endswith("_minority"), "_vote" in name
                dashes: Any = _FEW_DASHES if few else _VOTE_DASHES if vote else "solid"
                for method, curve in _by_method(table[table["metric"] == name]):
                    label = None if few else f"{method} (vote)" if vote else method
                    width, colour = (0.9 if few else 1.5), styles[method].colour
                    axes.plot(
                        *(curve["round"], curve["mean"]), color=colour, linestyle=dashes, linewidth=width, label=label
                    )
            _mark(axes, borders)
            _finish(axes, "accuracy")
    return panels


def draw_by_task(table: pd.DataFrame, borders: Sequence[float]) -> Panels:
    """Draw the accuracy on each task from the round it begins: a panel per method, a line per task."""
    tasks, panels = list(dict.fromkeys(table["task"])), {}
    colours = [_TASK_COLOURS(index / max(len(tasks) - 1, 1)) for index in range(len(tasks))]
    with house_style():
        for method, rows in _by_method(table):
            panels[method], axes = panel(method, 2.4, SMALL_PANEL)
            for task, curve in rows.groupby("task"):
                colour = colours[tasks.index(task)]
                axes.plot(curve["round"], curve["mean"], color=colour, marker="o" if len(curve) <= 8 else None,
                          markersize=2.5, label=task)  # fmt: skip
            axes.set_ylim(-0.03 * table["mean"].max(), 1.05 * table["mean"].max())  # so that panels can be compared
            _mark(axes, borders)
            _finish(axes, "accuracy")
    return panels


def _by_method(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(method), group) for method, group in table.groupby("method", sort=False)]


def _draw_spread(axes: Axes, x: pd.Series, mean: pd.Series, std: pd.Series, style: LineStyle, methods: int) -> None:
    if methods <= _MOST_BANDS:
        spread = std.fillna(0)
        axes.fill_between(x, mean - spread, mean + spread, color=style.colour, alpha=0.15, linewidth=0)
    elif std.iloc[-1] > 0:
        end = slice(-1, None)
        axes.errorbar(x[end], mean[end], yerr=std[end], color=style.colour, elinewidth=1.0, capsize=2.5, alpha=0.8)


def _mark(axes: Axes, borders: Sequence[float]) -> None:
    """Mark the rounds between which the next task begins."""
    for border in borders:
        axes.axvline(border, color=INK, linewidth=0.6, alpha=0.5, zorder=0)


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    round_axis(axes)
    percent_axis(axes.yaxis)
    name_lines(axes)
