"""FedEnsemble: training as FedAvg does, answering with several models at once.

Two readings (baselines.md section 13):

``clients`` (what FedPA compares with): FedAvg; the answer is the argmax of Σ_m logits_m(x) over the last uploaded model
of every client that has taken part.

``permutation`` (Shi, Lai, Kontar, Chowdhury, *Fed-ensemble*, 2021): M models live side by side. In every round each of
them goes to 1/M of all clients by a random permutation, and is averaged over those of its clients that were sampled.
The answer is that of all M models.

The ensemble answers for everybody, on the common test data and on each client's own: FedPA's figure, which pools the
clients' test data, is its ``pooled_local``. With ``clients`` the history also scores one model alone as
``single_model``: w_g on the common test data, on a client's data its own model (section 21's client score), w_g before
its first turn. ``combine: probs`` averages softmax outputs instead of summing logits, which may decide differently.

A member is asked with its own BatchNorm statistics. Where ``model.batchnorm: local`` (FedPA's setting) keeps them out
of FedAvg, they travel all the same, beside the model and for the members alone (``member_buffers``): in FedPA's code
every member has those of its client, and the evaluator sees them all. Training stays what ``local`` says.

Deviations: FedPA's code sends w_g to everybody in every round, so that clients which were not sampled count as copies
of w_g; here they count with the model they last trained, or not at all. The M models start from independent weights
only in so far as the initial model's are: model m > 0 has the initial model's values, shuffled within each tensor,
which for weights drawn independently is a fresh draw from the same distribution.

Traffic is FedAvg's but for those statistics: predictions are made where the models are. Members are stored with the
server's state (``member_0003``), one model per client or M.
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
from flcore.methods.api import ScoreKind
from flcore.methods.fedavg import FedAvg, aggregate, sample_counts
from flcore.methods.kit.preset import AuthorsPreset
from flcore.methods.types import (
    MODEL,
    ClientContext,
    FederationContext,
    Kind,
    LocalModel,
    Metrics,
    Predict,
    Replies,
    RoundContext,
    ServerStep,
    TrainedClient,
)

MEMBER_ASSIGNMENT = Key("assignment", TensorDict)
"""``model`` int64 [N]: which of the models side by side each client gets in the coming round."""

MEMBER_STATISTICS = Key("member", Weights)
"""A member's BatchNorm statistics alone, where the model travels without."""

MEMBER = "member_"


