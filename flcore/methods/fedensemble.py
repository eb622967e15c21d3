"""FedEnsemble: training as FedAvg does, predicting with several models at once.

Two readings (baselines.md section 13):

``clients`` (FedPA's baseline): FedAvg; the prediction is the argmax of Σ_m logits_m(x) over one model per client: its
last uploaded one, if it has taken part, or (``absent_clients: global``, FedPA's code) what it holds after the round:
the model it trained, or the global one it was sent.

``permutation`` (Shi, Lai, Kontar, Chowdhury, *Fed-ensemble*, 2021): M models in parallel. In every round each of them
goes to 1/M of all clients by a random permutation, and is averaged over the sampled ones among these. All M predict.

The ensemble predicts on the common test data and on each client's own: FedPA's figure, which pools the clients' test
data, is its ``pooled_local``. With clients' last models one model alone is scored as ``single_model``: w_g on the
common test data, on a client's data its own model (section 21), w_g before its first turn.

A member has its own BatchNorm statistics. If ``model.batchnorm: local`` (FedPA's setting) keeps them out of FedAvg,
they travel for the members alone: in FedPA's code every member has its client's.

Deviations: FedPA's code sends w_g to every client in every round, and counts copies of it; here the server copies it,
and nothing more is sent. Model m > 0 starts with the initial model's values, shuffled within each tensor: for weights
drawn independently another draw from the same distribution.

Members are part of the server state (``member_0003``), one model per client or M.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.aggregation.mean import average_weights
from flcore.core.params import Search, param
from flcore.core.rng import torch_stream
from flcore.io.messages import Payload, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.methods import types as fl
from flcore.methods.api import ScoreKind
from flcore.methods.fedavg import FedAvg, aggregate, sample_counts
from flcore.methods.kit.preset import AuthorsPreset

MEMBER_ASSIGNMENT = Key("assignment", TensorDict)
"""``model`` int64 [N]: the model that each client gets in the next round."""

MEMBER_STATISTICS = Key("member", Weights)
"""A member's BatchNorm statistics, where the model travels without."""

MEMBER = "member_"


