"""The figure of a sweep: accuracy, and measured traffic, against what was varied.

One numeric key is an axis, and every combination of the other keys a line. Without a numeric key each point is a row,
as in an ablation table. Baselines are dashed lines, or rows below the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from pipelines.config.grid import short_names, show
from pipelines.reporting.figures.parts import percent_axis
from pipelines.reporting.figures.style import INK, MUTED, WIDTH, LineStyle, house_style, method_styles, save
from pipelines.reporting.formats import format_value
from pipelines.reporting.statistics import Summary, summarise
from pipelines.reporting.sweep_tables import NO, YES, Row, Sweep
from pipelines.runs.metrics import MetricUnit, unit
from pipelines.runs.record import RunRecord, score

_BASELINES = (
    *(LineStyle("#444444", (0, (5, 2))), LineStyle("#8a6d3b", (0, (2, 1.5)))),
    *(LineStyle("#7a5195", (0, (5, 1.5, 1, 1.5))), LineStyle("#999999", (0, (1, 1.2)))),
)
_METRIC_NAMES: Mapping[str, str] = {
    "top1_global": "global model, global test set",
    "mean_local": "mean over clients, own test data",
    "pooled_local": "own test data of all clients, pooled",
}
# Letters of a row's name that still stand in one line.
_LONG_NAME = 40
# Values written under an axis; more of them would touch each other.
_MOST_TICKS = 12
# An axis is logarithmic where the largest value is more than this many times the smallest.
_LOG_ABOVE = 10

Scale = Literal["linear", "log", "symlog"]


def scale_of(values: Sequence[float]) -> Scale:
    """Return "log" for positive values that span more than a factor of ten, "symlog" with zeros among them."""
    positive = [value for value in values if value > 0]
    if any(value < 0 for value in values) or not positive or max(positive) <= _LOG_ABOVE * min(positive):
        return "linear"
    return "log" if len(positive) == len(values) else "symlog"


@dataclass(frozen=True)
class Line:
    """Rows that differ in the numeric key alone, by its value; a baseline that it does not concern has one row."""

    label: str
    rows: tuple[Row, ...]
    is_baseline: bool = False


@dataclass(frozen=True)
class _Quantity:
    """A panel: what it shows of a run, and how values are written."""

    name: str
    label: str
    of: Callable[[RunRecord], float | None]
    unit: MetricUnit

    def text(self, value: float | None) -> str:
        return format_value(value, self.unit)

    def summary(self, row: Row) -> Summary:
        return summarise({run.seed: self.of(run) for run in row.runs})

    def seeds(self, row: Row) -> list[float]:
        return [value for run in row.runs if (value := self.of(run)) is not None]


def numeric_key(sweep: Sweep) -> str | None:
    """The varied key that can be an axis: all its values are numbers; of several the one with most values."""
    values = {key: {show(row.point.values[key]): row.point.values[key] for row in sweep.points} for key in sweep.keys}
    numeric = [key for key in sweep.keys if all(_is_number(value) for value in values[key].values())]
    return max(numeric, key=lambda key: len(values[key]), default=None)


def lines_of(sweep: Sweep, key: str) -> tuple[Line, ...]:
    """The rows as lines over a numeric key, in the order of the grid, baselines last; each by ascending value."""
    names = short_names(sweep.keys)
    groups: dict[tuple[bool, str], list[Row]] = {}
    for row in sweep.rows:
        point = row.point
        told = {name: f"{names[name]} = {show(value)}" for name, value in point.values.items() if name != key}
        if "method.name" in told:
            told["method.name"] = point.method
        others = ", ".join(told.values())
        if point.is_baseline:
            others = f"{point.method}, {others}" if others else point.method
        groups.setdefault((point.is_baseline, others or point.method), []).append(row)
    return tuple(
        Line(label, tuple(sorted(rows, key=lambda row: row.point.values.get(key, 0))), is_baseline)
        for (is_baseline, label), rows in groups.items()
    )


def draw_sweep(sweep: Sweep) -> Figure:
    """Accuracy on the left; on the right what clients send in a round, and all bytes of a round in both directions.

    Means over seeds with ± one sample standard deviation, and a dot per seed. A value that no run has is left out.
    """
    key = numeric_key(sweep)
    with house_style():
        figure = _draw_rows(sweep) if key is None else _draw_lines(sweep, key)
        spread = "mean ± std over seeds, a dot per seed; " if len(sweep.seeds) > 1 else ""
        title = f"{sweep.subject}; {spread}traffic as measured"
        figure.suptitle(title, fontsize=7.5, color=MUTED, x=0.01, horizontalalignment="left")
        return figure


def write_figure(sweep: Sweep, directory: Path) -> Path:
    """Write ``sweep.png``; its data are in ``sweep.csv``."""
    return save(draw_sweep(sweep), directory / "sweep.png")


# ------------------------------------------------------------------------------------------------------- over values


def _draw_lines(sweep: Sweep, key: str) -> Figure:
    lines = lines_of(sweep, key)
    styles = _styles(lines)
    place = _placing(sweep, key, sum(not line.is_baseline for line in lines))
    figure = Figure(figsize=(WIDTH, 4.0))
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
    left = figure.add_subplot(grid[:, 0])
    upper = figure.add_subplot(grid[0, 1], sharex=left)
    lower = figure.add_subplot(grid[1, 1], sharex=left)
    for axes, quantity in zip((left, upper, lower), _quantities(sweep), strict=True):
        for number, (line, style) in enumerate(zip(lines, styles, strict=True)):
            if line.is_baseline and key not in line.rows[0].point.values:
                _draw_level(axes, quantity.summary(line.rows[0]), style)
            else:
                positions = [place(float(row.point.values[key]), number) for row in line.rows]
                _draw_points(axes, line, positions, quantity, style)
        axes.set_title(quantity.name)
        axes.set_ylabel(quantity.label)
        _scale_values(axes, "y", quantity, sweep.rows)
    _scale_key(left, sweep, key)
    for axes in (left, lower):
        axes.set_xlabel(key)
    upper.tick_params(labelbottom=False)
    if len(lines) > 1:
        columns = min(len(lines), max(1, 120 // (8 + max(len(line.label) for line in lines))))
        handles = [
            Line2D([], [], color=style.colour, linestyle=style.dashes, marker="" if line.is_baseline else "o",
                   markersize=5, label=line.label) for line, style in zip(lines, styles, strict=True)
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _draw_points(axes: Axes, line: Line, positions: Sequence[float], quantity: _Quantity, style: LineStyle) -> None:
    known = [(x, row) for x, row in zip(positions, line.rows, strict=True) if quantity.summary(row).n]
    summaries = [quantity.summary(row) for _, row in known]
    axes.errorbar(
        [x for x, _ in known],
        [summary.mean for summary in summaries if summary.mean is not None],
        yerr=[summary.std or 0.0 for summary in summaries],
        color=style.colour,
        linestyle=style.dashes,
        marker="o",
        markersize=3 if line.is_baseline else 5,
        elinewidth=1.0,
        capsize=3 if any(summary.std for summary in summaries) else 0,
    )
    for x, row in known:
        seeds = quantity.seeds(row)
        _draw_seeds(axes, [x] * len(seeds), seeds, style.colour)


def _draw_seeds(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    if len(x) > 1:
        axes.scatter(x, y, s=11, color=colour, alpha=0.5, linewidths=0)


def _draw_level(axes: Axes, summary: Summary, style: LineStyle) -> None:
    if summary.mean is None:
        return
    axes.axhline(summary.mean, color=style.colour, linestyle=style.dashes, linewidth=1.3)
    low, high = summary.mean - (summary.std or 0.0), summary.mean + (summary.std or 0.0)
    axes.axhspan(low, high, color=style.colour, alpha=0.08, linewidth=0)


def _placing(sweep: Sweep, key: str, lines: int) -> Callable[[float, int], float]:
    """Where the n-th line has a value: lines stand a little apart, so that whiskers do not hide each other."""
    values = [float(row.point.values[key]) for row in sweep.points]
    scale, low, high = scale_of(values), min(values), max(values)

    def place(value: float, line: int) -> float:
        shift = min(0.012, 0.04 / lines) * (line - (lines - 1) / 2) if line < lines else 0.0
        if scale == "log":
            return value * (high / low) ** shift
        return value + shift * (high - low) if scale == "linear" else value

    return place


def _scale_key(axes: Axes, sweep: Sweep, key: str) -> None:
    """Mark the values themselves, where they do not stand too close together."""
    values = sorted({float(row.point.values[key]) for row in sweep.points})
    set_scale(axes, "x", values)
    if len(values) <= _MOST_TICKS and (scale_of(values) != "linear" or _are_apart(values)):
        axes.xaxis.set_major_locator(FixedLocator(values))
        configured = sweep.configured.get(key) if len(values) > 1 else None
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _value_name(value, configured)))
        axes.xaxis.set_minor_locator(NullLocator())


def set_scale(axes: Axes, direction: Literal["x", "y"], values: Sequence[float]) -> None:
    """Scale an axis for these values, with numbers instead of powers as formulas at its ticks."""
    scale = scale_of(values)
    options = {"linthresh": min(value for value in values if value > 0)} if scale == "symlog" else {}
    (axes.set_xscale if direction == "x" else axes.set_yscale)(scale, **options)
    axis = axes.xaxis if direction == "x" else axes.yaxis
    if scale == "linear":
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _value_name(value: float, configured: Any) -> str:
    return show(float(value)) + ("\n(configured)" if value == configured else "")


def _are_apart(values: Sequence[float]) -> bool:
    gaps = [second - first for first, second in pairwise(values)]
    return not gaps or min(gaps) > 0.05 * (values[-1] - values[0])


# ------------------------------------------------------------------------------------------------------ row by row


def _draw_rows(sweep: Sweep) -> Figure:
    """A row per point and baseline; the key of a switch has a check-mark."""
    rows = sweep.rows
    names = _row_names(sweep)
    lines = max(name.count("\n") + 1 for name in names)
    figure = Figure(figsize=(WIDTH, 1.35 + (0.17 + 0.12 * lines) * len(rows)))
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    point = method_styles(["point"])["point"].colour
    for axes, quantity in zip(panels, _quantities(sweep), strict=True):
        for position, row in enumerate(rows):
            colour = _BASELINES[0].colour if row.point.is_baseline else point
            _draw_row(axes, position, row, quantity, colour)
        axes.set_title(quantity.name)
        axes.set_xlabel(quantity.label)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        _scale_values(axes, "x", quantity, rows)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    panels[0].set_yticks(range(len(rows)), names)
    return figure


def _draw_row(axes: Axes, position: int, row: Row, quantity: _Quantity, colour: str) -> None:
    axes.axhline(position, color="#eeeeee", linewidth=0.8, zorder=0)
    summary = quantity.summary(row)
    if summary.mean is None:
        return
    spread = summary.std or 0.0
    cap = 3 if spread else 0
    axes.errorbar(
        [summary.mean], [position], xerr=[spread], color=colour, marker="o", markersize=5, elinewidth=1, capsize=cap
    )
    seeds = quantity.seeds(row)
    _draw_seeds(axes, seeds, [position] * len(seeds), colour)
    text, place = quantity.text(summary.mean), (summary.mean, position)
    axes.annotate(text, place, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=6.5, color=INK)


def _row_names(sweep: Sweep) -> list[str]:
    """What each row has, in a line or, where that would be long, in a line per key."""
    short = short_names(sweep.keys)
    named = []
    for row in sweep.rows:
        point = row.point
        parts = [f"{short[key]} {_mark(value)}" for key, value in point.values.items() if key != "method.name"]
        if point.is_baseline or "method.name" in sweep.keys:
            parts.insert(0, point.method)
        named.append(["configured:", *parts] if point.is_configured else parts)
    long = max(sum(map(len, parts)) for parts in named) > _LONG_NAME
    return [("\n" if long else "   ").join(parts) for parts in named]


def _mark(value: Any) -> str:
    if isinstance(value, bool):
        return YES if value else NO
    return f"= {show(value)}"


# ------------------------------------------------------------------------------------------------------------ parts


def _quantities(sweep: Sweep) -> tuple[_Quantity, _Quantity, _Quantity]:
    name = "Accuracy" if sweep.metric in _METRIC_NAMES else sweep.metric
    label = _METRIC_NAMES.get(sweep.metric, "mean over seeds")
    return (
        _Quantity(name, label, lambda run: score(run, sweep.metric), unit(sweep.metric)),
        _Quantity("Uplink scalars", "per round, all clients", attrgetter("scalars_up_per_round"), "count"),
        _Quantity("Bytes up + down", "per round, all clients", _bytes_per_round, "bytes"),
    )


def _bytes_per_round(run: RunRecord) -> float | None:
    up, down = run.bytes_up_per_round, run.bytes_down_per_round
    return None if up is None or down is None else up + down


def _scale_values(axes: Axes, direction: Literal["x", "y"], quantity: _Quantity, rows: Sequence[Row]) -> None:
    axis = axes.xaxis if direction == "x" else axes.yaxis
    values = [value for row in rows for value in quantity.seeds(row)]
    if not values:
        axis.set_major_locator(NullLocator())
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, color=MUTED, horizontalalignment="center")
        return
    if quantity.unit == "share":
        percent_axis(axis)
        return
    set_scale(axes, direction, values)
    if scale_of(values) == "linear":  # from zero, so that a small difference looks small
        (axes.set_xlim if direction == "x" else axes.set_ylim)(min(0.0, *values), 1.1 * max(0.0, *values) or 1.0)
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, quantity)))


def _tick(value: float, quantity: _Quantity) -> str:
    return "0" if value == 0 else quantity.text(value).replace(".00", "")


def _styles(lines: Sequence[Line]) -> list[LineStyle]:
    """Of the lines, whose baselines come last."""
    swept = sum(not line.is_baseline for line in lines)
    styles = method_styles([str(number) for number in range(swept)])
    return [*styles.values(), *(_BASELINES[number % len(_BASELINES)] for number in range(len(lines) - swept))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
