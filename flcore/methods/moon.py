"""MOON (Li, He, Song, CVPR 2021): FedAvg with a contrast of features with two frozen models.

Client: CE + μ·ℓ_con, batch means, with z the feature (the head's input: the projection's output where the model has
one, as the paper's has), z_g the received model's and z_prev the client's after its last turn (Eq. 3):

    ℓ_con = −log( exp(cos(z, z_g)/τ) / (exp(cos(z, z_g)/τ) + exp(cos(z, z_prev)/τ)) ).

Both are in evaluation mode and without gradient. Server: FedAvg of everything, the projection included.

Deviations from the authors' code: without a previous turn there is no z_prev and the term is exactly 0 (the code has an
empty pool in the first round and other clients' initial models later); only sampled clients are averaged, with shares
of their own sum (the code divides by all clients' samples).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads
from flcore.math.losses.basic import cross_entropy
from flcore.math.losses.contrastive import model_contrast
from flcore.methods import types as fl
from flcore.methods.api import ModelPart, teacher_output
from flcore.methods.fedavg import FedAvg

PREVIOUS = Key("previous", Weights)
"""A client's model after its last turn, in its state."""


@dataclass(frozen=True)
class Moon(FedAvg, name="moon", citation="Li et al., CVPR 2021", reduces_to_fedavg={"mu": 0.0}):
    """FedAvg with features drawn to the global model's, away from the client's last ones."""

    mu: float = param(
        5.0, "weight μ of the contrast; CIFAR-100 and Tiny-ImageNet: 1", low=0, search=Search(0.1, 10.0, log=True)
    )
    tau: float = param(
        0.5, "temperature τ of the contrast", above=0, search=Search(0.1, 1.0, log=True, when=lambda m: m.mu > 0)
    )

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        models = {name: weights.values for name, (_, weights) in self.teachers(ctx).items()}
        if not models:
            return {}
        return {"present": torch.tensor([PREVIOUS in ctx.client_state], device=ctx.setting.device), **models}

    def teachers(self, ctx: fl.ClientContext) -> Mapping[str, tuple[ModelPart, Weights]]:
        """Return both models from the second round on, when clients may have a previous one.

        Where this client has none, the received one replaces it and does not count.
        """
        if self.mu == 0 or ctx.round == 1:
            return {}
        received = ctx.with_statistics(ctx.received[fl.MODEL])
        previous = ctx.with_statistics(ctx.client_state[PREVIOUS]) if PREVIOUS in ctx.client_state else received
        return {"global": ("features", received), "previous": ("features", previous)}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        features = model.features(batch.images)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if "present" in inputs:
            shared, own = (teacher_output(model, batch, inputs, name, "features") for name in ("global", "previous"))
            pair = shared, own.unsqueeze(0), inputs["present"]
            terms["contrast"] = self.mu * model_contrast(features, *pair, self.tau, weight=batch.weight)
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if self.mu == 0:
            return message, client_state
        # Statistics that do not travel are in the client's state already.
        travel = bool(ctx.received[fl.MODEL].buffers)
        previous = trained.weights if travel else trained.weights.without_buffers()
        return message, {**client_state, PREVIOUS: previous}
