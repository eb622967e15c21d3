"""Schedules: values as functions of passed rounds or steps, counted from 0 as in the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[int], float]
"""Rounds (or steps) passed → value."""


@dataclass(frozen=True)
class Constant:
    """A constant value."""

    value: float

    def __call__(self, passed: int) -> float:
        return self.value


@dataclass(frozen=True)
class Exponential:
    """max(floor, initial · factor^⌊passed/every⌋).

    With ``initial`` 0 it stays 0: the floor must not turn a disabled term on (fedpa.md section 4, baselines.md
    section 6).
    """

    initial: float
    factor: float
    floor: float = 0.0
    every: int = 1

    def __call__(self, passed: int) -> float:
        """Return the value after ``passed`` rounds or steps."""
        return max(self.floor, self.initial * self.factor ** (passed // self.every)) if self.initial else 0.0


@dataclass(frozen=True)
class LinearSchedule:
    """initial · (1 − passed/total): to 0 after ``total``."""

    initial: float
    total: int

    def __call__(self, passed: int) -> float:
        """Return the value after ``passed`` rounds or steps."""
        return self.initial * (1 - passed / self.total)


@dataclass(frozen=True)
class Cosine:
    """initial · (1 + cos(π · passed/total)) / 2: to 0 after ``total``."""

    initial: float
    total: int

    def __call__(self, passed: int) -> float:
        """Return the value after ``passed`` rounds or steps."""
        return self.initial * 0.5 * (1 + math.cos(math.pi * passed / self.total))


@dataclass(frozen=True)
class Pieces:
    """initial · factor of the last passed border; ``pieces`` are (border, factor), ascending."""

    initial: float
    pieces: tuple[tuple[int, float], ...]

    def __call__(self, passed: int) -> float:
        """Return the value after ``passed`` rounds or steps."""
        factor = 1.0
        for border, share in self.pieces:
            if passed >= border:
                factor = share
        return self.initial * factor