@dataclass(frozen=True)
class FedEnsemble(AuthorsPreset, FedAvg):
    """FedAvg that answers with an ensemble."""

    name: ClassVar[str] = "fedensemble"
    summary: ClassVar[str] = "FedAvg, answering with all clients' models, or several averaged models, together"
    citation: ClassVar[str] = "Shi et al., 2021; as a baseline of FedPA"
    AUTHORS: ClassVar[Mapping[str, Any]] = {"combine": "probs", "variant": "permutation"}

    variant: Literal["clients", "permutation"] = param(
        "clients", "members: every client's last model, or models that are averaged side by side"
    )
    combine: Literal["logits", "probs"] = param("logits", "sum the members' logits, or average their probabilities")
    models: int = param(
        5,
        "M, models side by side, for variant: permutation",
        low=1,
        high=1000,
        search=Search(2, 10, when=lambda m: m.variant == "permutation"),
    )

    @property
    def can_be_base(self) -> bool:
        """No: no single model answers."""
        return False

    @property
    def predicts_from_client_state(self) -> bool:
        """Where clients' own models are scored beside the ensemble."""
        return self.variant == "clients"

    @property
    def ignores_model(self) -> bool:
        """Always: members answer, each with its own statistics."""
        return True

    def start_server(self, setting: FederationContext) -> Payloads:
        """The initial model; or M of them, and who gets which first."""
        if self.variant == "clients":
            return super().start_server(setting)
        members: dict[str, Payload] = {
            member_slot(m): shuffled(setting.initial, m, setting.seed) for m in range(self.models)
        }
        return members | {MEMBER_ASSIGNMENT: self.assignment(1, setting)}

    def assignment(self, round_number: int, setting: FederationContext) -> TensorDict:
        """Which model each client gets in a round, int64 [N]: a random permutation, dealt out in turn."""
        stream = torch_stream(setting.seed, "ensemble assignment", round_number)
        return TensorDict({"model": torch.randperm(setting.num_clients, generator=stream) % self.models})

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The global model, or the one of the round's permutation."""
        if self.variant == "clients":
            return super().broadcast(server, client, ctx)
        return {MODEL: server[member_slot(int(server[MEMBER_ASSIGNMENT]["model"][client]))]}

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The trained weights with n_k, statistics as a member needs them; with ``clients`` the client keeps both."""
        message, _ = super().reply(ctx, trained)
        statistics = trained.weights.buffers
        travel = bool(ctx.received[MODEL].buffers)
        if not travel and differ(statistics, ctx.setting.initial.buffers):
            message = {**message, MEMBER_STATISTICS: Weights({}, statistics)}
        return message, {MODEL: trained.weights} if self.variant == "clients" else {}

    @property
    def poisonable_payloads(self) -> frozenset[Kind]:
        """Weights; with ``permutation`` no stage folds them as ``aggregation`` says."""
        return frozenset({"weights"})

    def server_steps(self) -> Mapping[str, ServerStep]:
        """Aggregate and keep the members, or aggregate each model by itself."""
        if self.variant == "clients":
            return {"aggregate": aggregate, "collect-members": collect_members}
        return {"aggregate": self.aggregate_each}

    def aggregate_each(self, server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
        """Each model ← Σ_k (n_k / N) w_k over the clients that trained it; then the next round's permutation."""
        given = server[MEMBER_ASSIGNMENT]["model"].tolist()
        models = uploaded(replies, ctx.setting)
        updated: dict[str, Payload] = {MEMBER_ASSIGNMENT: self.assignment(ctx.round + 1, ctx.setting)}
        for m in range(self.models):
            own = {client: model for client, model in models.items() if given[client] == m}
            if own:
                updated[member_slot(m)] = average_weights(own, sample_counts(replies))
        return server | updated, {}

    def global_model(self, server: Record) -> Weights | None:
        """One model that stands for all where a single one is asked for: w_g, or the first member."""
        return server[MODEL if self.variant == "clients" else member_slot(0)]

    def scoring_message(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """w_g, for who has never trained a model of its own."""
        is_own = self.variant == "clients" and member_slot(client) not in server
        return {MODEL: server[MODEL]} if is_own else {}

    def client_model(self, received: Record, client_state: Record, setting: FederationContext) -> Weights | None:
        """A client's own model, or w_g before its first turn; None where members are nobody's own."""
        return (client_state.get(MODEL) or received.get(MODEL)) if self.variant == "clients" else None

    @property
    def score_kind(self) -> ScoreKind:
        """Logits, as their sum is: that of a product of the members' answers; or the mean of their probabilities."""
        return "logits" if self.combine == "logits" else "probabilities"

    def predict(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """What all members say together; the given model's answer while there are none."""
        members = members_of(known)
        if not members:
            return super().predict(model, images, known, classes)
        votes = torch.stack([model.classify(model.features(images, values), values) for values in members])
        return votes.sum(dim=0) if self.combine == "logits" else votes.softmax(dim=2).mean(dim=0)

    def predict_private(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """What the client's own model says alone."""
        return super().predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, Predict]:
        """What one model says alone: w_g, or a client's own."""
        return {"single_model": super().predict} if self.variant == "clients" else {}


def collect_members(server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
    """Keep every sampled client's model in place of its last one."""
    members = uploaded(replies, ctx.setting)
    return server | {member_slot(client): model for client, model in members.items()}, {}


def uploaded(replies: Replies, setting: FederationContext) -> dict[int, Weights]:
    """The clients' models, each with its statistics: the initial ones where those never move."""
    statistics = {client: weights.buffers for client, weights in replies.of(MEMBER_STATISTICS).items()}
    return {
        client: Weights(model.params, model.buffers or statistics.get(client, setting.initial.buffers))
        for client, model in replies.of(MODEL).items()
    }


def differ(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether tensors of the same names hold different values."""
    return any(not torch.equal(tensor.cpu(), second[name]) for name, tensor in first.items())


def member_slot(number: int) -> Key[Weights]:
    """Where a member stands at the server."""
    return Key(f"{MEMBER}{number:04d}", Weights)


def members_of(server: Record) -> list[dict[str, Tensor]]:
    """Parameters and buffers of all members, in order of their numbers."""
    numbers = sorted(int(name.removeprefix(MEMBER)) for name in server if name.startswith(MEMBER))
    return [server[member_slot(number)].values for number in numbers]


def shuffled(initial: Weights, number: int, seed: int) -> Weights:
    """The initial weights for model 0; for the others the same values in another order within each parameter."""
    if number == 0:
        return initial
    stream = torch_stream(seed, "ensemble weights", number)

    def shuffle(values: Tensor) -> Tensor:
        return values.flatten()[torch.randperm(values.numel(), generator=stream)].reshape(values.shape)

    return Weights({name: shuffle(values) for name, values in initial.params.items()}, initial.buffers)
