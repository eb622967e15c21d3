"""The figure of a sweep: accuracy, and measured traffic, against what was varied.

One numeric key is an axis, and every combination of the other keys a line. Without a numeric key each point is a row,
as in an ablation table. Baselines are dashed lines, or rows below the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from pipelines.plan.grid import Point, short_names, show
from pipelines.reporting.figures.parts import name_rows, percent_axis, whole_line
from pipelines.reporting.figures.style import INK, MUTED, LineStyle, house_style, method_styles, write_png
from pipelines.reporting.formats import format_value
from pipelines.reporting.statistics import Summary, summarise
from pipelines.reporting.sweep_tables import Row, Sweep, shown
from pipelines.runs.metrics import MetricUnit, heading, unit
from pipelines.runs.record import RunRecord, score

_BASELINES = (
    *(LineStyle("#444444", (0, (5, 2))), LineStyle("#8a6d3b", (0, (2, 1.5)))),
    *(LineStyle("#7a5195", (0, (5, 1.5, 1, 1.5))), LineStyle("#999999", (0, (1, 1.2)))),
)
_LONG_NAME = 40
"""Letters of a row's name that still fit on one line."""
_MOST_TICKS = 12
"""Values written under an axis; more of them would touch each other."""
_LOG_ABOVE = 10
"""An axis is logarithmic where the largest value is more than this many times the smallest."""

Scale = Literal["linear", "log", "symlog"]


def scale_of(values: Sequence[float]) -> Scale:
    """Return "log" for positive values that span more than a factor of ten, "symlog" with zeros among them."""
    positive = [value for value in values if value > 0]
    if any(value < 0 for value in values) or not positive or max(positive) <= _LOG_ABOVE * min(positive):
        return "linear"
    return "log" if len(positive) == len(values) else "symlog"


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


@dataclass(frozen=True)
class Line:
    """Rows that differ in the numeric key alone, by its value; a baseline that it does not concern has one row."""

    label: str
    rows: tuple[Row, ...]
    is_baseline: bool = False


@dataclass(frozen=True)
class _Quantity:
    """A panel: what it shows of a run, and its unit."""

    name: str
    label: str
    unit: MetricUnit
    of: Callable[[RunRecord], float | None]

    def summary(self, row: Row) -> Summary:
        return summarise({run.pair: self.of(run) for run in row.runs})

    def seeds(self, row: Row) -> list[float]:
        return [value for value in self.summary(row).by_seed.values() if value is not None]


