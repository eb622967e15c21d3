"""Weighted averages of model weights, folded in client-id order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flcore.messages import Weights


def average_weights(models: Mapping[int, Weights], sizes: Mapping[int, int]) -> Weights:
    """Σ_k (n_k / N) w_k over the clients present (FedAvg, McMahan et al. 2017).

    Sums run in float64 and in ascending client id, so that the result depends neither on who finished first nor, to
    float32 precision, on the order at all. Integer buffers (BatchNorm's counters) are averaged and rounded.

    Args:
        models: client id to weights, all with the same names and shapes.
        sizes: client id to n_k, at least one of them positive.
    """
    clients = sorted(models)
    total = sum(sizes[client] for client in clients)
    if total <= 0:
        raise ValueError("cannot average models: no client has a sample")
    shares = [sizes[client] / total for client in clients]

    def fold(tensors: list[Tensor]) -> Tensor:
        mean = torch.zeros_like(tensors[0], dtype=torch.float64)
        for share, tensor in zip(shares, tensors, strict=True):
            mean.add_(tensor, alpha=share)
        return (mean if tensors[0].is_floating_point() else mean.round()).to(tensors[0].dtype)

    first = models[clients[0]]
    return Weights(
        {name: fold([models[client].params[name] for client in clients]) for name in first.params},
        {name: fold([models[client].buffers[name] for client in clients]) for name in first.buffers},
    )
