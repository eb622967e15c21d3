"""FedNova (Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020): updates normalised by the steps of their clients.

Client i trains as FedAvg's (with ``mu`` as FedProx's) and sends ‖a_i‖₁ with w_i: how far, in units of η, a constant
gradient of 1 moves a weight in its τ_i steps. Server, over the S clients of the round, p_i = n_i / N:

    w ← w + τ_eff · Σ_{i∈S} p_i (w_i − w) / ‖a_i‖₁,    τ_eff = Σ_{i∈S} p_i ‖a_i‖₁.

‖a_i‖₁ is x_τ of v ← ρ v + 1 − η μ x, x ← x + v from v = x = 0, momentum ρ and proximal weight μ: τ_i for plain SGD,
(τ_i − ρ (1 − ρ^τ_i)/(1 − ρ))/(1 − ρ) with momentum, (1 − (1 − η μ)^τ_i)/(η μ) with μ, as in the paper.

Deviations. With ρ and μ together the recursion is our SGD's: its momentum includes the proximal term; the
authors' code adds the term after it, and counts μ twice. Their τ_eff is Σ p_i τ_i where μ > 0, ours is the same
throughout. Server momentum and Adam are not covered; weight decay counts as a part of the gradient. BatchNorm
statistics are averaged as in FedAvg. Where all ‖a_i‖₁ are equal a round is FedAvg's (FedProx's), to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flcore.aggregation.weights import scaled_update
from flcore.core.params import Search, param
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.methods import types as fl
from flcore.methods.fedavg import fold_models, sample_counts, with_model
from flcore.methods.fedprox import FedProx

STEPS = Key("effective_steps", TensorDict)
"""‖a_i‖₁, one float64."""


@dataclass(frozen=True)
class FedNova(FedProx, name="fednova", citation="Wang et al., NeurIPS 2020"):
    """FedAvg of updates that are normalised by the steps of their clients."""

    required_config: ClassVar[Mapping[str, tuple[Any, ...]]] = {"local.optimizer": ("sgd",)}

    mu: float = param(0.0, "weight μ of FedProx's proximal term", low=0, search=Search(choices=(0.0, 0.001, 0.01, 0.1)))

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        steps = effective_steps(trained.steps, ctx.momentum, ctx.learning_rate * self.mu)
        return {**message, STEPS: TensorDict({"norm": torch.tensor([steps], dtype=torch.float64)})}, client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"aggregate": aggregate_normalised}


def effective_steps(steps: int, momentum: float, shrinkage: float) -> float:
    """Return ‖a‖₁; ``shrinkage`` is η μ."""
    moved = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - shrinkage * moved
        moved += velocity
    return moved


@fl.aggregates("weights")
def aggregate_normalised(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Average updates that are scaled to equal steps, w ← w + Σ p_i (τ_eff / ‖a_i‖₁) (w_i − w)."""
    sizes, before = sample_counts(replies), server[fl.MODEL]
    steps = {client: float(sent["norm"]) or 1.0 for client, sent in replies.of(STEPS).items()}  # 0: it has not moved
    longer = {i: sum(sizes[j] * (steps[j] / steps[i]) for j in sizes) / sum(sizes.values()) for i in sizes}
    models = {i: Weights(scaled_update(Weights(w.params), before, longer[i]).params, w.buffers)
              for i, w in replies.of(fl.MODEL).items()}  # fmt: skip
    model, facts = fold_models(models, sizes, server, ctx)
    return with_model(server, model, ctx), facts
