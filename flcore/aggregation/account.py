"""Client-level differential privacy of the global model: the account of noisy averages.

It protects one client with all its samples against an observer of the global models of all rounds. Neighbours differ in
the data of *one* client; their number K is public. Replacing a client moves the sum of updates clipped to C by at most
2C, so noise of z·C is z/2 times the sensitivity.

Sampling m of K clients, without replacement and of fixed size, amplifies (Wang, Balle, Kasiviswanathan, AISTATS 2019).
A client that drops out sends nothing. For an observer of the participants the account with m = K holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flcore.aggregation.settings import Aggregation
from flcore.core.errors import require_accounting

COVERS = (  # its wording is part of metrics.json
    "the global models of all rounds, against who sees nothing else; the server sees each update as it is, facts of "
    "rounds and scores are not covered"
)


def account(how: Aggregation, rounds: int, *, cohort: int, clients: int) -> Mapping[str, Any] | None:
    """Return ``privacy`` for ``metrics.json``; None without noise.

    Args:
        how: the section ``aggregation``.
        rounds: finished ones.
        cohort: m, clients of a round. clients: K.
    """
    if how.noise == 0:
        return None
    return {
        "epsilon": client_epsilon(how.noise, rounds, how.delta, cohort=cohort, clients=clients),
        "delta": how.delta,
        "unit": "client",
        "releases": rounds,
        "covers": COVERS,
        "noise_multiplier": how.noise,
        "clip": how.clip,
        "sampling": f"{cohort} of {clients} clients a round, without replacement",
    }


def client_epsilon(noise: float, rounds: int, delta: float, *, cohort: int, clients: int) -> float:
    """Return ε ≥ 0 after some noisy averages, infinite without noise.

    The smaller of two valid bounds by Rényi differential privacy (``dp-accounting``): with amplification by sampling,
    which is worse near m = K, and without.

    Args:
        noise: z, standard deviation of the noise on the sum in units of the clipping norm.
        rounds: noisy averages. delta: δ.
        cohort: m. clients: K.

    Raises:
        ValueError: an argument is out of range. ConfigError: dp-accounting is not installed.
    """
    if not noise >= 0 or rounds < 0 or not 0 < delta < 1 or not 1 <= cohort <= clients:
        raise ValueError(
            "an account needs noise >= 0, rounds >= 0, 0 < delta < 1 and 1 <= cohort <= clients, "
            f"got {noise}, {rounds}, {delta}, {cohort}, {clients}"
        )
    if noise:
        require_accounting()
    if rounds == 0:
        return 0.0
    if noise == 0:
        return math.inf
    import dp_accounting  # an optional package
    from dp_accounting import rdp

    release = dp_accounting.GaussianDpEvent(noise / 2)
    events = [release]
    if cohort < clients:
        events.append(dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, release))
    found = []
    for event in events:
        accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(event, rounds)
        found.append(float(accountant.get_epsilon(delta)))
    return min(found)
