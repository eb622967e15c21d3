"""How far clients' label distributions are from one another, in two numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Skew:
    """Label skew of a partition.

    ``js_distance`` is the mean over pairs of clients of the Jensen-Shannon distance (square root of the divergence in
    bits, 0 for equal and 1 for disjoint distributions). ``missing_class_share`` is the mean share of classes that a
    client lacks.
    """

    js_distance: float
    missing_class_share: float


def skew(counts: np.ndarray) -> Skew:
    """Measure the skew of ``counts``, int [K, C]; clients without samples are left out; one client has distance 0.

    Raises:
        ValueError: no client has samples.
    """
    held = counts[counts.sum(axis=1) > 0]
    if len(held) == 0:
        raise ValueError("no client has samples")
    shares = held / held.sum(axis=1, keepdims=True)
    return Skew(_mean_js_distance(shares), float((held == 0).mean()))


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
    """Entropy in bits of each row."""
    entropy: np.ndarray = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=1)
    return entropy
