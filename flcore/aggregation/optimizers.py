"""Optimisers on the server: a step from the model before a round towards the folded answers of clients.

The update Δ_t = fold − before takes the place of a negative gradient (Reddi, Charles, Zaheer, Garrett, Rush, Konečný,
Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021, arXiv 2003.00295, Algorithm 2)::

    m_t = β1 m_{t-1} + (1 − β1) Δ_t                        m_{-1} = 0
    v_t = v_{t-1} + m_t²                                   adagrad
    v_t = v_{t-1} − (1 − β2) m_t² sign(v_{t-1} − m_t²)     yogi
    v_t = β2 v_{t-1} + (1 − β2) m_t²                       adam
    x_{t+1} = x_t + η m_t / (√v_t + τ)                     v_{-1} = τ²

Algorithm 2 reuses Δ_t for the mean m_t, so that v_t takes the square of m_t, and it corrects no bias. It asks for
v_{-1} ≥ τ²; here they are equal. Its experiments have β1 = 0.9 and β2 = 0.99, but β1 = 0 with Adagrad, and τ = 10⁻³; η
is tuned there; the defaults here are Flower's.

``momentum`` is FedAvgM (Hsu, Qi, Brown, 2019): m_t = β1 m_{t-1} + Δ_t, x_{t+1} = x_t + η m_t.

Parameters take the step. Buffers (BatchNorm statistics and counters) stay as they were folded: a running variance that
follows a momentum may become negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.aggregation.settings import Aggregation
from flcore.core.portable import square_root
from flcore.io.messages import Payload, Weights
from flcore.io.records import Key, Payloads, Record

MOMENTUM = Key("server_momentum", Weights)
"""m_t by parameter, in the server's record."""

SECOND_MOMENT = Key("server_second_moment", Weights)
"""v_t by parameter, likewise."""


def server_step(before: Weights, fold: Weights, server: Record, how: Aggregation) -> tuple[Weights, Payloads]:
    """Return the model after one step of the server's optimiser, and the optimiser's state.

    Sums are in float64; model and state are rounded to the parameters' type. ``momentum`` with β1 = 0 and η = 1 returns
    the fold to the bit: x + η m is computed as fold + (η − 1) Δ + η β1 m_{t-1}.

    Args:
        before: the server's model, with every parameter of ``fold``.
        fold: the aggregate of clients' models, after clipping, rule and noise.
        server: the server's record, with the state after the last step, if any.
        how: the section ``aggregation``; ``optimizer: none`` returns the fold, without state.
    """
    if how.optimizer == "none":
        return fold, {}
    model, means, variances = {}, {}, {}
    for name, tensor in fold.params.items():
        mean, variance = (server[slot].params[name] if slot in server else None for slot in (MOMENTUM, SECOND_MOMENT))
        model[name], means[name], variance = _stepped(before.params[name], tensor, mean, variance, how)
        if variance is not None:
            variances[name] = variance
    state: dict[str, Payload] = {MOMENTUM: Weights(means)}
    if variances:
        state[SECOND_MOMENT] = Weights(variances)
    return Weights(model, fold.buffers), state


def _stepped(
    before: Tensor, fold: Tensor, momentum: Tensor | None, second: Tensor | None, how: Aggregation
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return one parameter after the step, its mean update m_t, and v_t of an adaptive optimiser."""
    dtype, lr, beta = before.dtype, how.learning_rate, how.first_decay
    start, aim = before.double(), fold.double()
    update = aim - start
    last = torch.zeros_like(start) if momentum is None else momentum.double()
    if how.optimizer == "momentum":
        model = aim + (lr - 1) * update + lr * beta * last
        return model.to(dtype), (beta * last + update).to(dtype), None
    mean = beta * last + (1 - beta) * update
    square = mean.square()
    earlier = torch.full_like(start, how.tau**2) if second is None else second.double()
    if how.optimizer == "adagrad":
        variance = earlier + square
    elif how.optimizer == "yogi":
        variance = earlier - (1 - how.beta2) * square * torch.sign(earlier - square)
    else:
        variance = how.beta2 * earlier + (1 - how.beta2) * square
    model = start + lr * mean / (square_root(variance) + how.tau)
    return model.to(dtype), mean.to(dtype), variance.to(dtype)
