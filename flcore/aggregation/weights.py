"""Aggregation of models: the mean, a robust rule, clipped updates, and noise.

An *update* is a client's model minus the model that it received, over all floating values: parameters and, where they
travel, BatchNorm statistics. Clipping scales a longer update down to the bound (Sun, Kairouz, Suresh, McMahan, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from flcore.aggregation.mean import average_weights, robust
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
    """Fold clients' models; return the model and metrics of their updates.

    ``rule: mean`` weighs by samples, also with clipping. The other rules and noise weigh all clients equally.

    Args:
        models: client id to weights, all with the same names and shapes.
        sizes: client id to n_k, at least one of them positive.
        before: the model that the clients received.
        how: the section ``aggregation``; at its defaults this is :func:`average_weights`, to the bit.
        cohort: planned number of clients of a round, the divisor of noisy sums.
        generator: of the noise.

    Returns:
        The model, and with ``clip`` the metrics ``update_norm`` (the median of the norms before clipping),
        ``clip_norm`` (the bound) and ``clipped`` (the number of longer ones); without it none.
    """
    if how.leaves_weights:
        return average_weights(models, sizes), {}
    factors, metrics = dict.fromkeys(sorted(models), 1.0), {}
    if how.clip is not None:
        norms = {client: update_norm(models[client], before) for client in sorted(models)}
        bound = float(np.median(list(norms.values()))) if how.clip == "median" else float(how.clip)
        factors = {client: bound / norm if norm > bound else 1.0 for client, norm in norms.items()}
        clipped = sum(norm > bound for norm in norms.values())
        metrics = {"update_norm": float(np.median(list(norms.values()))), "clip_norm": bound, "clipped": float(clipped)}
    if how.noise > 0:
        assert isinstance(how.clip, float)  # the section refuses anything else
        return noisy_average(models, factors, before, how.noise * how.clip, cohort, generator), metrics
    scaled = {client: scaled_update(models[client], before, factor) for client, factor in factors.items()}
    return (average_weights(scaled, sizes) if how.rule == "mean" else robust_weights(scaled, how)), metrics


def update_norm(model: Weights, before: Weights) -> float:
    """Return ‖w_k − w‖₂ over all floating values of a client's model, in float64."""
    reference = before.values
    squares = (
        (tensor.double() - reference[name].double()).square().sum()
        for name, tensor in model.values.items()
        if tensor.is_floating_point()
    )
    return math.sqrt(float(sum(squares, torch.zeros((), dtype=torch.float64))))


def scaled_update(model: Weights, before: Weights, factor: float) -> Weights:
    """Multiply a model's update by a factor; 1 returns the model itself. Integer buffers stay."""
    if factor == 1.0:
        return model
    reference = before.values

    def scaled(name: str) -> Tensor:
        tensor = model.values[name]
        if not tensor.is_floating_point():
            return tensor
        start = reference[name].double()
        return (start + factor * (tensor.double() - start)).to(tensor.dtype)

    return _weights_like(model, scaled)


def robust_weights(models: Mapping[int, Weights], how: Aggregation) -> Weights:
    """Fold every coordinate of parameters and buffers by the rule; integer buffers are rounded."""
    values = [models[client].values for client in sorted(models)]

    def folded(name: str) -> Tensor:
        middle = robust(torch.stack([tensors[name] for tensors in values]), how)
        return (middle if values[0][name].is_floating_point() else middle.round()).to(values[0][name].dtype)

    return _weights_like(models[min(models)], folded)


def _weights_like(model: Weights, value: Callable[[str], Tensor]) -> Weights:
    return Weights({name: value(name) for name in model.params}, {name: value(name) for name in model.buffers})


def noisy_average(
    models: Mapping[int, Weights],
    factors: Mapping[int, float],
    before: Weights,
    deviation: float,
    cohort: int,
    generator: torch.Generator,
) -> Weights:
    """Return w + (Σ_k factor_k · (w_k − w) + N(0, deviation²)) / cohort (DP-FedAvg, McMahan et al., ICLR 2018).

    The divisor is the planned number of clients, since the number of answers would reveal participation. Sums are in
    float64 and in client-id order, so no update exceeds its bound by rounding.

    Args:
        models: client id to weights, parameters alone.
        factors: client id to the factor that clips its update.
        before: the model that the clients received.
        deviation: of the noise on every coordinate of the sum.
        cohort: m, the planned number of clients of a round.
        generator: a CPU generator; as many normal numbers are drawn as there are parameters.
    """
    params = {}
    for name in models[min(models)].params:
        start = before.params[name].double()
        total = deviation * torch.randn(start.shape, generator=generator, dtype=torch.float64)
        for client in sorted(models):
            total.add_(models[client].params[name].double() - start, alpha=factors[client])
        params[name] = (start + total / cohort).to(before.params[name].dtype)
    return Weights(params)
