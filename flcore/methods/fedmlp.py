"""FedMLP (arXiv preprint, first version): prototypes of classes and of their clusters, for clients with task streams.

Client, in stage t of its stream, with the feature z, the classifier's cross-entropy L_C, the global prototypes g^k,
their clusters' centres p^v, the minority classes J, and its memory: the last prototype of each class from stages
before t, clustered into o^u (all of them constants):

    L = L_C + w_P·L_P + w_I·L_I + α·L_S
    L_P = mean_i smoothL1(z_i, g^{y_i}),    L_S = mean_{i: y_i ∈ J} smoothL1(z_i, p^{v(y_i)}),
    L_I = mean_i KL(softmax(z_i/T) ‖ softmax(c_i/T)),  c_i the memory's prototype of y_i, else the o^u nearest to z_i.

Afterwards c^k = mean z of the task's samples of class k, in evaluation mode; they enter the memory when the stage ends
(under a cyclic schedule with the round), overwriting class by class. Server: FedAvg; g^k = unweighted mean of the
round's uploads, a class that nobody uploads keeps its own; p^v = centres of the clusters of {g^k}; J = the ⌊K/2⌋
classes with the fewest samples of all tasks, none if all classes have equally many. In the first round L = L_C.

No code is public and the text leaves α, the clustering and L_I's distributions open; decided here as in fedmlp.md:

- FINCH's first partition for both clusterings, others by ``cluster``; a single cluster of all classes is none (L_S
  would draw every minority class to one point). ``cluster: none`` takes p = the class's own g.
- Smooth-L1 is a mean over dimensions (``proto_reduction``); samples without a target are skipped, not counted.
- KL takes softmax over the dimensions, in the form with logarithms whose gradient is finite (``kl_temp``, ``kl_dir``).
- The clients report the counts of all their tasks before the first round, which tells the server future tasks;
  ``counts: running`` adds up a task's counts when a client first trains on it.
- All weights travel (``share: all``); with ``extractor`` heads stay with their clients and the nearest global prototype
  answers for everybody.
- Prototypes are those of the trained model; ``proto_mode: running`` averages the last local epoch's features while
  the weights move, as FedProto's code does. What a client remembers is neither withheld nor noisy.

What no term that is switched on needs is not sent. With all terms off and ``share: all`` the run is FedAvg's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.errors import ConfigError
from flcore.core.params import Search, param
from flcore.data.imbalance import minority_classes
from flcore.io.messages import Count, Payload, Prototypes, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.alignment import memory_divergence, smooth_l1_to_prototypes
from flcore.math.losses.basic import cross_entropy
from flcore.math.prototypes.clustering import ClusterFunction, cluster_classes, partition_by
from flcore.methods.api import ScoreKind
from flcore.methods.fedavg import FedAvg, aggregate
from flcore.methods.fedper import FedPer
from flcore.methods.kit.class_prototypes import (
    RunningPrototypes,
    fused_prototypes,
    nearest_prototype,
    no_prototypes,
    received_prototypes,
)
from flcore.methods.types import (
    MODEL,
    PROTOTYPES,
    Batch,
    ClientContext,
    Exchange,
    FederationContext,
    LocalModel,
    LossInputs,
    Metrics,
    Predict,
    Replies,
    RoundContext,
    ServerStep,
    TrainedClient,
    folds,
)

REPORT_LEG = "report-counts"

SEMANTIC = Key("semantic", Prototypes)
"""P, the clusters' centres."""

CLUSTERS = Key("clusters", TensorDict)
"""``assignment`` int64 [K], the row of P that is a class's centre; ``minority`` bool [K], J where L_S has a target."""

COUNTS = Key("class_counts", TensorDict)
"""At the server ``classes`` int64 [K], samples of all tasks told so far; in a message ``tasks`` int64 [t, K]."""

EARLIER, NEWEST, STRETCH = Key("earlier", Prototypes), Key("newest", Prototypes), Key("stretch", Count)
"""In a memory: the last prototype of each class from earlier stages; those of the client's last turn, and its stage."""

