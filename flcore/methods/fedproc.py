"""FedProc (Mu et al., FGCS 2023): global class prototypes as anchors of a contrast that gives way to cross-entropy.

Client in round t = 0..T − 1, with z the feature (the projection's output where the model has one):

    α_t·ℓ_gpc + (1 − α_t)·CE,  α_t = α_0·(1 − t/T),
    ℓ_gpc = −log( exp(z·c_y/τ) / Σ_j exp(z·c_j/τ) ), over the classes that have a prototype c_j.

Round 0 has no prototypes and CE alone (with α_0 = 1 the head would get no gradient). Afterwards a client sends the mean
z of each of its classes. Server: FedAvg, and per class the mean over the clients of the round that hold it; other
classes keep their prototypes.

The authors' code is not public; loss and schedule follow a third party's (baselines.md section 11). Decided here: z and
prototypes are normalised and τ = 1 (``similarity: inner`` leaves them as they are); the mean over clients is unweighted
unless ``weighted``; ℓ_gpc leaves out samples of classes without prototype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import TensorDict
from flcore.io.records import Payloads, Record
from flcore.math.losses.basic import cross_entropy
from flcore.math.losses.contrastive import prototype_contrast
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg
from flcore.methods.kit import class_prototypes


@dataclass(frozen=True)
class FedProc(
    class_prototypes.ReleasesPrototypes,
    FedAvg,
    name="fedproc",
    citation="Mu et al., FGCS 2023",
    reduces_to_fedavg={"alpha": 0.0},
):
    """FedAvg with a contrast with global prototypes, of falling weight over the rounds."""

    alpha: float = param(1.0, "α_0, share of the contrast in the loss; it falls to 0 over the rounds", low=0, high=1)
    tau: float = param(
        1.0, "temperature τ of the contrast", above=0, search=Search(0.1, 1.0, log=True, when=lambda m: m.alpha > 0)
    )
    similarity: Literal["cosine", "inner"] = param("cosine", "similarity of features and prototypes")
    weighted: bool = param(False, "weigh clients by their samples of the class in the mean of prototypes")

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = super().start_server(setting)
        return {**server, **class_prototypes.no_prototypes(setting)} if self.alpha > 0 else server

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return server.only(fl.MODEL, fl.PROTOTYPES)

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        if self.alpha == 0 or ctx.rounds_done == 0:
            return {}
        share = self.alpha * (1 - ctx.rounds_done / ctx.setting.rounds)
        return {"share": share, **class_prototypes.received_prototypes(ctx)}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        features = model.features(batch.images)
        supervised = cross_entropy(model.classify(features), batch.labels, batch.weight)
        if "share" not in inputs:
            return {"cross_entropy": supervised}
        known, form = (inputs["means"], inputs["present"]), self.similarity
        contrast = prototype_contrast(features, batch.labels, *known, self.tau, similarity=form, weight=batch.weight)
        return {"cross_entropy": (1 - inputs["share"]) * supervised, "contrast": inputs["share"] * contrast}

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if self.alpha == 0:
            return message, client_state
        prototypes = self.own_prototypes(ctx, trained)
        message = {**message, fl.PROTOTYPES: prototypes}
        if self.weighted:
            message |= {class_prototypes.CLASS_COUNTS: TensorDict({"held": ctx.class_counts[prototypes.present.cpu()]})}
        return message, client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        fuse: dict[str, fl.ServerStep] = {"fuse-prototypes": self.fuse_prototypes} if self.alpha > 0 else {}
        return {**super().server_steps(), **fuse}

    @fl.aggregates("prototypes")
    def fuse_prototypes(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Set c_j to the mean of the round's uploads of class j."""
        counts = class_prototypes.counts_of_uploads(replies) if self.weighted else None
        return class_prototypes.fused_prototypes(server, replies, ctx, counts)

    @property
    def sends_prototypes(self) -> bool:
        return self.alpha > 0
