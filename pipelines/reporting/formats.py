"""Numbers and lists for people's eyes: fractions as percentages, bytes with units, a dash for what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.reporting.statistics import PairedDifference, Summary

MISSING = "\u2013"  # en dash
MINUS = "\u2212"


def listed(values: Iterable[object]) -> str:
    """Values with commas between them."""
    return ", ".join(str(value) for value in values)


def plural(count: int, noun: str) -> str:
    """A number with its noun: 1 method, 2 methods."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_percent(value: float | None, signed: bool = False) -> str:
    """Fraction as percentage points with two decimals: 0.7133 gives 71.33; None gives a dash."""
    if value is None:
        return MISSING
    return f"{100 * value:{'+' if signed else ''}.2f}".replace("-", MINUS)


def format_bytes(count: float | None) -> str:
    """Byte count with a decimal unit: 1234 gives 1.23 kB; None gives a dash."""
    if count is None:
        return MISSING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_count(count: float | None) -> str:
    """Count with spaces between thousands; None gives a dash."""
    return MISSING if count is None else f"{count:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def format_summary(summary: Summary) -> str:
    """Mean and spread as percentages: `71.33 ± 1.53`, for n = 1 `71.33`, without a value a dash.

    Where some of the runs have no value it says how many have.
    """
    spread = "" if summary.std is None else f" ± {format_percent(summary.std)}"
    partial = f" (n = {summary.n})" if 0 < summary.n < len(summary.by_seed) else ""
    return format_percent(summary.mean) + spread + partial


def format_number(summary: Summary, spec: str = ".4g") -> str:
    """Mean and spread of what is no share: `12.3 ± 0.4`.

    Args:
        summary: of the runs. spec: of each number; four figures.
    """
    if summary.mean is None:
        return MISSING
    spread = "" if summary.std is None else f" ± {summary.std:{spec}}"
    partial = f" (n = {summary.n})" if summary.n < len(summary.by_seed) else ""
    return f"{summary.mean:{spec}}{spread}{partial}"


def _interval(difference: PairedDifference, text: Callable[[float], str], without: str = "") -> str:
    """Return mean and interval of a difference; ``without`` follows the mean where there is no interval."""
    if difference.mean is None:
        return MISSING
    if difference.low is None or difference.high is None:
        return text(difference.mean) + without
    return f"{text(difference.mean)} [{text(difference.low)}, {text(difference.high)}]"


def format_number_difference(difference: PairedDifference, spec: str = ".4g") -> str:
    """Return a paired difference with its interval, each number signed and with four figures or another ``spec``."""
    return _interval(difference, lambda value: f"{value:+{spec}}")


def format_byte_difference(difference: PairedDifference) -> str:
    """Return a paired difference of byte counts with its interval: `+1.20 kB [+1.10 kB, +1.30 kB]`."""
    return _interval(difference, lambda value: f"{MINUS if value < 0 else '+'}{format_bytes(abs(value))}")


def format_p(difference: PairedDifference) -> str:
    """Return the adjusted p-value of a difference after a comma, `, p 0.031`; nothing without one."""
    if difference.p_holm is None:
        return ""
    return f", p {difference.p_holm:.2g}" if difference.p_holm >= 0.001 else ", p < 0.001"


def format_difference(difference: PairedDifference) -> str:
    """Return a paired difference of shares with its interval, `+2.00 [-0.48, +4.48]`, or why it has none."""
    return _interval(difference, lambda value: format_percent(value, signed=True), " (n = 1, no interval)")
