"""Means of clients' values: weighted, and robust (Yin, Chen, Ramchandran, Bartlett, ICML 2018).

Robust means sort the clients' values of each coordinate, so the order of clients does not matter. They ignore numbers
of samples: an attacker would send a wrong number too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flcore.aggregation.settings import Aggregation
from flcore.io.messages import Weights, flat
from flcore.io.twins import twin

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
    values = [models[client].values for client in clients]
    folded = _folded_there(values, shares)
    for names in _groups({name: tensor for name, tensor in values[0].items() if name not in folded}):
        folded |= _folded([[own[name] for name in names] for own in values], names, shares)
    first = models[clients[0]]
    return Weights({name: folded[name] for name in first.params}, {name: folded[name] for name in first.buffers})


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


def _folded(values: Sequence[Sequence[Tensor]], names: Sequence[str], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the means of tensors by name; of several they are computed together."""
    first = values[0]
    sizes = [tensor.numel() for tensor in first]
    mean = torch.zeros(sum(sizes), dtype=torch.float64, device=first[0].device)
    for start in range(0, len(mean), _BLOCK):
        part = mean[start : start + _BLOCK]
        for share, tensors in zip(shares, values, strict=True):
            joined = flat(tensors)
            part.add_(joined[start : start + _BLOCK], alpha=share)
    rounded = (mean if first[0].is_floating_point() else mean.round()).to(first[0].dtype)
    parts = zip(names, torch.split(rounded, sizes), first, strict=True)
    return {name: part.clone().reshape(tensor.shape) for name, part, tensor in parts}


def _folded_there(values: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return means of floating values with twins, computed on the device that trained them: the same sums, faster."""
    names = [name for name, tensor in values[0].items() if tensor.dtype == torch.float32 and twin(tensor) is not None]
    mean: Tensor | None = None
    for share, own in zip(shares, values, strict=True):
        found = [twin(own[name]) for name in names]
        there = [tensor.reshape(-1) for tensor in found if tensor is not None]
        if not there or len(there) < len(found):  # some client has no twin
            return {}
        joined = torch.cat(there)
        mean = torch.zeros_like(joined, dtype=torch.float64) if mean is None else mean
        mean.add_(joined, alpha=share)
    if mean is None:
        return {}
    parts = torch.split(mean.float().cpu(), [values[0][name].numel() for name in names])
    return {name: part.clone().reshape(values[0][name].shape) for name, part in zip(names, parts, strict=True)}


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
