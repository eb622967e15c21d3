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
from flcore.methods.fedavg import FedAvg
from flcore.methods.kit.class_prototypes import (
    CLASS_COUNTS,
    ReleasesPrototypes,
    counts_of_uploads,
    fused_prototypes,
    no_prototypes,
    received_prototypes,
)
from flcore.methods.types import (
    MODEL,
    PROTOTYPES,
    Batch,
    ClientContext,
    FederationContext,
    LocalModel,
    LossInputs,
    Metrics,
    Replies,
    RoundContext,
    ServerStep,
    TrainedClient,
    aggregates,
)


@dataclass(frozen=True)
class FedProc(
    ReleasesPrototypes, FedAvg, name="fedproc", citation="Mu et al., FGCS 2023", reduces_to_fedavg={"alpha": 0.0}
):
    """FedAvg with a contrast with global prototypes, of falling weight over the rounds."""

    alpha: float = param(1.0, "α_0, share of the contrast in the loss; it falls to 0 over the rounds", low=0, high=1)
    tau: float = param(
        1.0, "temperature τ of the contrast", above=0, search=Search(0.1, 1.0, log=True, when=lambda m: m.alpha > 0)
    )
    similarity: Literal["cosine", "inner"] = param("cosine", "similarity of features and prototypes")
    weighted: bool = param(False, "weigh clients by their samples of the class in the mean of prototypes")

    def start_server(self, setting: FederationContext) -> Payloads:
        server = super().start_server(setting)
        return {**server, **no_prototypes(setting)} if self.alpha > 0 else server

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        return server.only(MODEL, PROTOTYPES)

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        if self.alpha == 0 or ctx.rounds_done == 0:
            return {}
        share = self.alpha * (1 - ctx.rounds_done / ctx.setting.rounds)
        return {"share": share, **received_prototypes(ctx)}

    def loss(self, model: LocalModel, batch: Batch, inputs: LossInputs) -> dict[str, Tensor]:
        features = model.features(batch.images)
        supervised = cross_entropy(model.classify(features), batch.labels, batch.weight)
        if "share" not in inputs:
            return {"cross_entropy": supervised}
        known, form = (inputs["means"], inputs["present"]), self.similarity
        contrast = prototype_contrast(features, batch.labels, *known, self.tau, similarity=form, weight=batch.weight)
        return {"cross_entropy": (1 - inputs["share"]) * supervised, "contrast": inputs["share"] * contrast}

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if self.alpha == 0:
            return message, client_state
        prototypes = self.own_prototypes(ctx, trained)
        message = {**message, PROTOTYPES: prototypes}
        if self.weighted:
            message |= {CLASS_COUNTS: TensorDict({"held": ctx.class_counts[prototypes.present.cpu()]})}
        return message, client_state

    def server_steps(self) -> Mapping[str, ServerStep]:
        stages = dict(super().server_steps())
        return stages if self.alpha == 0 else {**stages, "fuse-prototypes": self.fuse_prototypes}

    @aggregates("prototypes")
    def fuse_prototypes(self, server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
        """c_j ← the mean of the round's uploads of class j."""
        counts = counts_of_uploads(replies) if self.weighted else None
        return fused_prototypes(server, replies, ctx, counts)

    @property
    def sends_prototypes(self) -> bool:
        return self.alpha > 0
