"""FedProto (Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, AAAI 2022): clients exchange class prototypes, no weights.

Client: CE + λ·MSE(f(x_i), p̄_{y_i}) (Eq. 7; mean over batch *and* dimensions, as in the authors' code), classes without
a global prototype contribute 0. Afterwards p_{k,c} = mean feature of the client's samples of class c (Eq. 3).
Server: p̄_c = unweighted mean over the clients that upload c (Eq. 6 has weights n_{k,c}; the authors' code counts
clients).

Deviations: prototypes are computed in evaluation mode after training; ``proto_mode: running`` is the authors' code,
which averages the features of the last local epoch while the weights move. A class nobody uploads keeps its last
prototype (needed under partial participation). In round 1 there are no prototypes: the round equals local training to
the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flcore.losses.basic import cross_entropy, prototype_distance
from flcore.messages import Prototypes
from flcore.methods.base import Batch, Context, LocalModel, Method, Phase, Setting, Stage, TrainedClient, Turn
from flcore.params import Search, param
from flcore.prototypes import average_prototypes, class_means
from flcore.records import Record, payload_of


@dataclass(frozen=True)
class FedProto(Method):
    """Personal models aligned by shared class prototypes."""

    name: ClassVar[str] = "fedproto"
    summary: ClassVar[str] = "personal models, aligned by exchanging one prototype per class"
    citation: ClassVar[str] = "Tan et al., AAAI 2022"
    has_global_model: ClassVar[bool] = False
    has_vote: ClassVar[bool] = True

    weight: float = param(1.0, "weight λ of the prototype alignment", low=0, search=Search(0.01, 10.0, log=True))
    inference: Literal["classifier", "prototypes"] = param(
        "classifier", "answer with the own head, or with the nearest prototype among the client's own classes"
    )
    proto_mode: Literal["final", "running"] = param(
        "final", "class means of the trained model, or of the last local epoch's mini-batches during training"
    )

    def phases(self) -> tuple[Phase, ...]:
        """One, whose features are averaged where prototypes are running ones."""
        return (Phase(note="last_pass" if self.proto_mode == "running" else "none"),)

    def start_server(self, setting: Setting) -> Record:
        """No prototypes yet."""
        return {"prototypes": Prototypes.empty(setting.num_classes, setting.feature_dim)}

    def broadcast(self, server: Record, client: int, setting: Setting) -> Record:
        """The prototypes of the classes that have one."""
        return {"prototypes": server["prototypes"]}

    def context(self, turn: Turn) -> Context:
        """The global prototypes, fixed during the round."""
        prototypes = payload_of(Prototypes, turn.inbox, "prototypes")
        return {"means": prototypes.means, "present": prototypes.present}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy and the distance to the prototype of the label."""
        features = model.features(batch.images)
        model.note(features)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if self.weight > 0:
            distance = prototype_distance(features, batch.labels, context["means"], context["present"], batch.weight)
            terms["alignment"] = self.weight * distance
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The client's class means; its model stays with it."""
        running = self.proto_mode == "running"
        own = trained.noted_means() if running else class_means(*trained.features(), turn.setting.num_classes)
        return {"prototypes": own}, {"model": trained.weights}

    def stages(self) -> Mapping[str, Stage]:
        """One stage: the prototypes' mean over clients."""
        return {"aggregate-prototypes": aggregate_prototypes}

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """Logits of the own head, or minus the mean squared distance to each usable prototype."""
        features = model.features(images)
        prototypes = payload_of(Prototypes, server, "prototypes")
        usable = prototypes.present if classes is None else prototypes.present & classes
        if self.inference == "classifier" or not usable.any():
            return model.classify(features)
        # Distances from differences: by matrix products they would depend on how many images are asked about at once.
        distances = torch.cdist(features, prototypes.means, compute_mode="donot_use_mm_for_euclid_dist")
        return (-distances.square() / features.shape[1]).masked_fill(~usable, -torch.inf)


def aggregate_prototypes(server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
    """p̄_c ← mean of p_{k,c} over the clients that uploaded class c."""
    uploads = {client: payload_of(Prototypes, message, "prototypes") for client, message in replies.items()}
    previous = payload_of(Prototypes, server, "prototypes")
    return {**server, "prototypes": average_prototypes(uploads, previous)}
