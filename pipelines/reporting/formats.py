"""Numbers and lists for people's eyes: fractions as percentages, bytes with units, a dash for what is missing."""

from __future__ import annotations

from collections.abc import Iterable

MISSING = "\u2013"  # en dash
MINUS = "\u2212"


def listed(values: Iterable[object]) -> str:
    """Values with commas between them."""
    return ", ".join(str(value) for value in values)


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


def plural(count: int, noun: str) -> str:
    """A number with its noun: 1 method, 2 methods."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
