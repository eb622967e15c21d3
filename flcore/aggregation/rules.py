"""Robust means over clients, coordinate by coordinate (Yin, Chen, Ramchandran, Bartlett, ICML 2018).

Both sort the clients' values of each coordinate, so the order of clients does not matter. Numbers of samples are
ignored: an attacker would send a wrong number too.
"""

from __future__ import annotations

import math

from torch import Tensor

from flcore.aggregation.settings import Aggregation


def coordinate_median(values: Tensor) -> Tensor:
    """Return the median over clients of every coordinate, float64 [...]; the mean of the middle two if m is even.

    While fewer than half of the clients are bad, it is between values of honest ones. ``values``: [m, ...].
    """
    ordered = values.sort(dim=0).values
    return (ordered[(len(values) - 1) // 2].double() + ordered[len(values) // 2].double()) / 2


def trimmed_mean(values: Tensor, share: float) -> Tensor:
    """Return the mean of every coordinate without its :func:`trimmed_count` largest and smallest values, float64 [...].

    While no more clients than that are bad, it is between values of honest ones. ``values``: [m, ...].
    """
    cut = trimmed_count(len(values), share)
    return values.sort(dim=0).values[cut : len(values) - cut].double().mean(dim=0)


def trimmed_count(clients: int, share: float) -> int:
    """Return the number of values to leave out at either end, ⌈β·m⌉; at least one value remains.

    Rounding up leaves out at least the share β of the clients.
    """
    return min(math.ceil(share * clients - 1e-9), (clients - 1) // 2)


def robust(values: Tensor, how: Aggregation) -> Tensor:
    """Fold values [m, ...] by the configured rule, which is not ``mean``: float64 [...]."""
    return coordinate_median(values) if how.rule == "median" else trimmed_mean(values, how.trim)