def numeric_key(sweep: Sweep) -> str | None:
    """Return the numeric key with most values, which becomes an axis; None without one."""
    values = {key: {show(row.point.values[key]): row.point.values[key] for row in sweep.points} for key in sweep.keys}
    numeric = [key for key in sweep.keys if all(_is_number(value) for value in values[key].values())]
    return max(numeric, key=lambda key: len(values[key]), default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def lines_of(sweep: Sweep, key: str) -> tuple[Line, ...]:
    """Return the rows as lines over a numeric key, in the order of the grid, baselines last."""
    groups: dict[tuple[bool, str], list[Row]] = {}
    for row in sweep.rows:
        parts = _parts(row.point, sweep, {name: value for name, value in row.point.values.items() if name != key})
        groups.setdefault((row.point.is_baseline, ", ".join(parts) or row.point.method), []).append(row)
    return tuple(
        Line(label, tuple(sorted(rows, key=lambda row: row.point.values.get(key, 0))), is_baseline)
        for (is_baseline, label), rows in groups.items()
    )


def _parts(point: Point, sweep: Sweep, values: Mapping[str, Any]) -> list[str]:
    """Return the parts of a point's name: its method if that varies, and each value."""
    short = short_names(sweep.keys)
    parts = [f"{short[key]} = {show(value)}" for key, value in values.items() if key != "method.name"]
    return [point.method, *parts] if point.is_baseline or "method.name" in sweep.keys else parts


def draw_sweep(sweep: Sweep) -> Figure:
    """Draw accuracy on the left; on the right scalars that clients send in a round, and all bytes of a round.

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
    path = directory / "sweep.png"
    write_png(draw_sweep(sweep), path)
    return path


def _draw_lines(sweep: Sweep, key: str) -> Figure:
    lines = lines_of(sweep, key)
    swept = [line.label for line in lines if not line.is_baseline]
    baselines = [_BASELINES[value % len(_BASELINES)] for value in range(len(lines) - len(swept))]
    styles = [*method_styles(swept).values(), *baselines]
    figure = whole_line(4.0)
    panels = figure.subplot_mosaic("ab;ac", sharex=True, width_ratios=(1.15, 1))
    for axes, quantity in zip(panels.values(), _quantities(sweep), strict=True):
        for line, style in zip(lines, styles, strict=True):
            known = [row for row in line.rows if quantity.summary(row).n]
            if line.is_baseline and key not in line.rows[0].point.values:
                for row in known:
                    mean, spread = quantity.summary(row).mean or 0.0, quantity.summary(row).std or 0.0
                    axes.axhline(mean, color=style.colour, linestyle=style.dashes, linewidth=1.3, label=line.label)
                    axes.axhspan(mean - spread, mean + spread, color=style.colour, alpha=0.08, linewidth=0)
                continue
            x = [float(row.point.values[key]) for row in known]
            summaries = [quantity.summary(row) for row in known]
            axes.errorbar(
                x,
                [summary.mean or 0.0 for summary in summaries],
                [summary.std or 0.0 for summary in summaries],
                color=style.colour,
                linestyle=style.dashes,
                marker="o",
                markersize=3 if line.is_baseline else 5,
                elinewidth=1.0,
                capsize=2,
                label=line.label,
            )
            for value, row in zip(x, known, strict=True):
                seeds = quantity.seeds(row)
                axes.scatter([value] * len(seeds), seeds, s=11, color=style.colour, alpha=0.5, linewidths=0)
        axes.set_title(quantity.name)
        axes.set_ylabel(quantity.label)
        _scale_values(axes, "y", quantity, sweep.rows)
        axes.set_xlabel(key)
        _scale_key(axes, sweep, key)
    panels["b"].tick_params(labelbottom=False)
    panels["b"].set_xlabel("")
    handles, labels = panels["a"].get_legend_handles_labels()
    if len(lines) > 1:
        columns = min(len(labels), max(1, 120 // (8 + max(map(len, labels), default=0))))
        figure.legend(handles, labels, loc="outside lower center", ncols=max(columns, 1))
    return figure


def _scale_key(axes: Axes, sweep: Sweep, key: str) -> None:
    """Mark the values themselves, unless they are too close together."""
    values = sorted({float(row.point.values[key]) for row in sweep.points})
    set_scale(axes, "x", values)
    gaps = np.diff(values) / (values[-1] - values[0] or 1)
    if len(values) <= _MOST_TICKS and (scale_of(values) != "linear" or (gaps > 0.05).all()):
        configured = sweep.configured.get(key) if len(values) > 1 else None
        axes.xaxis.set_major_locator(FixedLocator(values))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: show(float(value)) + ("\n(configured)" if value == configured else ""))
        )
        axes.xaxis.set_minor_locator(NullLocator())


def _draw_rows(sweep: Sweep) -> Figure:
    """Draw a row per point and baseline; the key of a switch has a check-mark."""
    rows, names = sweep.rows, _row_names(sweep)
    lines = max(name.count("\n") + 1 for name in names)
    figure = whole_line(1.35 + (0.17 + 0.12 * lines) * len(rows))
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    point = method_styles(["point"])["point"].colour
    for axes, quantity in zip(panels, _quantities(sweep), strict=True):
        for position, row in enumerate(rows):
            summary, colour = quantity.summary(row), _BASELINES[0].colour if row.point.is_baseline else point
            axes.axhline(position, color="#eeeeee", linewidth=0.8, zorder=0)
            if summary.mean is not None:
                seeds = quantity.seeds(row)
                axes.errorbar(
                    summary.mean, position, xerr=summary.std, color=colour, marker="o", elinewidth=1, capsize=3
                )
                axes.scatter(seeds, [position] * len(seeds), s=11, color=colour, alpha=0.5, linewidths=0)
                text, above = format_value(summary.mean, quantity.unit), (0, 5)
                axes.annotate(text, (summary.mean, position), above, textcoords="offset points", ha="center",
                              fontsize=6.5, color=INK)  # fmt: skip
        axes.set_title(quantity.name)
        axes.set_xlabel(quantity.label)
        _scale_values(axes, "x", quantity, rows)
        name_rows(axes, names)
    return figure


def _row_names(sweep: Sweep) -> list[str]:
    """Return the name of each row, in one line, or a line per key if it is long."""
    named = []
    for row in sweep.rows:
        switches = {key: value for key, value in row.point.values.items() if isinstance(value, bool)}
        others = {key: value for key, value in row.point.values.items() if key not in switches}
        short = short_names(sweep.keys)
        marks = [f"{short[key]} {shown(row.point, key)}" for key in switches]
        parts = [*_parts(row.point, sweep, others), *marks]
        named.append(["configured:", *parts] if row.point.is_configured else parts)
    long = max(sum(map(len, parts)) for parts in named) > _LONG_NAME
    return [("\n" if long else "   ").join(parts) for parts in named]


def _quantities(sweep: Sweep) -> tuple[_Quantity, _Quantity, _Quantity]:
    metric = sweep.metric
    name = heading(metric)[0].upper() + heading(metric)[1:]

    def both(run: RunRecord) -> float | None:
        up, down = run.bytes_up_per_round, run.bytes_down_per_round
        return None if up is None or down is None else up + down

    return (
        _Quantity(
            name, "accuracy" if unit(metric) == "share" else metric, unit(metric), lambda run: score(run, metric)
        ),
        _Quantity("Uplink scalars", "per round, all clients", "count", lambda run: run.scalars_up_per_round),
        _Quantity("Bytes up + down", "per round, all clients", "bytes", both),
    )


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
    axis.set_major_formatter(EngFormatter("B" if quantity.unit == "bytes" else ""))
