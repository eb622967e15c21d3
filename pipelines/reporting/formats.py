"""Numbers for people: fractions as percentages, bytes with units, a dash for a missing value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pipelines.reporting.statistics import PairedDifference, Summary
    from pipelines.runs.metrics import MetricUnit

    Unit = MetricUnit | Literal["points"]

MISSING = "\u2013"  # en dash
MINUS = "\u2212"


def listed(values: Iterable[object]) -> str:
    """Return values separated by commas."""
    return ", ".join(str(value) for value in values)


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: 1 method, 2 methods."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_percent(value: float | None, signed: bool = False) -> str:
    """Return a fraction as percentage points with two decimals: 0.7133 gives 71.33; None gives a dash."""
    if value is None:
        return MISSING
    return f"{100 * value:{'+' if signed else ''}.2f}".replace("-", MINUS)


def format_bytes(count: float | None) -> str:
    """Return a byte count with a decimal unit: 1234 gives 1.23 kB; None gives a dash."""
    if count is None:
        return MISSING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_value(value: float | None, unit: Unit, signed: bool = False) -> str:
    """Write a number in its unit; points are numbers with two decimals."""
    if value is None:
        return MISSING
    if unit == "share":
        return format_percent(value, signed)
    if unit == "bytes":
        return f"{MINUS if value < 0 else '+'}{format_bytes(abs(value))}" if signed else format_bytes(value)
    clock = ".3g" if abs(value) < 100 else ".0f"
    spec = {"points": ".2f", "count": ",.0f", "clock": clock}.get(unit, ".4g")
    return f"{value:{'+' if signed else ''}{spec}}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def format_summary(summary: Summary, unit: Unit = "share") -> str:
    """Write mean and spread, `71.33 ± 1.53`; without a spread the mean, without a value a dash.

    Bytes and counts have the mean alone. Where some of the runs have no value it says how many have one.
    """
    mean = format_value(summary.mean, unit)
    if summary.mean is None or unit in ("bytes", "count"):
        return mean
    spread = "" if summary.std is None else f" ± {format_value(summary.std, unit)}"
    return mean + spread + (f" (n = {summary.n})" if summary.n < len(summary.by_seed) else "")


def format_difference(difference: PairedDifference, unit: Unit = "share") -> str:
    """Write a paired difference with its interval, `+2.00 [-0.48, +4.48]`, or why it has none."""
    values = (difference.mean, difference.low, difference.high)
    mean, low, high = (format_value(value, unit, signed=True) for value in values)
    if difference.low is not None:
        return f"{mean} [{low}, {high}]"
    return f"{mean} (n = 1, no interval)" if difference.n and unit == "share" else mean


def format_p(p: float | None) -> str:
    """Write a p-value with two digits, or three where two would say 0.05; without one a dash.

    >>> format_p(0.0314), format_p(0.0002), format_p(0.0496)
    ('0.031', '< 0.001', '0.0496')
    """
    if p is None or p < 0.001:
        return MISSING if p is None else "< 0.001"
    shown = f"{p:.2g}"
    return f"{p:.3g}" if shown == "0.05" else shown


def format_tested(difference: PairedDifference, unit: Unit = "share") -> str:
    """Write a paired difference with its interval and, where it has one, its adjusted p: `..., p 0.031`."""
    p = format_p(difference.p_holm)
    return format_difference(difference, unit) + ("" if p == MISSING else f", p {p}")
