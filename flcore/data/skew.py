"""Label skew of a partition in three numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_MOST_CLIENTS = 1000  # 499,500 pairs


@dataclass(frozen=True)
class Skew:
    """Label skew of a partition.

    ``js_distance`` is the mean over pairs of clients of the Jensen-Shannon distance (square root of the divergence in
    bits, 0 for equal and 1 for disjoint distributions). ``missing_class_share`` is the mean share of classes that a
    client lacks. ``earth_movers_distance`` is the mean over clients of sum_c |p_k(c) - p(c)|, where p_k is the client's
    distribution and p the distribution of all clients together: from 0 to 2 (Zhao et al., 2018).
    """

    js_distance: float
    missing_class_share: float
    earth_movers_distance: float


def skew(counts: np.ndarray) -> Skew:
    """Measure the skew of ``counts``, int [K, C], without empty clients; one client has distance 0.

    Beyond 1,000 clients the Jensen-Shannon distance is of 1,000 of them, always the same ones.

    Raises:
        ValueError: no client has samples.
    """
    held = counts[counts.sum(axis=1) > 0]
    if len(held) == 0:
        raise ValueError("no client has samples")
    shares = held / held.sum(axis=1, keepdims=True)
    together = held.sum(axis=0) / held.sum()
    return Skew(
        js_distance=_mean_js_distance(_at_most(_MOST_CLIENTS, shares)),
        missing_class_share=float((held == 0).mean()),
        earth_movers_distance=float(np.abs(shares - together).sum(axis=1).mean()),
    )


def _at_most(most: int, rows: np.ndarray) -> np.ndarray:
    # Drawn, not every tenth: client numbers and classes are often in step with one another.
    return rows if len(rows) <= most else rows[np.random.default_rng(0).choice(len(rows), size=most, replace=False)]


def _mean_js_distance(shares: np.ndarray) -> float:
    num_clients = len(shares)
    if num_clients < 2:
        return 0.0
    entropy = _entropy(shares)
    total = 0.0
    for k in range(num_clients - 1):  # row by row: all pairs at once would take K² · C numbers
        divergence = _entropy((shares[k] + shares[k + 1 :]) / 2) - (entropy[k] + entropy[k + 1 :]) / 2
        total += float(np.sqrt(np.maximum(divergence, 0)).sum())
    return total / (num_clients * (num_clients - 1) / 2)


def _entropy(shares: np.ndarray) -> np.ndarray:
    entropy: np.ndarray = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=1)
    return entropy
