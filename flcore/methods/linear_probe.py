"""FedAvg of a linear head alone, over features that nobody trains: the rival of heads in closed form.

The features are those of the initial model (random, or from a file), or of ProtoLDA's dictionary where the model is
`patch_dictionary`: then all clients make it in the first round, as ProtoLDA does with all of them.

In the first round, after that, all clients send sums and squares of their features, and receive mean and scale of
each: the head is trained on standardised features, as a closed-form head is solved on them. Then every round is
FedAvg's, and only heads travel. Clients compute their features once and keep them; augmentation has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flcore.aggregation.mean import average_weights
from flcore.io.messages import Count, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.basic import cross_entropy
from flcore.math.prototypes.discriminant import Margins
from flcore.methods import types as fl
from flcore.methods.api import Method
from flcore.methods.fedavg import sample_counts
from flcore.methods.kit.patch_sums import ASKS_ONCE, DICTIONARY, FILTERS, PatchSums

HEAD = Key("head", Weights)
"""A head of standardised features."""

FEATURE_SUMS = Key("feature_sums", TensorDict)
"""A client's ``counts`` float64 [1], and sums of features, ``sums`` [1, D] and ``squares`` [D]."""

SCALING = Key("scaling", TensorDict)
"""``mean`` and ``scale`` [D] of the features."""

FEATURES = Key("features", TensorDict)
"""In a client's state: ``features`` [n, D]."""


@dataclass(frozen=True)
class _Dictionary(PatchSums, name="dictionary"):
    """ProtoLDA's dictionary, with its defaults."""


_DICTIONARY = _Dictionary()

SUMS_LEG, SCALING_LEG, TRAIN_LEG = "feature-sums", "scaling", "train-head"


@dataclass(frozen=True)
class LinearProbe(Method, name="linear_probe", citation="McMahan et al., AISTATS 2017", needs_linear_head=True):
    """FedAvg of a linear head over fixed, standardised features."""

    @property
    def task_stream_error(self) -> str:
        return ASKS_ONCE

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        return {fl.MODEL: setting.initial, HEAD: setting.initial.part("head.")}

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        train = fl.Exchange(TRAIN_LEG, phases=(fl.Phase(trainable=("head.",)),), server_steps=("aggregate",))
        if round_number > 1:
            return (train,)
        first = _DICTIONARY.first_legs() if DICTIONARY[0] in setting.initial.params else ()
        scaling = (
            fl.Exchange(SUMS_LEG, phases=(), server_steps=("scale",)),
            fl.Exchange(SCALING_LEG, phases=(), server_steps=()),
        )
        return (*(replace(leg, participants="all") for leg in (*first, *scaling)), train)

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        sent: Mapping[str, str] = {SUMS_LEG: FILTERS, SCALING_LEG: SCALING, TRAIN_LEG: HEAD}
        key = sent.get(ctx.exchange)
        return _DICTIONARY.broadcast(server, client, ctx) if key is None else server.only(key)

    def initial_weights(self, ctx: fl.ClientContext) -> Weights:
        return ctx.setting.initial.with_params(ctx.received.get(HEAD))

    def per_sample_inputs(self, ctx: fl.ClientContext) -> Mapping[str, Tensor]:
        """Return the features; zeros for a client that was away in the first round, whose head is not used."""
        if FEATURES in ctx.client_state:
            return {"features": ctx.client_state[FEATURES]["features"]}
        shape = int(ctx.class_counts.sum()), ctx.setting.feature_dim
        return {"features": torch.zeros(shape, device=ctx.setting.device)}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        logits = model.classify(batch.per_sample["features"])
        return {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        if ctx.exchange == SUMS_LEG:
            features, _ = trained.features(ctx.setting.initial.with_params(ctx.received.get(FILTERS)))
            rows = features.cpu().double()
            sums = {"sums": rows.sum(0, keepdim=True).float(), "squares": rows.square().sum(0).float()}
            sums["counts"] = torch.tensor([float(len(rows))], dtype=torch.float64)
            return {FEATURE_SUMS: TensorDict(sums)}, {FEATURES: TensorDict({"features": features})}
        if ctx.exchange == SCALING_LEG:
            if FEATURES not in ctx.client_state:
                return {}, {}
            scaling, features = ctx.received[SCALING], ctx.client_state[FEATURES]["features"]
            standard = (features - scaling["mean"].to(features.device)) / scaling["scale"].to(features.device)
            return {}, {FEATURES: TensorDict({"features": standard})}
        if ctx.exchange != TRAIN_LEG:
            return _DICTIONARY.reply(ctx, trained)
        if FEATURES not in ctx.client_state:
            return {}, ctx.client_state
        head = trained.weights.part("head.")
        return {HEAD: head, fl.NUM_SAMPLES: Count(trained.num_samples)}, ctx.client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {**_DICTIONARY.server_steps(), "scale": self.scale, "aggregate": self.aggregate}

    def scale(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Return mean and scale of each feature; a constant one counts as 0."""
        sent = replies.of(FEATURE_SUMS).values()
        names = ("counts", "sums", "squares")
        margins = Margins(*(torch.stack([own[name].double() for own in sent]).sum(0) for name in names))
        return server | {SCALING: TensorDict({"mean": margins.mean.float(), "scale": margins.scale.float()})}, {}

    def aggregate(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Average the heads, and fold the standardisation into the model's head."""
        heads = replies.of(HEAD)
        if not heads:
            return server, {}
        mean = average_weights(heads, sample_counts(replies))
        weight = mean.params["head.weight"] / server[SCALING]["scale"]
        bias = mean.params["head.bias"] - weight @ server[SCALING]["mean"]
        model = ctx.setting.initial.with_params(server.get(FILTERS))
        folded = model.with_params(Weights({"head.weight": weight, "head.bias": bias}))
        return server | {HEAD: mean, fl.MODEL: folded}, {}
