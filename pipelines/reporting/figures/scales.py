"""Scales of axes that show what a sweep varied, and what it cost: linear or logarithmic, with round values marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

Scale = Literal["linear", "log", "symlog"]

# Where the largest value is more than so many times the smallest, an axis is logarithmic.
_LOG_ABOVE = 10


def scale_of(values: Sequence[float]) -> Scale:
    """Logarithmic where positive values span more than a factor of ten; with zeros among them, linear below these."""
    positive = [value for value in values if value > 0]
    if any(value < 0 for value in values) or not positive or max(positive) <= _LOG_ABOVE * min(positive):
        return "linear"
    return "log" if len(positive) == len(values) else "symlog"


def set_scale(axes: Axes, direction: Literal["x", "y"], scale: Scale, values: Sequence[float], margin: float) -> None:
    """Scale an axis, with a margin on both sides of the values that looks the same on every scale."""
    options = {"linthresh": min(value for value in values if value > 0)} if scale == "symlog" else {}
    (axes.set_xscale if direction == "x" else axes.set_yscale)(scale, **options)
    axis = axes.xaxis if direction == "x" else axes.yaxis
    if scale != "linear":  # matplotlib writes powers as formulas, which figures do not read
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    transform = axis.get_transform()
    low, high = transform.transform(np.array([min(values), max(values)]))
    if low < high:
        ends = transform.inverted().transform(np.array([low - margin * (high - low), high + margin * (high - low)]))
        (axes.set_xlim if direction == "x" else axes.set_ylim)(float(ends[0]), float(ends[1]))


def round_values(values: Sequence[float], scale: Scale, direction: Literal["x", "y"]) -> list[float]:
    """Round values within the range of these, few enough to stand beside (x) or above each other (y); 0 among them."""
    most = 4 if direction == "x" else 5
    low, high = min((value for value in values if value > 0), default=0.0), max(values)
    if scale == "linear":
        return [tick for tick in MaxNLocator(nbins=most).tick_values(0, high) if 0 <= tick <= 1.1 * high]
    digits = (1, 2, 5) if direction == "y" and high < 100 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= 1.1 * high]
    ticks = ticks[:: -(-len(ticks) // most) or 1]
    return [0.0, *ticks] if scale == "symlog" else ticks
