"""Ditto (Li, Hu, Beirami, Smith, ICML 2021): FedAvg, and a personal model of each client near the global one.

The global model w is FedAvg's, to the bit. Client k keeps v_k, which starts as the initial model. In rounds in which it
is sampled it also takes the steps of its local training on v_k (Algorithm 1):

    v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w)),    w as received in this round.

Messages are FedAvg's. A client answers with its v_k; the global model is scored as global.

Choices. The two trainings are two exchanges of a round, each with the local training that is configured: mini-batches
of v_k are drawn anew, where the authors' code takes those of w. In that code the server averages updates of clients
that are sampled by their size; here it averages by samples. λ = 1 is the value of its scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Payloads, Record, Slot
from flcore.math.losses.basic import proximal
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import (
    MODEL,
    Batch,
    Context,
    Exchange,
    Leg,
    LocalModel,
    Phase,
    Setting,
    TrainedClient,
    Turn,
)

PERSONAL = Slot("personal", Weights)
"""v_k, at its client."""


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg whose clients also train a model of their own near the one they receive."""

    name: ClassVar[str] = "ditto"
    summary: ClassVar[str] = "FedAvg, and a personal model of each client near the global one"
    citation: ClassVar[str] = "Li et al., ICML 2021"
    has_global_model: ClassVar[bool] = False

    lambda_near: float = param(
        1.0, "weight λ that draws a personal model to the global one", low=0, search=Search(choices=(0.1, 1.0, 2.0))
    )

    def legs(self, round_number: int, setting: Setting) -> tuple[Leg, ...]:
        """Train w as FedAvg does, then v_k, of which the server hears nothing."""
        return (Leg(), Leg("train-personal", phases=(Phase(loss=self.personal_loss),), stages=()))

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        return {} if exchange.is_later_leg else super().broadcast(server, client, exchange)

    def begin(self, turn: Turn) -> Weights:
        """Start from w, then from v_k."""
        return turn.memory[PERSONAL] if turn.is_later_leg else super().begin(turn)

    def context(self, turn: Turn) -> Context:
        """Fix the w that the client received in this round."""
        return {"anchor": turn.memory[MODEL].params} if turn.is_later_leg else {}

    def personal_loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Add (λ/2) ‖v_k − w‖² to the cross-entropy."""
        terms = super().loss(model, batch, context)
        return {**terms, "proximal": proximal(model.params, context["anchor"], self.lambda_near)}

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """Send w_k with n_k and keep w for the second exchange; then keep v_k alone."""
        if turn.is_later_leg:
            return {}, {PERSONAL: trained.weights}
        message, _ = super().reply(turn, trained)
        kept = turn.memory.get(PERSONAL, turn.setting.initial)
        return message, {PERSONAL: kept, MODEL: turn.inbox[MODEL]}

    def client_model(self, received: Record, memory: Record, setting: Setting) -> Weights | None:
        """Answer with v_k."""
        return memory.get(PERSONAL, setting.initial)
