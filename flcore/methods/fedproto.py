"""FedProto (Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, AAAI 2022): clients exchange class prototypes, no weights.

Client: CE + λ·MSE(f(x_i), p̄_{y_i}) (Eq. 7; mean over batch *and* dimensions, as in the authors' code), classes without
a global prototype contribute 0. Afterwards p_{k,c} = mean feature of the client's samples of class c (Eq. 3).
Server: p̄_c = unweighted mean over the clients that upload c (Eq. 6 has weights n_{k,c}; the authors' code counts
clients).

Deviations: prototypes are computed in evaluation mode after training; ``proto_mode: running`` is the authors' code,
which averages the features of the last local epoch while the weights move. A class that no client uploads keeps its
last prototype (needed under partial participation). Round 1 has no prototypes and equals local training to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.records import Payloads, Record
from flcore.math.losses.alignment import prototype_pull
from flcore.math.losses.basic import cross_entropy, distances
from flcore.methods import types as fl
from flcore.methods.api import Method, ScoreKind
from flcore.methods.kit import class_prototypes
from flcore.methods.kit.preset import AuthorsPreset


@dataclass(frozen=True)
class FedProto(
    AuthorsPreset, class_prototypes.RunningPrototypes, Method, name="fedproto", citation="Tan et al., AAAI 2022"
):
    """Personal models, aligned by exchanging one prototype per class."""

    AUTHORS: ClassVar[Mapping[str, Any]] = {"proto_mode": "running"}
    has_global_model = False
    has_vote = True

    weight: float = param(1.0, "weight λ of the prototype alignment", low=0, search=Search(0.01, 10.0, log=True))
    inference: Literal["classifier", "prototypes"] = param(
        "classifier", "answer with the client's head, or with the nearest prototype among the classes that it holds"
    )

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        return class_prototypes.no_prototypes(setting)

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return {fl.PROTOTYPES: server[fl.PROTOTYPES]}

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        return class_prototypes.received_prototypes(ctx)

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        features = model.features(batch.images)
        model.record_features(features)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if self.weight > 0:
            known = inputs["means"], inputs["present"]
            terms["alignment"] = self.weight * prototype_pull(features, batch.labels, *known, weight=batch.weight)
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        return {fl.PROTOTYPES: self.own_prototypes(ctx, trained)}, {fl.MODEL: trained.weights}

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"aggregate-prototypes": aggregate_prototypes}

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return {} if self.inference == "classifier" else {fl.PROTOTYPES: server[fl.PROTOTYPES]}

    @property
    def score_kind(self) -> ScoreKind:
        return "logits" if self.inference == "classifier" else "ranks"

    def predict(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        features = model.features(images)
        logits = model.classify(features)
        if self.inference == "classifier":
            return logits
        prototypes = known[fl.PROTOTYPES]
        usable = prototypes.present if classes is None else prototypes.present & classes.to(features.device)
        nearest = (-distances(features, prototypes.means).square() / features.shape[1]).masked_fill(~usable, -torch.inf)
        return torch.where(usable.any(), nearest, logits)


@fl.aggregates("prototypes")
def aggregate_prototypes(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Set p̄_c to the mean of p_{k,c} over the clients that uploaded class c."""
    return class_prototypes.fused_prototypes(server, replies, ctx)
