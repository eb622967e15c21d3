"""Figures of runs and comparisons. Each is a set of panels by name, so that a page can put them in one line or two.

The tables behind them are made in `data`; here they are drawn. A panel that nothing has values for is not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

from pipelines.reporting.comparison import Comparison
from pipelines.reporting.figures.data import (
    PANEL_TITLES,
    RUN_CURVES,
    bytes_accuracy_data,
    class_accuracy_data,
    client_accuracy_data,
    curve_data,
    curve_titles,
    difference_data,
    run_curves,
    training_loss_data,
)
from pipelines.reporting.figures.parts import (
    annotate_cells,
    byte_axis,
    draw_cells,
    draw_line,
    label_line_ends,
    name_cells,
    name_rows,
    panel,
    panel_height,
    percent_axis,
    round_axis,
)
from pipelines.reporting.figures.style import (
    ACCURACIES,
    INK,
    MOST_SHAPES,
    SILENT,
    WIDTH,
    LineStyle,
    house_style,
    method_styles,
)
from pipelines.reporting.formats import MINUS
from pipelines.runs.record import RunRecord, group_by_method

Panels = dict[str, Figure]
# Bands of more methods than this would lie on each other: then a bar at the end of each line says how seeds spread.
_MOST_BANDS = 3


def _styles(runs: Sequence[RunRecord]) -> dict[str, LineStyle]:
    return method_styles(list(group_by_method(runs)))


def draw_accuracy_curves(runs: Sequence[RunRecord], smooth: int = 1) -> Panels:
    """Accuracy against rounds, mean over seeds: a panel for each of :func:`curve_titles` that has values.

    The spread (one sample standard deviation) is a band, of many methods a bar at the end. With ``smooth`` above 1
    lines are moving averages over so many evaluated rounds, and the axis says so.
    """
    styles, panels = _styles(runs), {}
    y, label = ("mean", "accuracy") if smooth == 1 else ("smoothed", f"accuracy, moving average of {smooth}")
    with house_style():
        for metric, title in curve_titles(runs).items():
            table = curve_data(runs, metric, smooth)
            if table.empty:
                continue
            panels[metric], axes = panel(title, panel_height(styles))
            for method, curve in _by_method(table):
                _draw_spread(axes, curve["round"], curve[y], curve["std"], styles[method], len(styles))
                draw_line(axes, curve["round"], curve[y], styles[method])
            axes.set_ylabel(label)
            round_axis(axes)
            percent_axis(axes.yaxis)
            label_line_ends(axes, {m: _last(curve, "round", y) for m, curve in _by_method(table)}, styles)
    return panels


def draw_accuracy_of_run(run: RunRecord) -> Panels:
    """Accuracy against rounds of one run, in one panel: of the global model, of the vote, and of clients."""
    with house_style():
        figure, axes = panel("Accuracy")
        styles = method_styles(list(RUN_CURVES))
        ends = {}
        for metric in run_curves(run):
            curve = curve_data([run], metric)
            if not curve.empty:
                draw_line(axes, curve["round"], curve["mean"], styles[metric])
                ends[metric] = _last(curve, "round", "mean")
        axes.set_ylabel("accuracy")
        round_axis(axes)
        percent_axis(axes.yaxis)
        label_line_ends(axes, ends, styles, RUN_CURVES)
        return {"": figure}


def draw_bytes_against_accuracy(runs: Sequence[RunRecord]) -> Panels:
    """Accuracy against cumulative bytes in both directions (log axis), mean over seeds; panels as for rounds.

    A method that sends nothing has no place on a log axis: its final accuracy is a horizontal dotted line.
    """
    styles, panels = _styles(runs), {}
    with house_style():
        for metric, title in PANEL_TITLES.items():
            table = bytes_accuracy_data(runs, metric)
            if table.empty:
                continue
            panels[metric], axes = panel(title, panel_height(styles))
            ends, names = {}, {}
            sent = table[table["bytes"] > 0]["bytes"]
            for method, curve in _by_method(table):
                style, on_axis = styles[method], curve[curve["bytes"] > 0]
                if on_axis.empty:
                    final = float(curve["accuracy"].iloc[-1])
                    axes.axhline(final, color=style.colour, linestyle=SILENT, linewidth=1.2)
                    ends[method], names[method] = (sent.max() if len(sent) else 1.0, final), f"{method} (0 B)"
                else:
                    x, y = on_axis["bytes"], on_axis["accuracy"]
                    _draw_spread(axes, x, y, on_axis["std"], style, len(styles))
                    draw_line(axes, x, y, style)
                    ends[method] = _last(on_axis, "bytes", "accuracy")
            byte_axis(axes)
            axes.set_xlabel("bytes up + down, all clients, cumulative")
            axes.set_ylabel("accuracy")
            percent_axis(axes.yaxis)
            label_line_ends(axes, ends, styles, names)
    return panels


def _draw_spread(axes: Axes, x: pd.Series, mean: pd.Series, std: pd.Series, style: LineStyle, methods: int) -> None:
    if methods <= _MOST_BANDS:
        spread = std.fillna(0)
        axes.fill_between(x, mean - spread, mean + spread, color=style.colour, alpha=0.15, linewidth=0)
    elif std.iloc[-1] > 0:
        axes.errorbar(
            x.iloc[-1:], mean.iloc[-1:], yerr=std.iloc[-1:], color=style.colour, elinewidth=1.0, capsize=2.5, alpha=0.8
        )


def draw_differences(comparison: Comparison) -> Panels:
    """Forest plot: each method's mean difference to the baseline with its interval, and a dot per seed.

    The axis shows all seeds; an interval that goes far beyond them ends in an arrow.
    """
    table, panels = difference_data(comparison), {}
    styles = method_styles([row.method for row in comparison.methods])
    with house_style():
        for metric, title in PANEL_TITLES.items():
            rows = table[table["metric"] == metric]
            if rows.empty:
                continue
            panels[metric], axes = panel(title, 1.0 + 0.27 * len(rows))
            reach = 1.6 * max(abs(value) for seeds in rows["seeds"] for value in seeds) or 0.01
            ends = [value for low, high in zip(rows["low"], rows["high"], strict=True) for value in (low, high)]
            reach = min(reach, 1.08 * max((abs(end) for end in ends if not math.isnan(end)), default=reach) or reach)
            axes.axvline(0, color=INK, linewidth=0.9)
            for position, (method, mean, low, high, seeds) in enumerate(
                rows[["method", "mean", "low", "high", "seeds"]].to_numpy()
            ):
                style = styles[method]
                _draw_interval(axes, position, low, high, reach, style.colour)
                axes.scatter(seeds, [position] * len(seeds), s=9, color=style.colour, alpha=0.55, linewidths=0)
                axes.plot([mean], [position], marker=style.marker, markersize=5.5, color=style.colour)
            axes.set_xlim(-reach, reach)
            name_rows(axes, list(rows["method"]))
            axes.spines["left"].set_visible(False)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _points(value)))
            axes.set_xlabel(f"accuracy minus that of {comparison.baseline}, percentage points")
    return panels


def _draw_interval(axes: Axes, position: int, low: float, high: float, reach: float, colour: str) -> None:
    if math.isnan(low):
        return
    axes.plot([max(low, -reach), min(high, reach)], [position, position], color=colour, linewidth=1.4)
    for end, sign in ((low, -1), (high, 1)):
        marker = (">" if sign > 0 else "<") if abs(end) > reach else "|"
        place = min(max(end, -0.985 * reach), 0.985 * reach)
        axes.plot([place], [position], marker=marker, markersize=5, color=colour)


def _points(value: float) -> str:
    return f"{100 * value:+g}".replace("-", MINUS) if abs(value) > 1e-12 else "0"


def draw_client_spread(runs: Sequence[RunRecord]) -> Panels:
    """Final accuracy of every client of every seed: a dot each, behind it the box of the quartiles.

    Whiskers reach the outermost clients; the thick bar is the median.
    """
    table, styles = client_accuracy_data(runs), _styles(runs)
    methods = list(dict.fromkeys(table["method"]))
    with house_style():
        figure = Figure(figsize=(WIDTH, 0.9 + 0.36 * max(len(methods), 1)))
        axes = figure.add_subplot()
        for position, method in enumerate(methods):
            values = table.loc[table["method"] == method, "accuracy"].to_numpy()
            colour = styles[method].colour
            axes.boxplot(
                [values],
                positions=[position],
                orientation="horizontal",
                widths=0.62,
                whis=(0, 100),
                showfliers=False,
                patch_artist=True,
                boxprops={"facecolor": colour, "alpha": 0.25, "edgecolor": "none"},
                whiskerprops={"color": colour, "linewidth": 1.0},
                capprops={"color": colour, "linewidth": 1.0},
                medianprops={"color": colour, "linewidth": 2.2},
                manage_ticks=False,
            )
            axes.scatter(
                values,
                position + 0.22 * _jitter(len(values)),
                s=9,
                color=colour,
                alpha=0.65 if len(values) <= 100 else 0.3,
                linewidths=0,
                zorder=3,
                rasterized=len(table) > MOST_SHAPES,
            )
        name_rows(axes, methods)
        # From a round value below the worst client.
        axes.set_xlim(math.floor(10 * (float(table["accuracy"].min()) - 0.01)) / 10, 1.01)
        axes.set_xlabel("accuracy of a client on its own test data")
        percent_axis(axes.xaxis)
        return {"": figure}


def draw_training_loss(runs: Sequence[RunRecord]) -> Panels:
    """Training-loss terms against rounds, mean over seeds: a panel per term, since their scales differ.

    A line per method. Of several methods only terms that two or more share are drawn: what one alone minimises stands
    beside nothing, and is on the page of each of its runs.
    """
    table, styles, panels = training_loss_data(runs), _styles(runs), {}
    with house_style():
        for term in dict.fromkeys(table["term"]):
            curves = _by_method(table[table["term"] == term])
            is_shared = len(curves) > 1
            if not is_shared and len(styles) > 1:
                continue
            panels[term], axes = panel(f"Training loss: {term}")
            for method, curve in curves:
                draw_line(axes, curve["round"], curve["mean"], styles[method])
            round_axis(axes, 5)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
            whole = ScalarFormatter(useOffset=False)
            whole.set_scientific(False)  # a power of ten would stand apart, where the title is
            axes.yaxis.set_major_formatter(whole)
            if is_shared:
                label_line_ends(axes, {m: _last(curve, "round", "mean") for m, curve in curves}, styles)
    return panels


def draw_class_accuracy(runs: Sequence[RunRecord]) -> Panels:
    """Class-wise accuracy on the global test set: methods by classes, 0 to 1, grey where there is no value."""
    table = class_accuracy_data(runs)
    methods, classes = table.shape
    with house_style():
        figure = Figure(figsize=(WIDTH, min(max(1.15 + 0.27 * methods, 1.5), 7.5)))
        axes = figure.add_subplot()
        mesh = draw_cells(axes, table.to_numpy(dtype=float), ACCURACIES, 1.0)
        name_cells(axes.xaxis, list(map(str, table.columns)), 26)
        name_cells(axes.yaxis, list(table.index), methods)
        axes.set_xlabel("class")
        bar = figure.colorbar(mesh, ax=axes, label="accuracy", pad=0.015, fraction=0.03, aspect=max(4 + 2 * methods, 8))
        bar.set_ticks([0, 0.5, 1] if methods < 4 else [0, 0.25, 0.5, 0.75, 1])
        percent_axis(bar.ax.yaxis, locate=False)
        if classes <= 24:
            annotate_cells(axes, table.to_numpy(dtype=float), mesh, lambda value: f"{100 * value:.0f}")
        return {"": figure}


def _by_method(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(method), group) for method, group in table.groupby("method", sort=False)]


def _last(table: pd.DataFrame, x: str, y: str) -> tuple[float, float]:
    return float(table[x].iloc[-1]), float(table[y].iloc[-1])


def _jitter(count: int) -> np.ndarray:
    """Offsets in [-1, 1) that look scattered and need no random numbers: multiples of the golden ratio."""
    return np.asarray(2 * np.mod(np.arange(1, count + 1) * ((math.sqrt(5) - 1) / 2), 1) - 1)
