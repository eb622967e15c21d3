"""SCAFFOLD (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020): control variates against client drift.

The server keeps x and c, client i its c_i; all c start at 0. In a round, for the sampled clients S (Algorithm 1):

    y ← x;  K times:  y ← y − η (g_i(y) − c_i + c)                      line 10
    c_i⁺ = c_i − c + (x − y) / (K η)                                    line 12, option II
    x ← x + η_g · mean_{i∈S} (y_i − x)                                  line 16
    c ← c + (|S|/N) · mean_{i∈S} (c_i⁺ − c_i)                           line 17

x and c go down, y_i and c_i⁺ − c_i come up: twice FedAvg's traffic in either direction. c_i stays on the client.

Line 10 is gradient descent on CE + ⟨c − c_i, y⟩, whose second term has exactly c − c_i as its gradient; so it is
written as a term of the loss, and its value among the training losses means nothing by itself.

Choices. Option II, as the paper's experiments have it. The mean of line 16 counts every client once, as the paper's
objective does; ``weighting: samples`` is FedAvg's. (x − y)/(K η) is the mean of the steps' gradients for plain SGD
alone, so momentum, Adam and clipping are refused; weight decay counts as a part of the gradient. BatchNorm statistics
are no part of x and c and are averaged as FedAvg does. Without a step (no mini-batch could be used) c_i stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.aggregation.mean import average_weights
from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Payloads, Record, Slot
from flcore.methods.fedavg import FedAvg, sample_counts
from flcore.methods.types import (
    MODEL,
    Batch,
    Context,
    Exchange,
    Facts,
    LocalModel,
    Replies,
    Setting,
    Stage,
    TrainedClient,
    Turn,
)

CONTROL = Slot("control", Weights)
"""c at the server and on its way down, c_i in a client's memory; for parameters, not for buffers."""

CHANGE = Slot("control_change", Weights)
"""c_i⁺ − c_i, on its way up."""


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg whose clients correct every step by what others' gradients are known to be."""

    name: ClassVar[str] = "scaffold"
    summary: ClassVar[str] = "FedAvg with control variates that correct the drift of clients"
    citation: ClassVar[str] = "Karimireddy et al., ICML 2020"
    needs: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "local.optimizer": ("sgd",),
        "local.momentum": (0.0,),
        "local.clip": (None,),
    }

    use_control: bool = param(True, "correct steps by control variates; else nothing of them travels", switch=True)
    server_lr: float = param(1.0, "step η_g of the server towards the clients' mean", above=0, search=Search(0.1, 1.5))
    weighting: Literal["uniform", "samples"] = param("uniform", "a client counts once, or by its samples")

    def start_server(self, setting: Setting) -> Payloads:
        """The initial model, and c = 0."""
        server = super().start_server(setting)
        return {**server, CONTROL: zeros_like(setting.initial)} if self.use_control else server

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The model x and, unless switched off, c."""
        return server.only(MODEL, CONTROL) if self.use_control else super().broadcast(server, client, exchange)

    def context(self, turn: Turn) -> Context:
        """The correction c − c_i."""
        if not self.use_control:
            return {}
        own = own_control(turn).params
        return {"correction": {name: c - own[name] for name, c in turn.inbox[CONTROL].params.items()}}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy and, unless switched off, ⟨c − c_i, y⟩."""
        terms = super().loss(model, batch, context)
        if self.use_control:
            products = [(context["correction"][name] * value).sum() for name, value in model.params.items()]
            terms["control"] = torch.stack(products).sum()
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The trained y_i with n_i, and c_i⁺ − c_i; the client remembers c_i⁺."""
        message, memory = super().reply(turn, trained)
        if not self.use_control:
            return message, memory
        old, new = own_control(turn).params, renewed_control(turn, trained)
        change = {name: value - old[name] for name, value in new.items()}
        return {**message, CHANGE: Weights(change)}, {**memory, CONTROL: Weights(new)}

    def stages(self) -> Mapping[str, Stage]:
        """Lines 16 and 17."""
        stages: dict[str, Stage] = {"aggregate": self.aggregate}
        return stages | {"update-control": update_control} if self.use_control else stages

    def aggregate(self, server: Record, replies: Replies, exchange: Exchange) -> tuple[Record, Facts]:
        """Line 16, x ← x + η_g · mean (y_i − x); buffers are averaged."""
        counts = sample_counts(replies) if self.weighting == "samples" else dict.fromkeys(replies, 1)
        mean, x = average_weights(replies.of(MODEL), counts), server[MODEL]
        if self.server_lr != 1:  # at 1 it is the mean itself, to the bit
            moved = {name: value + self.server_lr * (mean.params[name] - value) for name, value in x.params.items()}
            mean = Weights(moved, mean.buffers)
        return server | {MODEL: mean}, {}


def own_control(turn: Turn) -> Weights:
    """What a client remembers of c_i; 0 before its first turn."""
    return turn.memory.get(CONTROL, zeros_like(turn.inbox[MODEL]))


def renewed_control(turn: Turn, trained: TrainedClient) -> dict[str, Tensor]:
    """Line 12, c_i⁺ = c_i − c + (x − y) / (K η)."""
    own = dict(own_control(turn).params)
    if not trained.steps:
        return own
    x, c, y = turn.inbox[MODEL].params, turn.inbox[CONTROL].params, trained.weights.params
    moved = trained.steps * turn.learning_rate
    return {name: own[name] - c[name] + (x[name] - y[name]) / moved for name in own}


def update_control(server: Record, replies: Replies, exchange: Exchange) -> tuple[Record, Facts]:
    """Line 17, c ← c + (|S|/N) · mean (c_i⁺ − c_i)."""
    changes = replies.of(CHANGE)
    mean = average_weights(changes, dict.fromkeys(changes, 1)).params
    share = len(changes) / exchange.setting.num_clients
    return server | {CONTROL: Weights({n: c + share * mean[n] for n, c in server[CONTROL].params.items()})}, {}


def zeros_like(weights: Weights) -> Weights:
    """Zeros for every parameter."""
    return Weights({name: torch.zeros_like(value) for name, value in weights.params.items()})
