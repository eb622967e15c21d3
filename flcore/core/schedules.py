"""Schedules: values as functions of passed rounds or steps, counted from 0 as in the papers."""

from __future__ import annotations

from collections.abc import Callable

Schedule = Callable[[int], float]
"""Rounds (or steps) passed → value."""


def exponential(initial: float, factor: float, floor: float = 0.0, every: int = 1) -> Schedule:
    """Return max(floor, initial · factor^⌊passed/every⌋).

    With ``initial`` 0 it stays 0: the floor must not turn a disabled term on (fedpa.md section 4, baselines.md
    section 6).
    """
    return lambda passed: max(floor, initial * factor ** (passed // every)) if initial else 0.0
