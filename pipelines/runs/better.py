"""Of which figures less is better: for tables, searches, sweeps, claims, and for the best run of a store.

A name is that of `metrics.json`, dotted where it is nested, or of MLflow. Without torch.
"""

from __future__ import annotations

import re

_COSTS = {
    *("bytes", "scalars", "parameters", "steps", "seconds", "joules", "time", "energy", "convergence"),
    *("loss", "gap", "std", "epsilon", "forgetting"),
}


def lower_is_better(name: str) -> bool:
    """Whether a figure of this name is a cost: something sent, spent, lost or apart, but not so much per second.

    >>> lower_is_better("roundwise_forgetting"), lower_is_better("bytes_up_by_kind.model"), lower_is_better("a_glo")
    (True, True, False)
    >>> lower_is_better("time/total"), lower_is_better("time/steps_per_second")
    (True, False)
    """
    return not is_rate(name) and not _COSTS.isdisjoint(words(name))


def is_rate(name: str) -> bool:
    """Whether a figure says how much was done in a second."""
    return name.endswith("per_second")


def words(name: str) -> list[str]:
    """What a name is made of: ``final, client, std`` of ``final/client_std``."""
    return re.split(r"[._/]", name)
