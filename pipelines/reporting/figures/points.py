"""Figures of final values: accuracy against its cost, differences to the baseline, and the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipelines.reporting.comparison import Comparison
from pipelines.reporting.figures.curves import PANEL_TITLES, Panels, draw_silent
from pipelines.reporting.figures.parts import (
    byte_axis,
    name_lines,
    name_rows,
    panel,
    panel_height,
    percent_axis,
    whole_line,
)
from pipelines.reporting.figures.style import INK, MOST_SHAPES, MUTED, LineStyle, house_style
from pipelines.reporting.formats import MINUS


def draw_tradeoff(table: pd.DataFrame, styles: Mapping[str, LineStyle]) -> Panels:
    """Draw final accuracy against bytes (log axis): mean over seeds, bars of ± one standard deviation.

    A method that sends nothing has no place on a log axis: it is a horizontal dotted line. A panel for the global model
    and one for the mean over clients; a method without a global model is not in the first.
    """
    panels = {}
    with house_style():
        for metric, points in table.groupby("metric", sort=False):
            panels[str(metric)], axes = panel(PANEL_TITLES[str(metric)], panel_height(len(points)))
            for method, sent, accuracy, std in points[["method", "bytes", "accuracy", "std"]].itertuples(index=False):
                style = styles[method]
                if sent:
                    axes.errorbar(sent, accuracy, yerr=std if std > 0 else None, color=style.colour, capsize=2)
                    axes.plot([sent], [accuracy], style.marker, color=style.colour, label=method)
                else:
                    draw_silent(axes, method, accuracy, style)
            axes.margins(x=0.12, y=0.12)
            byte_axis(axes, "bytes up + down, all clients, whole run")
            axes.set_ylabel("final accuracy")
            percent_axis(axes.yaxis)
            name_lines(axes)
    return panels


def draw_differences(comparison: Comparison, table: pd.DataFrame, styles: Mapping[str, LineStyle]) -> Panels:
    """Draw a forest plot: each method's mean difference to the baseline with its interval, and a dot per seed.

    The axis shows all seeds; an interval that goes far beyond them is cut at its edge.
    """
    panels = {}
    with house_style():
        for metric in dict.fromkeys(table["metric"]):
            rows = {row.method: row.differences[metric] for row in comparison.methods if row.differences[metric].n}
            panels[metric], axes = panel(PANEL_TITLES[metric], 1.0 + 0.27 * len(rows))
            farthest = max(abs(value) for difference in rows.values() for value in difference.by_seed.values())
            ends = [
                abs(end) for difference in rows.values() for end in (difference.low, difference.high) if end is not None
            ]
            reach = min(1.6 * farthest or 0.01, 1.08 * max(ends, default=math.inf) or 0.01)
            axes.axvline(0, color=INK, linewidth=0.9)
            for position, (method, difference) in enumerate(rows.items()):
                style, by_seed = styles[method], list(difference.by_seed.values())
                if difference.low is not None and difference.high is not None:
                    axes.plot(
                        [difference.low, difference.high], [position] * 2, color=style.colour, linewidth=1.4, marker="|"
                    )
                axes.scatter(by_seed, [position] * len(by_seed), s=9, color=style.colour, alpha=0.55, linewidths=0)
                axes.plot([difference.mean or 0.0], [position], marker=style.marker, markersize=5.5, color=style.colour)
            axes.set_xlim(-reach, reach)
            name_rows(axes, list(rows))
            axes.spines["left"].set_visible(False)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _points(value)))
            axes.set_xlabel(f"accuracy minus that of {comparison.baseline}, percentage points")
    return panels


def _points(value: float) -> str:
    return f"{100 * value:+g}".replace("-", MINUS) if abs(value) > 1e-12 else "0"


def draw_client_spread(table: pd.DataFrame, styles: Mapping[str, LineStyle]) -> Panels:
    """Draw the final accuracy of every client of every seed as a dot, and a box of the quartiles.

    Whiskers reach the outermost clients; the thick bar is the median.
    """
    by_method = {str(method): group["accuracy"].to_numpy() for method, group in table.groupby("method", sort=False)}
    with house_style():
        figure: Figure = whole_line(0.9 + 0.36 * len(by_method))
        axes = figure.add_subplot()
        axes.boxplot(
            list(by_method.values()),
            positions=range(len(by_method)),
            orientation="horizontal",
            widths=0.62,
            whis=(0, 100),
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": INK, "alpha": 0.13, "edgecolor": "none"},
            whiskerprops={"color": MUTED, "linewidth": 0.9},
            capprops={"color": MUTED, "linewidth": 0.9},
            medianprops={"color": INK, "linewidth": 2.2},
            manage_ticks=False,
        )
        for position, (method, values) in enumerate(by_method.items()):
            # Multiples of the golden ratio look scattered and need no random numbers.
            jitter = np.mod(np.arange(1, len(values) + 1) * ((math.sqrt(5) - 1) / 2), 1) - 0.5
            axes.scatter(
                values,
                position + 0.44 * jitter,
                s=9,
                color=styles[method].colour,
                alpha=0.65 if len(values) <= 100 else 0.3,
                linewidths=0,
                zorder=3,
                rasterized=len(table) > MOST_SHAPES,
            )
        name_rows(axes, list(by_method))
        # From a round value below the worst client.
        axes.set_xlim(math.floor(10 * (float(table["accuracy"].min()) - 0.01)) / 10, 1.01)
        axes.set_xlabel("accuracy of a client on its own test data")
        percent_axis(axes.xaxis)
        return {"": figure}
