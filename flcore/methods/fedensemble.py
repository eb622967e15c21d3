"""FedEnsemble: training as FedAvg does, answering with several models at once.

Two readings (baselines.md section 13):

``clients`` (what FedPA compares with): FedAvg; the answer is the argmax of Σ_m logits_m(x) over the last uploaded model
of every client that has taken part. A client alone answers with its own model, or with w_g before its first turn.

``permutation`` (Shi, Lai, Kontar, Chowdhury, *Fed-ensemble*, 2021): M models live side by side. In every round each of
them goes to 1/M of all clients by a random permutation, and is averaged over those of its clients that were sampled.
The answer is that of all M models, for a client too.

``combine: probs`` averages softmax outputs instead of summing logits, which may decide differently.

Deviations: FedPA's code sends w_g to everybody in every round, so that clients which were not sampled count as copies
of w_g; here they count with the model they last trained, or not at all. The M models start from independent weights
only in so far as the initial model's are: model m > 0 has the initial model's values, shuffled within each tensor,
which for weights drawn independently is a fresh draw from the same distribution.

Traffic is FedAvg's: predictions are made where the models are. Members are stored with the server's state
(``member_0003``), one model per client or M. They are asked with their own BatchNorm statistics, which therefore have
to travel: ``model.batchnorm: aggregate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flcore.messages import Arrays, Count, Payload, Weights
from flcore.methods.fedavg import FedAvg, aggregate
from flcore.methods.vocabulary import LocalModel, Setting, Stage, TrainedClient, Turn
from flcore.models.averaging import average_weights
from flcore.params import Search, param
from flcore.records import Record, payload_of
from flcore.rng import torch_stream

MEMBER = "member_"


@dataclass(frozen=True)
class FedEnsemble(FedAvg):
    """FedAvg that answers with an ensemble."""

    name: ClassVar[str] = "fedensemble"
    summary: ClassVar[str] = "FedAvg, answering with all clients' models, or several averaged models, together"
    citation: ClassVar[str] = "Shi et al., 2021; as a baseline of FedPA"

    variant: Literal["clients", "permutation"] = param(
        "clients", "members: every client's last model, or models that are averaged side by side"
    )
    combine: Literal["logits", "probs"] = param("logits", "sum the members' logits, or average their probabilities")
    models: int = param(5, "M, models side by side, for variant: permutation", low=1, high=1000, search=Search(2, 10))

    def start_server(self, setting: Setting) -> Record:
        """The initial model; or M of them, and who gets which first."""
        if self.variant == "clients":
            return super().start_server(setting)
        members = {member_name(m): shuffled(setting.initial, m, setting.seed) for m in range(self.models)}
        return {**members, "assignment": self.assignment(1, setting)}

    def assignment(self, round_number: int, setting: Setting) -> Arrays:
        """Which model each client gets in a round, int64 [N]: a random permutation, dealt out in turn."""
        stream = torch_stream(setting.seed, "ensemble assignment", round_number)
        return Arrays({"model": torch.randperm(setting.num_clients, generator=stream) % self.models})

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The global model, or the one of the round's permutation."""
        if self.variant == "clients":
            return super().broadcast(server, client, exchange)
        model = int(payload_of(Arrays, server, "assignment")["model"][client])
        return {"model": server[member_name(model)]}

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The trained weights with n_k; where a client answers with its own model, it keeps it."""
        message, _ = super().reply(turn, trained)
        return message, {"model": trained.weights} if self.variant == "clients" else {}

    def stages(self) -> Mapping[str, Stage]:
        """Aggregate and keep the members, or aggregate each model by itself."""
        if self.variant == "clients":
            return {"aggregate": aggregate, "collect-members": collect_members}
        return {"aggregate": self.aggregate_each}

    def aggregate_each(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Each model ← Σ_k (n_k / N) w_k over the clients that trained it; then the next round's permutation."""
        given = payload_of(Arrays, server, "assignment")["model"]
        updated: dict[str, Payload] = {}
        for m in range(self.models):
            own = {client: message for client, message in sorted(replies.items()) if int(given[client]) == m}
            if own:
                models = {client: uploaded(message, setting) for client, message in own.items()}
                sizes = {client: payload_of(Count, message, "num_samples").value for client, message in own.items()}
                updated[member_name(m)] = average_weights(models, sizes)
        return {**server, **updated, "assignment": self.assignment(round_number + 1, setting)}

    def global_model(self, server: Record, setting: Setting) -> Weights | None:
        """One model that stands for all where a single one is asked for: w_g, or the first member."""
        if self.variant == "clients":
            return super().global_model(server, setting)
        return payload_of(Weights, server, member_name(0))

    def client_model(self, server: Record, client: int, memory: Record, setting: Setting) -> Weights | None:
        """A client's own model, or w_g before its first turn; None where the ensemble answers for clients too."""
        if self.variant == "permutation":
            return None
        return payload_of(Weights, memory if "model" in memory else server, "model")

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """What all members say together; the given model's answer for a single client and without members."""
        members = members_of(server)
        if classes is not None or not members:
            return super().predict(model, images, server, classes)
        votes = torch.stack([model.classify(model.features(images, values), values) for values in members])
        return votes.sum(dim=0) if self.combine == "logits" else votes.softmax(dim=2).mean(dim=0)


def collect_members(server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
    """Keep every sampled client's model in place of its last one."""
    return {**server, **{member_name(client): uploaded(message, setting) for client, message in replies.items()}}


def uploaded(message: Record, setting: Setting) -> Weights:
    """A client's model, which must be able to answer.

    Raises:
        ValueError: its BatchNorm statistics stayed at home.
    """
    weights = payload_of(Weights, message, "model")
    if setting.initial.buffers and not weights.buffers:
        raise ValueError("the members of an ensemble need their BatchNorm statistics; set model.batchnorm=aggregate")
    return weights


def member_name(number: int) -> str:
    """Name of a member in the server's record."""
    return f"{MEMBER}{number:04d}"


def members_of(server: Record) -> list[dict[str, Tensor]]:
    """Parameters and buffers of all members, in order of their numbers."""
    names = [name for name in server if name.startswith(MEMBER)]
    ordered = sorted(names, key=lambda name: int(name.removeprefix(MEMBER)))
    return [payload_of(Weights, server, name).values for name in ordered]


def shuffled(initial: Weights, number: int, seed: int) -> Weights:
    """The initial weights for model 0; for the others the same values in another order within each parameter."""
    if number == 0:
        return initial
    stream = torch_stream(seed, "ensemble weights", number)

    def shuffle(values: Tensor) -> Tensor:
        return values.flatten()[torch.randperm(values.numel(), generator=stream)].reshape(values.shape)

    params = {name: shuffle(values) for name, values in initial.params.items()}
    # Copies: members are stored in one file, which refuses names that share memory.
    return Weights(params, {name: values.clone() for name, values in initial.buffers.items()})
