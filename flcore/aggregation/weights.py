"""Weights of many clients into one model: the mean, a robust rule, clipped updates, and noise on top.

An *update* is what a client sends minus the model it was sent, all floating values together: parameters and, where they
travel, BatchNorm statistics. Clipping scales a longer update down to the bound (Sun, Kairouz, Suresh, McMahan, 2019).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flcore.aggregation.mean import average_weights
from flcore.aggregation.rules import robust
from flcore.aggregation.settings import Aggregation
from flcore.io.messages import Weights


def fold_weights(
    models: Mapping[int, Weights],
    sizes: Mapping[int, int],
    before: Weights,
    how: Aggregation,
    *,
    cohort: int,
    generator: torch.Generator,
) -> tuple[Weights, dict[str, float]]:
    """One model of those that clients send, and facts about their updates.

    ``rule: mean`` weighs by samples, as FedAvg does, also where updates are clipped. The other rules and noise weigh
    every client the same.

    Args:
        models: client id to weights, all with the same names and shapes.
        sizes: client id to n_k, at least one of them positive.
        before: what the clients were sent.
        how: the section ``aggregation``; at its defaults this is :func:`average_weights`, to the bit.
        cohort: how many clients a round asks, whoever answers; the sum of noisy updates is divided by it.
        generator: of the noise.

    Returns:
        The model, and with ``clip`` the facts ``update_norm`` (the median of the norms before clipping), ``clip_norm``
        (the bound) and ``clipped`` (how many were longer); without it none.
    """
    if how.leaves_weights:
        return average_weights(models, sizes), {}
    factors, facts = dict.fromkeys(sorted(models), 1.0), {}
    if how.clip is not None:
        norms = {client: update_norm(models[client], before) for client in sorted(models)}
        bound = float(np.median(list(norms.values()))) if how.clip == "median" else float(how.clip)
        factors = {client: bound / norm if norm > bound else 1.0 for client, norm in norms.items()}
        clipped = sum(norm > bound for norm in norms.values())
        facts = {"update_norm": float(np.median(list(norms.values()))), "clip_norm": bound, "clipped": float(clipped)}
    if how.noise > 0:
        assert isinstance(how.clip, float)  # the section refuses anything else
        return noisy_average(models, factors, before, how.noise * how.clip, cohort, generator), facts
    kept = {client: scaled_update(models[client], before, factor) for client, factor in factors.items()}
    return (average_weights(kept, sizes) if how.rule == "mean" else robust_weights(kept, how)), facts


def update_norm(model: Weights, before: Weights) -> float:
    """‖w_k − w‖₂ over all floating values that a client sends, in float64."""
    reference = before.values
    squares = (
        (tensor.double() - reference[name].double()).square().sum()
        for name, tensor in model.values.items()
        if tensor.is_floating_point()
    )
    return float(sum(squares, torch.zeros((), dtype=torch.float64)).sqrt())


def scaled_update(model: Weights, before: Weights, factor: float) -> Weights:
    """The model whose update is ``factor`` times as long; itself where that is 1. Integer buffers stay."""
    if factor == 1.0:
        return model
    reference = before.values

    def scaled(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        start = reference[name].double()
        return (start + factor * (tensor.double() - start)).to(tensor.dtype)

    return Weights(
        {name: scaled(name, tensor) for name, tensor in model.params.items()},
        {name: scaled(name, tensor) for name, tensor in model.buffers.items()},
    )


def robust_weights(models: Mapping[int, Weights], how: Aggregation) -> Weights:
    """The rule over clients of every coordinate of parameters and buffers; integer buffers are rounded."""
    clients = sorted(models)

    def fold(tensors: list[Tensor]) -> Tensor:
        middle = robust(torch.stack(tensors), how)
        return (middle if tensors[0].is_floating_point() else middle.round()).to(tensors[0].dtype)

    first = models[clients[0]]
    return Weights(
        {name: fold([models[client].params[name] for client in clients]) for name in first.params},
        {name: fold([models[client].buffers[name] for client in clients]) for name in first.buffers},
    )


def noisy_average(
    models: Mapping[int, Weights],
    factors: Mapping[int, float],
    before: Weights,
    deviation: float,
    cohort: int,
    generator: torch.Generator,
) -> Weights:
    """DP-FedAvg (McMahan et al., ICLR 2018): w + (Σ_k factor_k · (w_k − w) + N(0, deviation²)) / cohort.

    The divisor is the planned number of clients, not that of the answers, which would tell who is there. Sums are in
    float64 and in client-id order, so that no update exceeds its bound by rounding.

    Args:
        models: client id to weights, parameters alone.
        factors: client id to what its update is multiplied by, so that none is longer than the bound.
        before: what the clients were sent.
        deviation: of the noise on every coordinate of the sum.
        cohort: m, the planned number of clients of a round.
        generator: a CPU generator; as many normal numbers are drawn as there are parameters.
    """
    names = list(models[min(models)].params)
    params = {}
    for name in names:
        start = before.params[name].double()
        total = deviation * torch.randn(start.shape, generator=generator, dtype=torch.float64)
        for client in sorted(models):
            total.add_(models[client].params[name].double() - start, alpha=factors[client])
        params[name] = (start + total / cohort).to(before.params[name].dtype)
    return Weights(params)
