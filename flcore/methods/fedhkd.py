"""FedHKD (Chen, Wang, Vikalo, ICLR 2023): clients share "hyper-knowledge", mean feature and prediction of a class.

Client, from the second round on (Eq. 4), with the classes K_c that have global knowledge H̄ (mean features [d]) and Q̄
(mean soft predictions [C]), the model's feature f and head h:

    CE + λ·(1/|K_c|) Σ_{c∈K_c} ‖softmax(h(H̄_c)/T) − Q̄_c‖ + γ·mean_i ‖f(x_i) − H̄_{y_i}‖.

After training, in evaluation mode, per class: H_{k,c} = mean feature (each clipped to the norm ζ, if set) plus N(0,
σ²), Q_{k,c} = mean of softmax(logits/T). Server: FedAvg, and per class the mean of the knowledge with weights n_{k,c}
over the clients at which the class has a share of ν or more of the samples; without such a client, over all that hold
it. A class that no client sends keeps its knowledge, or with ``absent_classes: zeros`` has zeros, to which features and
answers are then pulled.

ζ and σ (``clip``, ``noise``) are an alternative to ``proto_clip`` and ``proto_noise``: σ hides one of the n samples of
a class as ``proto_noise`` = σ·n/(2ζ) does. The account takes the smallest n that is released, ``min_count``; it does
not cover Q_{k,c}.

Deviations: ‖·‖ is by default the mean square over the dimensions, and the norm of the paper with ``distance: l2``;
knowledge is averaged (the authors' server keeps the last client's). λ = γ = 0 is FedAvg, and sends no more.

``preset: authors`` has σ = 2, of their option file for ResNet's features. FedPA compares with a copy of its own: mean
squares, σ = 0.02, zeros for absent classes; knowledge is of mini-batches in training there, which is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import Prototypes, TensorDict
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.alignment import row_distance
from flcore.math.losses.basic import cross_entropy
from flcore.math.prototypes.class_means import class_means, fuse_prototypes
from flcore.math.prototypes.release import Unit
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg, sample_counts
from flcore.methods.kit.class_prototypes import CLASS_COUNTS, ReleasesPrototypes, counts_of_uploads
from flcore.methods.kit.preset import AuthorsPreset

KNOWLEDGE = Key("knowledge", Prototypes)
"""Per class a row of d + C: the mean feature, then the mean soft prediction."""


@dataclass(frozen=True)
class FedHKD(
    AuthorsPreset,
    ReleasesPrototypes,
    FedAvg,
    name="fedhkd",
    citation="Chen et al., ICLR 2023",
    reduces_to_fedavg={"lambda_head": 0.0, "gamma": 0.0},
):
    """FedAvg with mean features and soft predictions per class that regularise body and head."""

    AUTHORS: ClassVar[Mapping[str, Any]] = {"distance": "l2", "noise": 2.0}
    covers = "mean features alone; soft predictions, weights, counts and the classes held are not protected"

    lambda_head: float = param(
        0.05, "λ, weight of the answers to the mean features", low=0, search=Search(1e-3, 1.0, log=True)
    )
    gamma: float = param(
        0.05, "γ, weight of the distance to the mean features", low=0, search=Search(1e-3, 1.0, log=True)
    )
    temperature: float = param(
        0.5, "T of the soft predictions", above=0, search=Search(0.1, 2.0, log=True, when=lambda m: m.lambda_head > 0)
    )
    threshold: float = param(
        0.25, "ν, share of a client's samples that a class needs for its knowledge to count", low=0, high=1
    )
    distance: Literal["mse", "l2"] = param("mse", "mean square over the dimensions, or norm as in the paper")
    noise: float = param(0.0, "σ, standard deviation of noise on mean features; authors 2, FedPA's copy 0.02", low=0)
    absent_classes: Literal["masked", "zeros"] = param(
        "masked", "classes that no client of the round sends: keep their knowledge, if any, or zeros as FedPA's copy"
    )
    clip: float | None = param(None, "ζ, largest norm of a feature in its mean; null: any", above=0)

    def __post_init__(self) -> None:
        """Refuse two settings of the same clipping and noise."""
        super().__post_init__()
        if self.as_in_the_paper and (self.proto_clip is not None or self.proto_unit == "client"):
            raise ValueError(
                "clip and noise are the paper's terms for proto_clip, proto_noise and proto_unit; set one or the other"
            )

    @property
    def as_in_the_paper(self) -> bool:
        return self.noise > 0 or self.clip is not None

    @property
    def sends_prototypes(self) -> bool:
        return self.lambda_head > 0 or self.gamma > 0

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = super().start_server(setting)
        if not self.sends_prototypes:
            return server
        width = setting.feature_dim + setting.num_classes
        return {**server, KNOWLEDGE: Prototypes.empty(setting.num_classes, width)}

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return server.only(fl.MODEL, KNOWLEDGE)

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        if not self.sends_prototypes or ctx.rounds_done == 0:
            return {}
        knowledge = ctx.received[KNOWLEDGE]
        features, answers = knowledge.means.tensor_split([ctx.setting.feature_dim], dim=1)
        return {"features": features, "answers": answers, "present": knowledge.present}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        features = model.features(batch.images)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if "present" not in inputs:
            return terms
        means, present = inputs["features"], inputs["present"]
        if self.lambda_head > 0:
            answers = (model.for_extra_inputs().classify(means) / self.temperature).softmax(1)
            distance = row_distance(answers, inputs["answers"], present, form=self.distance)
            terms["answers"] = self.lambda_head * distance
        if self.gamma > 0:
            known = present[batch.labels].to(features.dtype)
            weight = known if batch.weight is None else known * batch.weight
            terms["features"] = self.gamma * row_distance(features, means[batch.labels], weight, form=self.distance)
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if not self.sends_prototypes:
            return message, client_state
        features, labels = trained.features()
        logits = ctx.setting.network.classify(features, trained.weights.values)
        answers = class_means((logits / self.temperature).softmax(1), labels, ctx.setting.num_classes)
        own = self.release(ctx, self.means_of(ctx, features, labels), ctx.class_counts)
        rows = torch.cat([own.means, torch.where(own.present.unsqueeze(1), answers.means, 0.0)], dim=1)
        held = TensorDict({"held": ctx.class_counts[own.present.cpu()]})
        return {**message, KNOWLEDGE: Prototypes(rows, own.present), CLASS_COUNTS: held}, client_state

    def release(self, ctx: fl.ClientContext, own: Prototypes, counts: Tensor) -> Prototypes:
        own = super().release(ctx, own, counts)
        if self.noise == 0:
            return own
        noise = torch.randn(own.means.shape, generator=ctx.stream("fedhkd noise")).to(own.means.device) * self.noise
        return Prototypes(own.means + noise * own.present.unsqueeze(1), own.present)

    @property
    def bound(self) -> float | None:
        return self.proto_clip if self.clip is None else self.clip

    @property
    def protected(self) -> Unit:
        return "sample" if self.as_in_the_paper else self.proto_unit

    @property
    def noise_multiplier(self) -> float:
        """Smallest multiplier of σ and ζ, with ``min_count`` samples; without ζ, σ guarantees nothing."""
        if self.noise == 0:
            return self.proto_noise
        return 0.0 if self.clip is None else self.noise * max(1, self.min_count) / (2 * self.clip)

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        fuse: dict[str, fl.ServerStep] = {"fuse-knowledge": self.fuse_knowledge} if self.sends_prototypes else {}
        return {**super().server_steps(), **fuse}

    def fuse_knowledge(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        counts, sizes = counts_of_uploads(replies, KNOWLEDGE), sample_counts(replies)
        held, all_held = torch.stack(list(counts.values())), torch.tensor([sizes[client] for client in counts])
        weights = dict(zip(counts, qualified_counts(held, all_held, self.threshold), strict=True))
        before = server[KNOWLEDGE]
        if self.absent_classes == "zeros":
            before = Prototypes(torch.zeros_like(before.means), torch.ones_like(before.present))
        return server | {KNOWLEDGE: fuse_prototypes(replies.of(KNOWLEDGE), before, weights)}, {}


def qualified_counts(counts: Tensor, sizes: Tensor, threshold: float) -> Tensor:
    """Return counts int64 [S, C] of classes with a share of ``threshold`` = ν or more of ``sizes`` [S] (n_k), else 0.

    A class that qualifies nowhere keeps all its counts.
    """
    qualified = counts.double() >= threshold * sizes.unsqueeze(1)
    return torch.where(qualified | ~(qualified & (counts > 0)).any(dim=0), counts, 0)
