"""FedFA (Zhou, Zhang, Tsang, IEEE TMC 2023): anchors for features, common to all clients, on which heads train too.

Not the federated feature augmentation of the same name (ICLR 2023). Client, per mini-batch, with anchors a_c fixed
during its turn:

1. a step on CE + λ·L_a,  L_a = (1/C)·Σ_i ‖f(x_i) − a_{y_i}‖² / n_{y_i}, n_c the samples of class c in it;
2. a step of the head alone on the mean of CE(h(a_c), c) over *all* C anchors, by an Adam of its own.

After its turn, once for each pass over its data (or the part of one in the round, where batches are endless) and for
the classes that it holds, a_c ← m·a_c + (1 − m)·f̄_c, f̄_c the mean over the pass's mini-batches of the class's mean
feature, computed while the weights moved. Server: weights and anchors averaged with n_k; a client without a class sends
its anchor unchanged, and counts (``anchor_mean: holders``: does not).

Anchors start as distinct unit vectors along the axes, or with fewer dimensions than classes as random directions.
Deviation from the authors' code: f̄_c is the mean over the mini-batches that have the class; theirs is divided by the
number of all, so that the anchor of a rare class shrinks.

Privacy: the anchor of a class with one sample at a client mixes the received anchor and that sample's feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flcore.core.optim import Adam
from flcore.core.params import Search, param
from flcore.core.rng import torch_stream
from flcore.io.messages import TensorDict
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.basic import anchor_distance, cross_entropy, unit_vectors
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg, sample_counts

ANCHORS = Key("anchors", TensorDict)
"""``anchors`` float32 [C, d]; with ``anchor_mean: holders`` also, on its way up, ``held`` bool [C]."""


@dataclass(frozen=True)
class FedFA(
    FedAvg,
    name="fedfa",
    citation="Zhou et al., IEEE TMC 2023",
    reduces_to_fedavg={"lambda_anchor": 0.0, "use_calibration": False},
):
    """FedAvg with features drawn to common anchors, on which heads are trained in every step."""

    lambda_anchor: float = param(
        0.1, "weight λ of the distance to anchors", low=0, search=Search(choices=(0.01, 0.1, 1.0))
    )
    use_calibration: bool = param(True, "train the head on the anchors after each step", switch=True)
    calibration_lr: float = param(
        1e-3, "Adam's rate for the head", above=0, search=Search(1e-4, 1e-2, log=True, when=lambda m: m.use_calibration)
    )
    anchor_momentum: float = param(0.5, "m, what an anchor keeps of itself in each pass", low=0, high=1)
    anchor_mean: Literal["all", "holders"] = param(
        "all", "the server's mean of an anchor: over all clients of the round, or those that hold the class"
    )

    @property
    def has_anchors(self) -> bool:
        return self.lambda_anchor > 0 or self.use_calibration

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = super().start_server(setting)
        return {**server, ANCHORS: TensorDict({"anchors": first_anchors(setting)})} if self.has_anchors else server

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return server.only(fl.MODEL, ANCHORS)

    def phases(self) -> tuple[fl.Phase, ...]:
        if not self.has_anchors:
            return super().phases()
        adam = partial(Adam, self.calibration_lr)
        own = fl.StepSpec(loss=self.calibration, trainable=("head.",), optimizer=adam)
        return (
            fl.Phase(
                record_features="passes", updates=(fl.StepSpec(), own) if self.use_calibration else (fl.StepSpec(),)
            ),
        )

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        return {"anchors": ctx.received[ANCHORS]["anchors"]} if self.has_anchors else {}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        features = model.features(batch.images)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if self.has_anchors:
            model.record_features(features)
        if self.lambda_anchor > 0:
            distance = anchor_distance(features, batch.labels, inputs["anchors"], batch.weight)
            terms["anchors"] = self.lambda_anchor * distance
        return terms

    def calibration(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        """Return the cross-entropy of the head on the anchors."""
        anchors = inputs["anchors"]
        labels = torch.arange(len(anchors), device=anchors.device)
        return {"calibration": cross_entropy(model.for_extra_inputs().classify(anchors), labels)}

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if not self.has_anchors:
            return message, client_state
        means, present = trained.recorded_passes()
        anchors = moved_anchors(ctx.received[ANCHORS]["anchors"], means, present, self.anchor_momentum)
        upload = {"anchors": anchors}
        if self.anchor_mean == "holders":
            upload["held"] = ctx.class_counts > 0
        return {**message, ANCHORS: TensorDict(upload)}, client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        average: dict[str, fl.ServerStep] = {"average-anchors": average_anchors} if self.has_anchors else {}
        return {**super().server_steps(), **average}


def first_anchors(setting: fl.FederationContext) -> Tensor:
    """Return unit vectors [C, d], distinct axes if there are enough."""
    classes, dim = setting.num_classes, setting.feature_dim
    if dim >= classes:
        return torch.eye(classes, dim)
    return unit_vectors(torch.randn(classes, dim, generator=torch_stream(setting.seed, "anchors")))


def moved_anchors(anchors: Tensor, means: Tensor, present: Tensor, momentum: float) -> Tensor:
    """Return anchors [C, d] after passes with means [P, C, d]; classes not ``present``, bool [P, C], keep theirs."""
    for mean, held in zip(means, present, strict=True):
        anchors = torch.where(held.unsqueeze(1), momentum * anchors + (1 - momentum) * mean, anchors)
    return anchors


def average_anchors(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Average anchors with weights n_k, over the holders of c if uploads name them; without any, c keeps its own."""
    before, sizes = server[ANCHORS]["anchors"], sample_counts(replies)
    total = torch.zeros_like(before, dtype=torch.float64)
    weight = torch.zeros(len(before), 1, dtype=torch.float64)
    for client, upload in replies.of(ANCHORS).items():
        held = upload.named.get("held", torch.ones(len(before)))
        counts = (sizes[client] * held.double()).unsqueeze(1)
        total += counts * upload["anchors"]
        weight += counts
    mean = torch.where(weight > 0, total / weight.clamp_min(1), before.double())
    return server | {ANCHORS: TensorDict({"anchors": mean.float()})}, {}