SEEN = Key("seen", TensorDict)
"""``tasks`` bool [T], those whose counts a client has told the server."""

_PARTS = FedPer(head_from="head")  # what is shared and what is personal with share = extractor


def _half_of_the_classes(classes: int | None, rounds: int) -> int:
    return 5 if classes is None else classes // 2


@dataclass(frozen=True)
class FedMLP(RunningPrototypes, FedAvg):
    """FedAvg whose features are drawn to class prototypes, to their clusters' centres and to the client's own past."""

    name: ClassVar[str] = "fedmlp"
    summary: ClassVar[str] = "multi-level prototypes against forgetting and imbalance on streams of tasks"
    citation: ClassVar[str] = "FedMLP, multi-level prototypes for dynamic heterogeneous FL, arXiv v1"

    use_prototypes: bool = param(True, "L_P, features to the global prototype of their class", switch=True)
    use_memory: bool = param(True, "L_I, features to what the client remembers of their class", switch=True)
    use_semantic: bool = param(True, "L_S, features of minority classes to the centre of their cluster", switch=True)
    weight_prototypes: float = param(
        1.0, "w_P, weight of L_P", low=0, search=Search(0.1, 100.0, log=True, when=lambda m: m.use_prototypes)
    )
    weight_memory: float = param(
        1.0, "w_I, weight of L_I", low=0, search=Search(0.001, 3.0, log=True, when=lambda m: m.use_memory)
    )
    alpha: float = param(
        0.5, "α, weight of L_S", low=0, search=Search(0.01, 10.0, log=True, when=lambda m: m.use_semantic)
    )
    proto_reduction: Literal["mean", "sum"] = param(
        "mean",
        "of L_P and L_S over the feature's dimensions",
        search=Search(choices=("mean", "sum"), when=lambda m: m.draws_to_prototypes or m.draws_to_clusters),
    )
    ls_norm: Literal["samples", "classes"] = param(
        "samples", "L_S as the mean over minority samples, or the sum over minority classes of their means"
    )
    kl_temp: float = param(
        1.0, "temperature T of L_I", above=0, search=Search(0.5, 10.0, log=True, when=lambda m: m.has_state)
    )
    kl_dir: Literal["zc", "cz"] = param(
        "zc",
        "KL(feature ‖ memory), or KL(memory ‖ feature)",
        search=Search(choices=("zc", "cz"), when=lambda m: m.has_state),
    )
    cluster: Literal["finch", "centred", "kmeans", "agglomerative", "none"] = param(
        "finch",
        "clusters of prototypes: FINCH by cosine, likewise after centring, k-means, average linkage, each its own",
        search=Search(
            choices=("finch", "centred", "kmeans", "none"), when=lambda m: m.has_state or m.draws_to_clusters
        ),
    )
    num_clusters: int | None = param(
        None,
        "v of kmeans and agglomerative at the server; null: max(2, round(√K))",
        low=1,
        search=Search(
            2, _half_of_the_classes, when=lambda m: m.cluster in ("kmeans", "agglomerative") and m.draws_to_clusters
        ),
    )
    local_clusters: int | None = param(
        None,
        "u of kmeans and agglomerative in a client's memory; null: max(2, round(√K))",
        low=1,
        search=Search(2, _half_of_the_classes, when=lambda m: m.cluster in ("kmeans", "agglomerative") and m.has_state),
    )
    minority_fraction: float = param(
        0.5,
        "share of the classes that are in the minority",
        low=0,
        high=1,
        search=Search(0.2, 0.6, when=lambda m: m.draws_to_clusters),
    )
    counts: Literal["full", "running"] = param(
        "full", "samples per class that decide on minorities: of all tasks, or of those begun"
    )
    share: Literal["all", "extractor"] = param("all", "what travels: all weights, or all but the head's")
    mask_absent: bool = param(False, "leave classes that the task does not have out of the local softmax")

    @property
    def draws_to_prototypes(self) -> bool:
        """Whether there is L_P."""
        return self.use_prototypes and self.weight_prototypes > 0

    @property
    def has_state(self) -> bool:
        """Whether there is L_I."""
        return self.use_memory and self.weight_memory > 0

    @property
    def draws_to_clusters(self) -> bool:
        """Whether there is L_S."""
        return self.use_semantic and self.alpha > 0

    @property
    def sends_prototypes(self) -> bool:
        """Whether clients send any: with L_I alone only for the record and for the nearest-prototype answer."""
        return self.draws_to_prototypes or self.draws_to_clusters or self.has_state or self.share == "extractor"

    @property
    def can_be_base(self) -> bool:
        """Whether its global model has a head."""
        return self.share == "all"

    @property
    def predicts_from_client_state(self) -> bool:
        """Whether clients answer with heads of their own."""
        return self.share == "extractor"

    def start_server(self, setting: FederationContext) -> Payloads:
        """The initial model, or what is shared of it, and no prototypes yet.

        Raises:
            ConfigError: nothing would be shared.
        """
        shared = setting.initial if self.share == "all" else _PARTS.base(setting.initial)
        if not shared.params:
            raise ConfigError("method.share = extractor: this model has no layers below its head")
        return {MODEL: shared, **(no_prototypes(setting) if self.sends_prototypes else {})}

    def round_exchanges(self, round_number: int, setting: FederationContext) -> tuple[Exchange, ...]:
        """Local training; before that of the first round perhaps the report of all clients' counts."""
        phases = self.phases()
        if not self.draws_to_clusters or self.counts == "running":
            return (Exchange(phases=phases, server_steps=tuple(self.server_steps())),)
        told, *others = self.server_steps()
        report, training = (
            Exchange(REPORT_LEG, "all", phases=(), server_steps=(told,)),
            Exchange(phases=phases, server_steps=tuple(others)),
        )
        return (report, training) if round_number == 1 else (training,)

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The shared weights, G, P, the classes' clusters and J, as far as a term needs them; nothing for a report."""
        if ctx.exchange == REPORT_LEG:
            return {}
        names: list[str] = [MODEL]
        if self.draws_to_prototypes:
            names.append(PROTOTYPES)
        if self.draws_to_clusters:
            names += [SEMANTIC, CLUSTERS]
        return server.only(*names)

    def initial_weights(self, ctx: ClientContext) -> Weights:
        """The received model, with ``extractor`` under the client's own head."""
        if self.share == "all" or MODEL not in ctx.received:
            return super().initial_weights(ctx)
        return _PARTS.whole(ctx.received[MODEL], ctx.client_state, ctx.setting)

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        """G from the second round on, P once there is one, the memory from the second stage on."""
        inputs: dict[str, LossInputs | Tensor] = {}
        if self.mask_absent:
            inputs["held"] = (ctx.class_counts > 0).to(ctx.setting.device)
        if self.draws_to_prototypes and ctx.rounds_done > 0:
            inputs["prototypes"] = received_prototypes(ctx)
        if self.draws_to_clusters and CLUSTERS in ctx.received:
            clusters, centres = ctx.received[CLUSTERS], ctx.received[SEMANTIC].means
            inputs["semantic"] = {"means": centres[clusters["assignment"]], "present": clusters["minority"]}
        if self.has_state and ctx.task_visit > 0:
            inputs["memory"] = self.remembered(ctx)
        return inputs

    def remembered(self, ctx: ClientContext) -> LossInputs:
        """The prototypes of earlier stages, and O_m, the centres of their clusters."""
        client_state = recall(ctx)
        means, present = client_state.means.cpu(), client_state.present.cpu()
        found = cluster_classes(means, present, self.partition(self.local_clusters, ctx, "fedmlp local clusters"))
        arrays = {"means": means, "present": present, "centres": found.centres, "centres_present": found.present}
        return {name: tensor.to(ctx.setting.device) for name, tensor in arrays.items()}

    def partition(self, asked: int | None, ctx: RoundContext, purpose: str) -> ClusterFunction:
        """What clusters points [n, d]: into as many clusters as asked for, or the default, where the number is free."""
        number = asked or max(2, round(math.sqrt(ctx.setting.num_classes)))
        return partition_by(self.cluster, number, ctx.numpy_stream(purpose))

    def loss(self, model: LocalModel, batch: Batch, inputs: LossInputs) -> dict[str, Tensor]:
        """L_C, w_P·L_P, w_I·L_I and α·L_S; a term without weight or before it has a target is left out."""
        features, labels, weight = model.features(batch.images), batch.labels, batch.weight
        model.note(features)
        logits = model.classify(features)
        if self.mask_absent:
            logits = without_classes(logits, ~inputs["held"])
        terms = {"cross_entropy": cross_entropy(logits, labels, weight)}
        if "prototypes" in inputs:
            distance = smooth_l1_to_prototypes(
                features, labels, **inputs["prototypes"], reduction=self.proto_reduction, weight=weight
            )
            terms["prototypes"] = self.weight_prototypes * distance
        if "memory" in inputs:
            divergence = memory_divergence(
                features, labels, **inputs["memory"], temperature=self.kl_temp, direction=self.kl_dir, weight=weight
            )
            terms["memory"] = self.weight_memory * divergence
        if "semantic" in inputs:
            terms["semantic"] = self.alpha * self.minority_distance(features, labels, weight, **inputs["semantic"])
        return terms

    def minority_distance(
        self, features: Tensor, labels: Tensor, weight: Tensor | None, means: Tensor, present: Tensor
    ) -> Tensor:
        """L_S: ``means`` [K, d] are the centres of the classes' clusters, ``present`` bool [K] is J."""
        distance = partial(smooth_l1_to_prototypes, features, labels, means, present, reduction=self.proto_reduction)
        if self.ls_norm == "samples":
            return distance(weight=weight)
        real = features.new_ones(len(labels)) if weight is None else weight
        same = (labels.unsqueeze(1) == labels).to(real.dtype) * real
        # Shares of a sample in its class add up to 1 per class, so the weighted mean is one over classes.
        shares = real / same.sum(1).clamp_min(1)
        return distance(weight=shares) * (shares * present[labels]).sum()

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The shared weights with n_k, the prototypes of the task's classes and perhaps their counts.

        The client remembers its prototypes of earlier stages, those of this one aside, and its head if that is its own.
        """
        if ctx.exchange == REPORT_LEG:
            return {COUNTS: TensorDict({"tasks": ctx.task_counts})}, ctx.client_state
        sent, kept = super().reply(ctx, trained) if self.share == "all" else _PARTS.reply(ctx, trained)
        message: dict[str, Payload] = {**sent}
        client_state: dict[str, Payload] = {**kept}
        if self.sends_prototypes:
            own = self.made_prototypes(ctx, trained)
            message[PROTOTYPES] = self.release(ctx, own, ctx.class_counts)
            if self.has_state:
                client_state |= {EARLIER: recall(ctx), NEWEST: own, STRETCH: Count(ctx.task_visit)}
        if self.draws_to_clusters and self.counts == "running":
            task, seen = ctx.task or 0, torch.zeros(len(ctx.task_counts), dtype=torch.bool)
            if SEEN in ctx.client_state:
                seen = ctx.client_state[SEEN]["tasks"].cpu()
            if not seen[task]:
                message[COUNTS] = TensorDict({"tasks": ctx.task_counts[task : task + 1]})
            client_state[SEEN] = TensorDict({"tasks": seen | (torch.arange(len(seen)) == task)})
        return message, client_state

    def server_steps(self) -> Mapping[str, ServerStep]:
        """The sum of the counts, the average of the weights, G, and P with J, as far as a term needs them."""
        stages: dict[str, ServerStep] = {"count-classes": count_classes} if self.draws_to_clusters else {}
        stages["aggregate"] = aggregate
        if self.sends_prototypes:
            stages["aggregate-prototypes"] = aggregate_local_prototypes
        if self.draws_to_clusters:
            stages["cluster-prototypes"] = self.cluster_prototypes
        return stages

    def cluster_prototypes(self, server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
        """P ← centres of the clusters of {g^k}, and J as far as its classes have a cluster."""
        prototypes, partition = server[PROTOTYPES], self.partition(self.num_clusters, ctx, "fedmlp clusters")
        found = cluster_classes(prototypes.means, prototypes.present, partition)
        few = torch.zeros_like(prototypes.present)
        few[list(minority_classes(server[COUNTS]["classes"].numpy(), self.minority_fraction))] = True
        apart = found.count > 1
        pulled = few & prototypes.present & apart
        after: Payloads = {
            SEMANTIC: Prototypes(found.centres * apart, found.present & apart),
            CLUSTERS: TensorDict({"assignment": found.assignment, "minority": pulled}),
        }
        return server | after, {"clusters": found.count, "minority_classes": int(few.sum())}

    def scoring_message(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The model, or the current extractor; the prototypes where a client answers with them too."""
        message = super().scoring_message(server, client, ctx)
        return {**message, **server.only(PROTOTYPES)} if self.share == "all" else message

    def client_model(self, received: Record, client_state: Record, setting: FederationContext) -> Weights | None:
        """With ``extractor`` the current extractor under the client's own head; else the global model."""
        if self.share == "all":
            return super().client_model(received, client_state, setting)
        return _PARTS.client_model(received, client_state, setting)

    @property
    def score_kind(self) -> ScoreKind:
        """Logits; with ``extractor`` distances answer for everybody."""
        return "ranks" if self.share == "extractor" else super().score_kind

    def predict(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """Logits; with ``extractor``, for everybody, minus the distance to each global prototype."""
        if self.share == "extractor" and classes is None:
            return nearest_prototype(model, images, known, classes)
        return super().predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, Predict]:
        """The other of heads and nearest prototypes."""
        if self.share == "extractor":
            return {"averaged_heads": super().predict}
        return {"nearest_prototype": nearest_prototype} if self.sends_prototypes else {}


