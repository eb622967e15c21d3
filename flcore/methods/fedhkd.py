"""FedHKD (Chen, Wang, Vikalo, ICLR 2023): clients share "hyper-knowledge", the mean feature and answer of each class.

Client, from the second round on (Eq. 4), with the classes K_c that have global knowledge H̄ (mean features [d]) and Q̄
(mean soft predictions [C]), the model's feature f and head h:

    CE + λ·(1/|K_c|) Σ_{c∈K_c} ‖softmax(h(H̄_c)/T) − Q̄_c‖ + γ·mean_i ‖f(x_i) − H̄_{y_i}‖.

After training, in evaluation mode, per class: H_{k,c} = mean feature (each clipped to the norm ζ if asked for) plus
N(0, σ²), Q_{k,c} = mean of softmax(logits/T). Server: FedAvg, and per class the mean of the knowledge with weights
n_{k,c} over the clients at which the class has a share of ν or more of the samples; where no client has, over all that
hold it. A class that nobody sends keeps what it had.

Deviations: ‖·‖ is by default the mean square over the dimensions, as in FedPA's re-implementation, and the norm of the
paper with ``distance: l2``; classes without knowledge are masked (that re-implementation compares with zeros);
knowledge is averaged (the authors' released server keeps the last client's). λ = γ = 0 is FedAvg, and nothing more is
sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flcore.losses.alignment import row_distance
from flcore.losses.basic import cross_entropy
from flcore.messages import Arrays, Count, Prototypes
from flcore.methods.fedavg import FedAvg
from flcore.methods.vocabulary import Batch, Context, LocalModel, Setting, Stage, TrainedClient, Turn
from flcore.params import Search, param
from flcore.prototypes import class_means
from flcore.prototypes.fusion import weighted_class_means
from flcore.prototypes.release import clip_to_norm
from flcore.records import Record, payload_of


@dataclass(frozen=True)
class FedHKD(FedAvg):
    """FedAvg whose clients agree on mean features and mean answers per class."""

    name: ClassVar[str] = "fedhkd"
    summary: ClassVar[str] = "mean features and soft predictions per class regularise body and head, beside FedAvg"
    citation: ClassVar[str] = "Chen et al., ICLR 2023"

    lambda_head: float = param(
        0.05, "λ, weight of the answers to the mean features", low=0, search=Search(1e-3, 1.0, log=True)
    )
    gamma: float = param(
        0.05, "γ, weight of the distance to the mean features", low=0, search=Search(1e-3, 1.0, log=True)
    )
    temperature: float = param(0.5, "T of the soft predictions", above=0, search=Search(0.1, 2.0, log=True))
    threshold: float = param(
        0.25, "ν, share of a client's samples that a class needs for its knowledge to count", low=0, high=1
    )
    distance: Literal["mse", "l2"] = param("mse", "mean square over the dimensions, or norm as in the paper")
    noise: float = param(0.0, "σ, standard deviation of noise on mean features; authors 2, FedPA's copy 0.02", low=0)
    clip: float | None = param(None, "ζ, largest norm of a feature in its mean; null: any", above=0)

    @property
    def shares_knowledge(self) -> bool:
        """Whether anybody has a use for it."""
        return self.lambda_head > 0 or self.gamma > 0

    def start_server(self, setting: Setting) -> Record:
        """The initial model and no knowledge yet: rows of d features, then C probabilities."""
        server = super().start_server(setting)
        if not self.shares_knowledge:
            return server
        return {**server, "knowledge": Prototypes.empty(setting.num_classes, width(setting))}

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The global model, and the knowledge of the classes that have some."""
        message = super().broadcast(server, client, exchange)
        return {**message, "knowledge": server["knowledge"]} if self.shares_knowledge else message

    def context(self, turn: Turn) -> Context:
        """H̄ and Q̄, from the second round on."""
        if not self.shares_knowledge or turn.round == 1:
            return {}
        knowledge = payload_of(Prototypes, turn.inbox, "knowledge")
        features = knowledge.means[:, : turn.setting.feature_dim]
        answers = knowledge.means[:, turn.setting.feature_dim :]
        return {"features": features, "answers": answers, "present": knowledge.present}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy, the answers to the mean features, and the distance to them; a term of weight 0 is left out."""
        features = model.features(batch.images)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if "present" not in context:
            return terms
        means, present = context["features"], context["present"]
        if self.lambda_head > 0:
            answers = (model.beside().classify(means) / self.temperature).softmax(1)
            apart = row_distance(answers, context["answers"], present, form=self.distance)
            terms["answers"] = self.lambda_head * apart
        if self.gamma > 0:
            known = present[batch.labels].to(features.dtype)
            weight = known if batch.weight is None else known * batch.weight
            terms["features"] = self.gamma * row_distance(features, means[batch.labels], weight, form=self.distance)
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The trained weights with n_k, the knowledge and n_{k,c} of the classes held."""
        message, memory = super().reply(turn, trained)
        if not self.shares_knowledge:
            return message, memory
        setting = turn.setting
        features, labels = trained.features()
        logits = setting.network.classify(features, trained.weights.values)
        answers = class_means((logits / self.temperature).softmax(1), labels, setting.num_classes)
        if self.clip is not None:
            features = clip_to_norm(features, self.clip)
        own = class_means(features, labels, setting.num_classes)
        means = own.means
        if self.noise > 0:
            blur = torch.randn(means.shape, generator=turn.stream("fedhkd noise")) * self.noise
            means = means + blur * own.present.unsqueeze(1)
        knowledge = Prototypes(torch.cat([means, answers.means], dim=1), own.present)
        counts = Arrays({"held": turn.counts[own.present]})
        return {**message, "knowledge": knowledge, "class_counts": counts}, memory

    def stages(self) -> Mapping[str, Stage]:
        """FedAvg's, then the mean of the knowledge."""
        stages = dict(super().stages())
        return {**stages, "fuse-knowledge": self.fuse_knowledge} if self.shares_knowledge else stages

    def fuse_knowledge(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """H̄_c, Q̄_c ← the weighted mean of the round's uploads of class c."""
        clients = sorted(replies)
        uploads = [payload_of(Prototypes, replies[client], "knowledge") for client in clients]
        counts = torch.zeros(len(clients), setting.num_classes, dtype=torch.int64)
        for row, (client, upload) in enumerate(zip(clients, uploads, strict=True)):
            counts[row, upload.present] = payload_of(Arrays, replies[client], "class_counts")["held"]
        sizes = torch.tensor([payload_of(Count, replies[client], "num_samples").value for client in clients])
        weights = qualified_counts(counts, sizes, self.threshold)
        means, present = weighted_class_means(torch.stack([upload.means for upload in uploads]).double(), weights)
        previous = payload_of(Prototypes, server, "knowledge")
        fused = torch.where(present.unsqueeze(1), means.float(), previous.means)
        return {**server, "knowledge": Prototypes(fused, previous.present | present)}


def qualified_counts(counts: Tensor, sizes: Tensor, threshold: float) -> Tensor:
    """n_{k,c} where class c has a share of ``threshold`` or more at client k, else 0.

    A class that qualifies nowhere keeps all its counts.

    Args:
        counts: int64 ``[S, C]``.
        sizes: int64 ``[S]``, n_k.
        threshold: ν.
    """
    qualified = counts.double() >= threshold * sizes.unsqueeze(1)
    return torch.where(qualified | ~(qualified & (counts > 0)).any(dim=0), counts, 0)


def width(setting: Setting) -> int:
    """Length of a class's knowledge, d + C."""
    return setting.feature_dim + setting.num_classes
