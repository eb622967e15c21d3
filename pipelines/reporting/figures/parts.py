"""Parts that figures share: axes in percent, labels at the ends of lines, tables of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from pipelines.reporting.figures.style import MOST_SHAPES, PANEL, PANEL_HEIGHT, LineStyle
from pipelines.reporting.formats import MISSING, format_bytes

_TOP = 1.015
"""Of an axis of shares: room for marks at 100 %."""

_FEW_DECADES = 1.5
"""Of a logarithmic axis: on a shorter one, one power of ten may stand, or none."""


def panel(title: str, height: float = PANEL_HEIGHT, width: float = PANEL) -> tuple[Figure, Axes]:
    """A figure of one panel."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def panel_height(methods: Sequence[str] | Mapping[str, object]) -> float:
    """Return the height of a panel with the names of all methods at its right."""
    return max(PANEL_HEIGHT, 1.1 + 0.155 * len(methods))


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name rows from top to bottom, without ticks and lines."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def percent_axis(axis: Any, locate: bool = True) -> None:
    """Show fractions as percentages, at round values and none above 100 %; ticks that are set already stay."""
    if locate:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        low, high = axis.get_view_interval()
        if axis.axis_name == "x":
            axis.axes.set_xlim(low, min(high, _TOP))
        else:
            axis.axes.set_ylim(low, min(high, _TOP))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def round_axis(axes: Axes, bins: int = 6) -> None:
    """Rounds from left to right."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=bins, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def byte_axis(axes: Axes) -> None:
    """Bytes from left to right, on a logarithmic scale."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(_ByteLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value).replace(".00", "")))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


class _ByteLocator(LogLocator):
    """Powers of ten; where too few of them are in view to say a scale also 2 and 5, or what divides it evenly."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """Where ticks stand between two ends."""
        low, high = sorted((vmin, vmax))
        if low <= 0 or math.log10(high / low) >= _FEW_DECADES:
            return super().tick_values(vmin, vmax)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        if sum(low <= tick <= high for tick in ticks) < 2:
            ticks = [float(tick) for tick in MaxNLocator(nbins=4).tick_values(low, high)]
        return np.array([tick for tick in ticks if low <= tick <= high])


def draw_line(axes: Axes, x: pd.Series[Any], y: pd.Series[Any], style: LineStyle) -> None:
    """A method's line, with its marker at every point where there are few, else at about five."""
    every = 1 if len(x) <= 8 else max(1, round(len(x) / 5))
    axes.plot(x, y, color=style.colour, linestyle=style.dashes, marker=style.marker, markersize=3.6, markevery=every)


def label_line_ends(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    styles: Mapping[str, LineStyle],
    names: Mapping[str, str] | None = None,
) -> None:
    """Write each method's name to the right of the panel at the height of its last value, moved apart if needed."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    axes.set_xlim(axes.get_xlim())
    # Height of a line of text (inches) as a fraction of the panel, which takes about 0.78 of the figure.
    figure = axes.get_figure()
    assert figure is not None  # every panel is in one
    gap = 0.14 / (figure.get_figheight() * 0.78)  # type: ignore[union-attr]
    order = sorted(ends, key=lambda method: (ends[method][1], method))
    wanted = [(ends[method][1] - low) / (high - low) for method in order]
    for method, height in zip(order, spread_apart(wanted, gap), strict=True):
        style = styles[method]
        axes.plot(*ends[method], marker=style.marker, markersize=4.2, color=style.colour)
        axes.annotate(
            (names or {}).get(method, method),
            xy=ends[method],
            xytext=(1.045, height),
            textcoords="axes fraction",
            va="center",
            ha="left",
            annotation_clip=False,
            # Thinner than any curve, so that the way to the name is not read as data.
            arrowprops={"arrowstyle": "-", "color": style.colour, "linewidth": 0.6, "shrinkA": 0, "relpos": (0, 0.5)},
        )


def spread_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Move heights apart until neighbours keep the gap, with the least sum of squared moves.

    Args:
        wanted: ascending, in [0, 1].
        gap: least distance of neighbours; lowered to 1 / (n - 1) where n of them would not fit into [0, 1].

    Returns:
        Ascending heights in [0, 1].
    """
    count = len(wanted)
    if count > 1:
        gap = min(gap, 1 / (count - 1))
    # Without position * gap, "keeps the gap" becomes "does not fall": isotonic regression, by merging what falls.
    groups: list[list[float]] = []
    for position, height in enumerate(wanted):
        groups.append([height - position * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    level = [fmean(group) for group in groups for _ in group]
    return [min(max(value, 0.0), 1 - (count - 1) * gap) + position * gap for position, value in enumerate(level)]


def draw_cells(axes: Axes, values: np.ndarray, colours: LinearSegmentedColormap, top: float) -> QuadMesh:
    """A cell per value, first row on top, thin white lines between cells that are large enough for them."""
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
    return mesh


def name_cells(axis: Any, names: Sequence[str], most: int) -> None:
    """Name every cell, or every second, fifth, tenth, ..., so that at most `most` names stand along the axis."""
    steps = (factor * 10**power for power in range(6) for factor in (1, 2, 5))
    step = next(step for step in steps if len(names) / step <= max(most, 1))
    positions = range(0, len(names), step)
    axis.set_ticks([position + 0.5 for position in positions], [names[position] for position in positions])
    axis.set_tick_params(length=0)
    longest = max((len(names[position]) for position in positions), default=0)
    if axis.axis_name == "x" and longest * len(positions) > 110:
        for label in axis.get_ticklabels():
            label.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")


def annotate_cells(axes: Axes, values: np.ndarray, mesh: QuadMesh, text: Callable[[float], str]) -> None:
    """Write every value into its cell, in white on dark cells; a dash where there is none."""
    shades = mesh.to_rgba(np.asarray(values, dtype=float))[..., :3] @ (0.2126, 0.7152, 0.0722)
    for row, column in np.ndindex(*values.shape):
        value = float(values[row, column])
        label = MISSING if math.isnan(value) else text(value)
        if label:
            colour = "white" if shades[row, column] < 0.5 and not math.isnan(value) else "#222222"
            centred = axes.text(column + 0.5, row + 0.52, label, ha="center", va="center", fontsize=7, color=colour)
            centred.set_in_layout(False)  # within the panel it needs no room of its own
