"""Robust means over clients, coordinate by coordinate (Yin, Chen, Ramchandran, Bartlett, ICML 2018).

Both sort the clients' values of each coordinate, so that neither who finished first nor who has which id plays a part.
Nobody's number of samples does either: it is the client that tells it, and one that lies about its update would lie
about its weight.
"""

from __future__ import annotations

import math

from torch import Tensor

from flcore.aggregation.settings import Aggregation


def coordinate_median(values: Tensor) -> Tensor:
    """The median over clients of every coordinate; of an even number the mean of the two in the middle.

    As long as fewer than half of the clients are bad, it lies between values of honest ones.

    Args:
        values: ``[m, ...]``, a row per client.

    Returns:
        float64 ``[...]``.
    """
    ordered = values.sort(dim=0).values
    return (ordered[(len(values) - 1) // 2].double() + ordered[len(values) // 2].double()) / 2


def trimmed_mean(values: Tensor, share: float) -> Tensor:
    """The mean over clients of every coordinate without its :func:`trimmed_count` largest and smallest values.

    As long as no more clients than that are bad, it lies between values of honest ones.

    Args:
        values: ``[m, ...]``, a row per client.
        share: β of the clients, at either end.

    Returns:
        float64 ``[...]``.
    """
    cut = trimmed_count(len(values), share)
    return values.sort(dim=0).values[cut : len(values) - cut].double().mean(dim=0)


def trimmed_count(clients: int, share: float) -> int:
    """⌈β·m⌉, the values left out at either end, but never so many that none remains.

    Rounded up, so that a share that is asked for is always met; of one or two clients nothing can be left out.
    """
    return min(math.ceil(share * clients - 1e-9), (clients - 1) // 2)


def robust(values: Tensor, how: Aggregation) -> Tensor:
    """``values`` ``[m, ...]`` by the rule that is asked for, which is not ``mean``: float64 ``[...]``."""
    return coordinate_median(values) if how.rule == "median" else trimmed_mean(values, how.trim)
