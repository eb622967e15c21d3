"""Ditto (Li, Hu, Beirami, Smith, ICML 2021): FedAvg, and a personal model of each client near the global one.

The global model w is FedAvg's, to the bit. Client k keeps v_k, which starts as the initial model. In rounds in which it
is sampled it also takes the steps of its local training on v_k (Algorithm 1):

    v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w)),    w as received in this round.

Messages are FedAvg's. A client answers with its v_k; the global model is scored as global.

Choices. The two trainings are two exchanges of a round, each with the configured local training: v_k has mini-batches
of its own, where the authors' code takes w's. Their server averages clients that are sampled by size; ours
averages by samples. λ = 1 is the value of their scripts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.basic import proximal
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import (
    MODEL,
    Batch,
    ClientContext,
    Exchange,
    FederationContext,
    LocalModel,
    LossInputs,
    Phase,
    RoundContext,
    TrainedClient,
)

PERSONAL = Key("personal", Weights)
"""v_k, at its client."""


@dataclass(frozen=True)
class Ditto(FedAvg, name="ditto", citation="Li et al., ICML 2021"):
    """FedAvg, and a personal model of each client near the global one."""

    has_global_model = False

    lambda_near: float = param(
        1.0, "weight λ that draws a personal model to the global one", low=0, search=Search(choices=(0.1, 1.0, 2.0))
    )

    def round_exchanges(self, round_number: int, setting: FederationContext) -> tuple[Exchange, ...]:
        return (Exchange(), Exchange("train-personal", phases=(Phase(loss=self.personal_loss),), server_steps=()))

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        return {} if ctx.is_later_leg else super().broadcast(server, client, ctx)

    def initial_weights(self, ctx: ClientContext) -> Weights:
        return ctx.client_state[PERSONAL] if ctx.is_later_leg else super().initial_weights(ctx)

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        return {"anchor": ctx.client_state[MODEL].params} if ctx.is_later_leg else {}

    def personal_loss(self, model: LocalModel, batch: Batch, inputs: LossInputs) -> dict[str, Tensor]:
        terms = super().loss(model, batch, inputs)
        return {**terms, "proximal": proximal(model.params, inputs["anchor"], self.lambda_near)}

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """Keep w for the second exchange, then v_k alone."""
        if ctx.is_later_leg:
            return {}, {PERSONAL: trained.weights}
        message, _ = super().reply(ctx, trained)
        kept = ctx.client_state.get(PERSONAL, ctx.setting.initial)
        return message, {PERSONAL: kept, MODEL: ctx.received[MODEL]}

    def client_model(self, received: Record, client_state: Record, setting: FederationContext) -> Weights | None:
        return client_state.get(PERSONAL, setting.initial)
