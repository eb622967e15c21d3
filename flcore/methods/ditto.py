"""Ditto (Li, Hu, Beirami, Smith, ICML 2021): FedAvg, and a personal model of each client near the global one.

The global model w is FedAvg's, to the bit. Client k has v_k, at first the initial model. In rounds in which it is
sampled it also takes the steps of its local training on v_k (Algorithm 1):

    v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w)),    w as received in this round.

Messages are FedAvg's. A client predicts with its v_k; the global model is scored as global.

Choices. The two trainings are two exchanges: v_k has mini-batches of its own, where the authors' code takes w's. Their
server averages clients that are sampled by size; ours averages by samples. λ = 1 is the value of their scripts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.basic import proximal
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg

PERSONAL = Key("personal", Weights)
"""v_k, at its client."""


@dataclass(frozen=True)
class Ditto(FedAvg, name="ditto", citation="Li et al., ICML 2021", has_global_model=False):
    """FedAvg, and a personal model of each client near the global one."""

    lambda_near: float = param(
        1.0, "weight λ that draws a personal model to the global one", low=0, search=Search(choices=(0.1, 1.0, 2.0))
    )

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        return (
            fl.Exchange(),
            fl.Exchange("train-personal", phases=(fl.Phase(loss=self.personal_loss),), server_steps=()),
        )

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return {} if ctx.is_later_leg else super().broadcast(server, client, ctx)

    def initial_weights(self, ctx: fl.ClientContext) -> Weights:
        return ctx.client_state[PERSONAL] if ctx.is_later_leg else super().initial_weights(ctx)

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        return {"anchor": ctx.client_state[fl.MODEL].params} if ctx.is_later_leg else {}

    def personal_loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        terms = super().loss(model, batch, inputs)
        return {**terms, "proximal": proximal(model.params, inputs["anchor"], self.lambda_near)}

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        if ctx.is_later_leg:
            return {}, {PERSONAL: trained.weights}
        message, _ = super().reply(ctx, trained)
        personal = ctx.client_state.get(PERSONAL, ctx.setting.initial)
        return message, {PERSONAL: personal, fl.MODEL: ctx.received[fl.MODEL]}

    def client_model(self, received: Record, client_state: Record, setting: fl.FederationContext) -> Weights | None:
        return client_state.get(PERSONAL, setting.initial)
