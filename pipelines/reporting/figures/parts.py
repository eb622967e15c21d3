"""Parts that figures share: panels, axes in percent and bytes, names of lines, tables of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from pipelines.reporting.figures.style import ACCURACIES, MOST_SHAPES, PANEL, PANEL_HEIGHT, WIDTH, LineStyle
from pipelines.reporting.formats import MISSING

_TOP = 1.015
"""End of an axis of shares: room for marks at 100 %."""


def panel(title: str, height: float = PANEL_HEIGHT, width: float = PANEL) -> tuple[Figure, Axes]:
    """Make a figure of one panel."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def panel_height(lines: int) -> float:
    """Return the height of a panel with the names of all lines at its right."""
    return max(PANEL_HEIGHT, 1.1 + 0.155 * lines)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name rows from top to bottom, without ticks and lines."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _percent(value: float, _: float) -> str:
    return f"{100 * value:g} %"


def percent_axis(axis: Any) -> None:
    """Show fractions as percentages, at round values and none above 100 %."""
    axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    low, high = axis.get_view_interval()
    set_limits = axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim
    set_limits(low, min(high, _TOP))
    axis.set_major_formatter(_percent)


def round_axis(axes: Axes) -> None:
    """Show rounds from left to right."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def byte_axis(axes: Axes, label: str) -> None:
    """Show bytes on a logarithmic scale: powers of ten, on a short axis also 2 and 5 times, else a few round values."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    # By itself, LogLocator writes more values on an axis of less than a decade than there is room for.
    by_tens = LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,))
    axes.xaxis.set_major_locator(by_tens if high > 5 * low else MaxNLocator(nbins=3, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)


def draw_line(axes: Axes, x: pd.Series[Any], y: pd.Series[Any], style: LineStyle, label: str) -> None:
    """Draw a line with its marker at every point where there are few, else at about five."""
    every = 1 if len(x) <= 8 else max(1, round(len(x) / 5))
    axes.plot(
        *(x, y), color=style.colour, linestyle=style.dashes, marker=style.marker, markersize=3.6, markevery=every,
        label=label,
    )  # fmt: skip


def name_lines(axes: Axes) -> None:
    """Name lines and marks at the right of their panel, the highest last value on top."""
    handles, names = axes.get_legend_handles_labels()
    last: list[float] = [float(np.asarray(handle.get_ydata())[-1]) for handle in handles]  # type: ignore[attr-defined]
    order = sorted(range(len(names)), key=lambda index: (-last[index], names[index]))
    axes.legend(
        [handles[index] for index in order], [names[index] for index in order], loc="center left",
        bbox_to_anchor=(1.01, 0.5),
    )  # fmt: skip


def heatmap(
    figure: Figure,
    axes: Axes,
    values: np.ndarray,
    names: tuple[Sequence[str], Sequence[str]],
    *,
    text: Callable[[float], str] | None,
    colours: LinearSegmentedColormap = ACCURACIES,
    top: float = 1.0,
    most: int = 26,
) -> QuadMesh:
    """Draw a cell per value, first row on top; grey where there is none.

    Args:
        figure: of the panel. axes: the panel.
        values: rows and columns.
        names: of rows and of columns.
        text: of a value, in its cell; None: no texts.
        colours: from 0 to ``top``.
        most: names along the columns; of more every second, fifth, tenth, ... is written.
    """
    rows, columns = values.shape
    axes.set_facecolor("#d9d9d9")
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=colours,
        vmin=0,
        vmax=top,
        edgecolors="#eeeeee" if columns <= 60 and rows <= 30 else "none",
        linewidth=0.5,
        rasterized=values.size > MOST_SHAPES,
    )
    axes.set_ylim(rows, 0)
    axes.grid(visible=False)
    for axis, texts, limit in ((axes.yaxis, names[0], 30), (axes.xaxis, names[1], most)):
        steps = (factor * 10**power for power in range(6) for factor in (1, 2, 5))
        shown = range(0, len(texts), next(step for step in steps if len(texts) / step <= limit))
        axis.set_ticks([index + 0.5 for index in shown], [texts[index] for index in shown])
        axis.set_tick_params(length=0)
        if axis is axes.xaxis and len(shown) * max((len(texts[index]) for index in shown), default=0) > 110 * most / 26:
            axis.set_tick_params(rotation=45, rotation_mode="xtick")
    if text is not None:
        shades = mesh.to_rgba(np.asarray(values, dtype=float))[..., :3] @ (0.2126, 0.7152, 0.0722)
        for row, column in np.ndindex(rows, columns):
            value = float(values[row, column])
            colour = "white" if shades[row, column] < 0.5 and not math.isnan(value) else "#222222"
            written = MISSING if math.isnan(value) else text(value)
            centred = axes.text(column + 0.5, row + 0.52, written, ha="center", va="center", fontsize=7, color=colour)
            centred.set_in_layout(False)  # within the panel it needs no room of its own
    return mesh


def accuracy_bar(figure: Figure, mesh: QuadMesh, axes: Any, label: str = "accuracy") -> None:
    """Add the colour bar of accuracies, as high as its panel."""
    height = figure.get_figheight()
    bar = figure.colorbar(mesh, ax=axes, label=label, pad=0.015, fraction=0.03, aspect=max(8, 6 * (height - 0.7)))
    bar.set_ticks([0, 0.5, 1] if height < 2.3 else [0, 0.25, 0.5, 0.75, 1])
    bar.ax.yaxis.set_major_formatter(_percent)


def whole_line(height: float) -> Figure:
    """Make a figure as wide as the page."""
    return Figure(figsize=(WIDTH, height))