def recall(ctx: ClientContext) -> Prototypes:
    """A client's last prototype of each class from the stages before this one.

    What it computed in the stage of its last turn stands aside until that stage is over, and then overwrites what it
    had, class by class.
    """
    setting, client_state = ctx.setting, ctx.client_state
    if NEWEST not in client_state:
        return Prototypes.empty(setting.num_classes, setting.feature_dim)
    earlier, newest = client_state[EARLIER], client_state[NEWEST]
    if client_state[STRETCH].value == ctx.task_visit:
        return earlier
    means = torch.where(newest.present.unsqueeze(1), newest.means, earlier.means)
    return Prototypes(means, earlier.present | newest.present)


def count_classes(server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
    """Server stage: samples per class of all tasks told so far."""
    none = torch.zeros(ctx.setting.num_classes, dtype=torch.int64)
    before = server[COUNTS]["classes"] if COUNTS in server else none
    total = sum((told["tasks"].sum(0) for told in replies.of(COUNTS).values()), before)
    return server | {COUNTS: TensorDict({"classes": total})}, {}


@folds("prototypes")
def aggregate_local_prototypes(server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
    """g^k ← mean of c^k over the clients that uploaded class k.

    Facts: how many classes have one; mean and largest norm of the *uploads*, among which a client whose features grow
    without bound shows, as it does not in g.
    """
    after, found = fused_prototypes(server, replies, ctx)
    facts = {"classes_known": float(after[PROTOTYPES].present.sum()), **found}
    sent = [upload.means[upload.present] for upload in replies.of(PROTOTYPES).values()]
    norms = torch.cat(sent).double().norm(dim=1)
    if len(norms):
        facts |= {"prototype_norm_mean": float(norms.mean()), "prototype_norm_max": float(norms.max())}
    return after, facts


def without_classes(logits: Tensor, absent: Tensor) -> Tensor:
    """Logits [B, K] whose softmax has probability 0 at classes that are absent, bool [K].

    Finite, so that padding, whose label may be absent, has a finite loss.
    """
    return logits.masked_fill(absent, torch.finfo(logits.dtype).min / 2)
