"""SCAFFOLD (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020): control variates against client drift.

The server keeps x and c, client i its c_i; all c start at 0. In a round, for the sampled clients S (Algorithm 1):

    y ← x;  K times:  y ← y − η (g_i(y) − c_i + c)                      line 10
    c_i⁺ = c_i − c + (x − y) / (K η)                                    line 12, option II
    x ← x + η_g · mean_{i∈S} (y_i − x)                                  line 16
    c ← c + (|S|/N) · mean_{i∈S} (c_i⁺ − c_i)                           line 17

Line 10 is gradient descent on CE + ⟨c − c_i, y⟩: the second term has the gradient c − c_i, and its value says nothing.
x and c go down, y_i and c_i⁺ − c_i come up: 2P each way. c_i stays on the client.

Choices. Option II, as in the paper's experiments. Line 16 counts each client once, as the paper's objective does.
(x − y)/(K η) is the mean gradient for plain SGD alone: momentum, Adam and clipping are refused; weight decay counts as
a part of the gradient. BatchNorm statistics are averaged. A client without a step keeps its c_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from flcore.aggregation.mean import uniform_mean
from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.basic import inner_product
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg, fold_models, with_model

CONTROL = Key("control", Weights)
"""c at the server and on its way down, c_i at a client."""

CHANGE = Key("control_change", Weights)
"""c_i⁺ − c_i, on its way up."""


@dataclass(frozen=True)
class Scaffold(
    FedAvg, name="scaffold", citation="Karimireddy et al., ICML 2020", reduces_to_fedavg={"use_control": False}
):
    """FedAvg with control variates that correct the drift of clients."""

    required_config: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "local.optimizer": ("sgd",),
        "local.momentum": (0.0,),
        "local.clip": (None,),
    }

    use_control: bool = param(True, "correct steps by control variates; else none of them travels", switch=True)
    server_lr: float = param(1.0, "step η_g of the server towards the clients' mean", above=0, search=Search(0.1, 1.5))

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = super().start_server(setting)
        return {**server, CONTROL: setting.initial.zeros()} if self.use_control else server

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return server.only(fl.MODEL, CONTROL)

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        return {"correction": (ctx.received[CONTROL] - own_control(ctx)).params} if self.use_control else {}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        terms = super().loss(model, batch, inputs)
        if self.use_control:
            terms["control"] = inner_product(model.params, inputs["correction"])
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if not self.use_control:
            return message, client_state
        old = new = own_control(ctx)
        if moved := trained.steps * ctx.learning_rate:  # line 12
            new = old - ctx.received[CONTROL] + (ctx.received[fl.MODEL] - trained.weights) * (1 / moved)
        return {**message, CHANGE: new - old}, {CONTROL: new}

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"aggregate": self.aggregate, **({"update-control": update_control} if self.use_control else {})}

    @fl.aggregates("weights")
    def aggregate(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Move x to the mean of the y_i, or by η_g towards it (line 16)."""
        mean, facts = fold_models(replies.of(fl.MODEL), dict.fromkeys(replies, 1), server, ctx)
        x = server[fl.MODEL]
        moved = mean if self.server_lr == 1 else x + self.server_lr * (mean - x)
        return with_model(server, Weights(moved.params, mean.buffers), ctx), facts


def own_control(ctx: fl.ClientContext) -> Weights:
    """Return c_i, 0 before the client's first turn."""
    return ctx.client_state.get(CONTROL, ctx.received[fl.MODEL].zeros())


def update_control(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Move c by the changes of the c_i (line 17)."""
    share = len(replies) / ctx.setting.num_clients
    return server | {CONTROL: server[CONTROL] + share * uniform_mean(replies.of(CHANGE))}, {}