@dataclass(frozen=True)
class FedEnsemble(AuthorsPreset, FedAvg, name="fedensemble", citation="Shi et al., 2021; as a baseline of FedPA"):
    """FedAvg, answering with all clients' models, or several averaged models, together."""

    AUTHORS: ClassVar[Mapping[str, Any]] = {"combine": "probs", "variant": "permutation"}

    variant: Literal["clients", "permutation"] = param(
        "clients", "members: every client's last model, or models that are averaged in parallel"
    )
    absent_clients: Literal["last", "global"] = param(
        "last", "clients: a client absent from the round is a member with its last model, or with the global one"
    )
    combine: Literal["logits", "probs"] = param("logits", "sum the members' logits, or average their probabilities")
    models: int = param(
        5, "M, models (permutation)", low=1, high=1000, search=Search(2, 10, when=lambda m: m.variant == "permutation")
    )

    @property
    def can_be_base(self) -> bool:
        return False

    @property
    def keeps_last_models(self) -> bool:
        return self.variant == "clients" and self.absent_clients == "last"

    @property
    def predicts_from_client_state(self) -> bool:
        return self.keeps_last_models

    @property
    def ignores_model(self) -> bool:
        return True

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        if self.variant == "clients":
            return super().start_server(setting)
        members: Payloads = {member_slot(m): shuffled(setting.initial, m, setting.seed) for m in range(self.models)}
        return {**members, MEMBER_ASSIGNMENT: self.assignment(1, setting)}

    def assignment(self, round_number: int, setting: fl.FederationContext) -> TensorDict:
        """Return the model of each client in a round, int64 [N]: a random permutation, dealt out in turn."""
        stream = torch_stream(setting.seed, "ensemble assignment", round_number)
        return TensorDict({"model": torch.randperm(setting.num_clients, generator=stream) % self.models})

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        if self.variant == "clients":
            return super().broadcast(server, client, ctx)
        return {fl.MODEL: server[member_slot(int(server[MEMBER_ASSIGNMENT]["model"][client]))]}

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, _ = super().reply(ctx, trained)
        statistics = trained.weights.buffers
        initial = ctx.setting.initial.buffers
        moved = any(not torch.equal(value, initial[name]) for name, value in statistics.items())
        if not ctx.received[fl.MODEL].buffers and moved:
            message = {**message, MEMBER_STATISTICS: Weights({}, statistics)}
        return message, {fl.MODEL: trained.weights} if self.keeps_last_models else {}

    @property
    def poisonable_payloads(self) -> frozenset[fl.Kind]:
        return frozenset({"weights"})

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        if self.variant == "permutation":
            return {"aggregate": self.aggregate_each}
        if self.absent_clients == "global":
            return {"collect-members": collect_all_members, "aggregate": aggregate}
        return {"aggregate": aggregate, "collect-members": collect_members}

    def aggregate_each(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Average each model over the clients that trained it, with n_k / N; then draw the next permutation."""
        assigned = server[MEMBER_ASSIGNMENT]["model"].tolist()
        models = uploaded(replies, ctx.setting)
        updated: dict[str, Payload] = {MEMBER_ASSIGNMENT: self.assignment(ctx.round + 1, ctx.setting)}
        for m in range(self.models):
            own = {client: model for client, model in models.items() if assigned[client] == m}
            if own:
                updated[member_slot(m)] = average_weights(own, sample_counts(replies))
        return server | updated, {}

    def global_model(self, server: Record) -> Weights | None:
        return server[fl.MODEL if self.variant == "clients" else member_slot(0)]

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        untrained = self.keeps_last_models and member_slot(client) not in server
        return {fl.MODEL: server[fl.MODEL]} if untrained else {}

    def client_model(self, received: Record, client_state: Record, setting: fl.FederationContext) -> Weights | None:
        return (client_state.get(fl.MODEL) or received.get(fl.MODEL)) if self.keeps_last_models else None

    @property
    def score_kind(self) -> ScoreKind:
        return "logits" if self.combine == "logits" else "probabilities"

    def predict(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        members = members_of(known)
        if not members:
            return super().predict(model, images, known, classes)
        votes = torch.stack([model.classify(model.features(images, values), values) for values in members])
        return votes.sum(dim=0) if self.combine == "logits" else votes.softmax(dim=2).mean(dim=0)

    def predict_private(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        return super().predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, fl.Predict]:
        return {"single_model": super().predict} if self.keeps_last_models else {}


def collect_members(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Replace the last model of every sampled client."""
    members = uploaded(replies, ctx.setting)
    return server | {member_slot(client): model for client, model in members.items()}, {}


def collect_all_members(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Make every client a member: with the model it trained, or else with the one that the round began with.

    A copy of that model has the client's last BatchNorm statistics where these are not averaged.
    """
    sent = server[fl.MODEL]
    copies: dict[str, Payload] = {}
    for client in range(ctx.setting.num_clients):
        last = server.get(member_slot(client), ctx.setting.initial)
        copies[member_slot(client)] = Weights(sent.params, sent.buffers or last.buffers)
    return collect_members(server | copies, replies, ctx)


def uploaded(replies: fl.Replies, setting: fl.FederationContext) -> dict[int, Weights]:
    """Return the clients' models with their statistics; the initial ones if they never move."""
    statistics = {client: weights.buffers for client, weights in replies.of(MEMBER_STATISTICS).items()}
    models, initial = replies.of(fl.MODEL), setting.initial.buffers
    return {k: Weights(model.params, model.buffers or statistics.get(k, initial)) for k, model in models.items()}


def member_slot(number: int) -> Key[Weights]:
    """Return the key of a member."""
    return Key(f"{MEMBER}{number:04d}", Weights)


def members_of(server: Record) -> list[dict[str, Tensor]]:
    """Return parameters and buffers of all members, in order of their numbers."""
    numbers = sorted(int(name.removeprefix(MEMBER)) for name in server if name.startswith(MEMBER))
    return [server[member_slot(number)].values for number in numbers]


def shuffled(initial: Weights, number: int, seed: int) -> Weights:
    """Return the initial weights for model 0; for others the same values, shuffled within each parameter."""
    if number == 0:
        return initial
    stream = torch_stream(seed, "ensemble weights", number)

    def shuffle(values: Tensor) -> Tensor:
        return values.flatten()[torch.randperm(values.numel(), generator=stream)].reshape(values.shape)

    return Weights({name: shuffle(values) for name, values in initial.params.items()}, initial.buffers)
