"""Means of clients' values: weighted, and robust (Yin, Chen, Ramchandran, Bartlett, ICML 2018).

Robust means sort the clients' values of each coordinate, so the order of clients does not matter. They ignore numbers
of samples: an attacker would send a wrong number too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from flcore.aggregation.settings import Aggregation
from flcore.io.messages import Weights
from flcore.io.stacks import vectors, where_trained

_BLOCK = 2**16
"""Most float64 sums at a time: they fit into a processor's cache."""

_SMALL = 2**13
"""Tensors of up to as many values are joined: a copy costs less than a call."""


def average_weights(models: Mapping[int, Weights], sizes: Mapping[int, int]) -> Weights:
    """Σ_k (n_k / N) w_k over the clients present (FedAvg, McMahan et al. 2017).

    Sums run in float64 and in ascending client id, so the result does not depend on the order of arrival. Integer
    buffers (BatchNorm's counters) are averaged and rounded.

    Args:
        models: client id to weights, all with the same names and shapes.
        sizes: client id to n_k, at least one of them positive.
    """
    clients = sorted(models)
    total = sum(sizes[client] for client in clients)
    if total <= 0:
        raise ValueError("cannot average models: no client has a sample")
    shares = [sizes[client] / total for client in clients]
    ordered = [models[client] for client in clients]
    return Weights(_folded(ordered, "params", shares), _folded(ordered, "buffers", shares))


def uniform_mean(models: Mapping[int, Weights]) -> Weights:
    """Average with the same weight for every client."""
    return average_weights(models, dict.fromkeys(models, 1))


def _groups(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return names of tensors to fold together: a large one alone, small ones of one kind."""
    groups: list[list[str]] = []
    small: dict[object, list[str]] = {}
    sizes: dict[object, int] = {}
    for name, tensor in tensors.items():
        kind, size = tensor.dtype, tensor.numel()
        if size > _SMALL:
            groups.append([name])
            continue
        if kind not in small or sizes[kind] + size > _BLOCK:
            groups.append([])
            small[kind], sizes[kind] = groups[-1], 0
        small[kind].append(name)
        sizes[kind] += size
    return groups


def _folded(
    models: Sequence[Weights], part: Literal["params", "buffers"], shares: Sequence[float]
) -> dict[str, Tensor]:
    """Return the weighted means of a part of the models by name; sums are in order of clients, on every device."""
    first, there = getattr(models[0], part), where_trained(models)
    means: dict[str, Tensor] = {}
    for names in _groups(first):
        sizes, one = [first[name].numel() for name in names], getattr(there[0], part)[names[0]]
        mean = torch.zeros(sum(sizes), dtype=torch.float64, device=one.device)
        block = _BLOCK if one.device.type == "cpu" else len(mean)
        for start in range(0, len(mean), block):
            block_sums = mean[start : start + block]
            for share, vector in zip(shares, vectors(there, part, names), strict=True):
                block_sums.add_(vector[start : start + block], alpha=share)
        rounded = (mean if one.is_floating_point() else mean.round()).to(one.dtype).to(first[names[0]].device)
        split = zip(names, torch.split(rounded, sizes), strict=True)
        means |= {name: values.clone().reshape(first[name].shape) for name, values in split}
    return {name: means[name] for name in first}


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
