"""FedMLP (arXiv preprint, first version): prototypes of classes and of their clusters, for clients with task streams.

Client, at visit t of its stream, with the feature z, the classifier's cross-entropy L_C, the global prototypes g^k,
their clusters' centres p^v, the minority classes J, and its memory: the last prototype of each class from visits before
t, clustered into o^u (all of them constants):

    L = L_C + w_P·L_P + w_I·L_I + α·L_S
    L_P = mean_i smoothL1(z_i, g^{y_i}),    L_S = mean_{i: y_i ∈ J} smoothL1(z_i, p^{v(y_i)}),
    L_I = mean_i KL(softmax(z_i/T) ‖ softmax(c_i/T)),  c_i the memory's prototype of y_i, else the o^u nearest to z_i.

Afterwards c^k = mean z of the task's samples of class k, in evaluation mode; they enter the memory when the visit ends
(under a cyclic schedule with the round), overwriting class by class. Server: FedAvg; g^k = unweighted mean of the
round's uploads, other classes keep theirs; p^v = centres of the clusters of {g^k}; J = the ⌊K/2⌋ classes with the
fewest samples of all tasks, none if all classes have equally many. In the first round L = L_C.

No code is public and the text leaves α, the clustering and L_I's distributions open (fedmlp.md, section 7). Decided:

- FINCH's first partition for both clusterings; a single cluster of all classes counts as none (L_S would draw every
  minority class to one point). ``cluster: none`` takes p = the class's own g.
- Samples without a target are skipped, not counted.
- Clients report the counts of all their tasks before the first round, so the server knows future tasks;
  ``counts: running`` adds up a task's counts when a client first trains on it.
- All weights travel (``share: all``); with ``extractor`` heads stay with their clients and the nearest global prototype
  is the global prediction.
- A client's memory is neither withheld nor noisy.

Only payloads of active terms are sent. With all terms off and ``share: all`` the run is FedAvg's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flcore.core.errors import ConfigError
from flcore.core.params import Search, param
from flcore.data.imbalance import minority_classes
from flcore.io.messages import Count, Prototypes, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.alignment import memory_divergence, smooth_l1_to_prototypes
from flcore.math.losses.basic import cross_entropy
from flcore.math.prototypes.clustering import ClusterFunction, cluster_classes, partition_by
from flcore.methods import types as fl
from flcore.methods.api import ScoreKind
from flcore.methods.fedavg import FedAvg, aggregate
from flcore.methods.fedper import FedPer
from flcore.methods.kit import class_prototypes

REPORT_LEG = "report-counts"

SEMANTIC = Key("semantic", Prototypes)
"""P, the clusters' centres."""

CLUSTERS = Key("clusters", TensorDict)
"""``assignment`` int64 [K], the row of P with a class's centre; ``minority`` bool [K], J where L_S has a target."""

COUNTS = Key("class_counts", TensorDict)
"""At the server ``classes`` int64 [K], samples of all tasks reported so far; in a message ``tasks`` int64 [t, K]."""

EARLIER, NEWEST, VISIT = Key("earlier", Prototypes), Key("newest", Prototypes), Key("stretch", Count)
"""In a client's state: last prototypes of each class from earlier visits; prototypes and visit of its last turn."""

SEEN = Key("seen", TensorDict)
"""``tasks`` bool [T], those with counts that a client has reported."""

_PARTS = FedPer(head_from="head")  # the shared and personal parts with share = extractor

_SIZED = ("kmeans", "agglomerative")


def _half_of_the_classes(classes: int | None, rounds: int) -> int:
    return 5 if classes is None else classes // 2


@dataclass(frozen=True)
class FedMLP(
    class_prototypes.RunningPrototypes,
    FedAvg,
    name="fedmlp",
    citation="FedMLP, multi-level prototypes for dynamic heterogeneous FL, arXiv v1",
):
    """Multi-level prototypes against forgetting and imbalance on streams of tasks."""

    use_prototypes: bool = param(True, "L_P, features to the global prototype of their class", switch=True)
    use_memory: bool = param(True, "L_I, features to the client's memory of their class", switch=True)
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
        "zc", "KL(feature ‖ memory), or the other way", search=Search(choices=("zc", "cz"), when=lambda m: m.has_state)
    )
    cluster: Literal["finch", "centred", "kmeans", "agglomerative", "none"] = param(
        "finch",
        "clusters of prototypes: FINCH by cosine, likewise after centring, k-means, average linkage, each its own",
        search=Search(choices=("finch", "centred", "kmeans", "none"), when=lambda m: m.clusters_prototypes),
    )
    num_clusters: int | None = param(
        None,
        "v of kmeans and agglomerative at the server; null: max(2, round(√K))",
        low=1,
        search=Search(2, _half_of_the_classes, when=lambda m: m.cluster in _SIZED and m.draws_to_clusters),
    )
    local_clusters: int | None = param(
        None,
        "u of kmeans and agglomerative in a client's memory; null: max(2, round(√K))",
        low=1,
        search=Search(2, _half_of_the_classes, when=lambda m: m.cluster in _SIZED and m.has_state),
    )
    minority_fraction: float = param(
        0.5, "share of minority classes", low=0, high=1, search=Search(0.2, 0.6, when=lambda m: m.draws_to_clusters)
    )
    counts: Literal["full", "running"] = param("full", "samples that decide on minorities: of all tasks, or begun ones")
    share: Literal["all", "extractor"] = param("all", "what travels: all weights, or all but the head's")
    mask_absent: bool = param(False, "leave classes that the task does not have out of the local softmax")

    @property
    def draws_to_prototypes(self) -> bool:
        return self.use_prototypes and self.weight_prototypes > 0

    @property
    def has_state(self) -> bool:
        return self.use_memory and self.weight_memory > 0

    @property
    def draws_to_clusters(self) -> bool:
        return self.use_semantic and self.alpha > 0

    @property
    def clusters_prototypes(self) -> bool:
        return self.has_state or self.draws_to_clusters

    @property
    def sends_prototypes(self) -> bool:
        return self.draws_to_prototypes or self.clusters_prototypes or self.share == "extractor"

    @property
    def can_be_base(self) -> bool:
        return self.share == "all"

    @property
    def predicts_from_client_state(self) -> bool:
        return self.share == "extractor"

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        shared = setting.initial if self.share == "all" else _PARTS.base(setting.initial)
        if not shared.params:
            raise ConfigError("method.share = extractor: this model has no layers below its head")
        return {fl.MODEL: shared, **(class_prototypes.no_prototypes(setting) if self.sends_prototypes else {})}

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        phases = self.phases()
        if not self.draws_to_clusters or self.counts == "running":
            return (fl.Exchange(phases=phases, server_steps=tuple(self.server_steps())),)
        counting, *others = self.server_steps()
        training = fl.Exchange(phases=phases, server_steps=tuple(others))
        report = fl.Exchange(REPORT_LEG, "all", phases=(), server_steps=(counting,))
        return (report, training) if round_number == 1 else (training,)

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        if ctx.exchange == REPORT_LEG:
            return {}
        prototypes = (fl.PROTOTYPES,) if self.draws_to_prototypes else ()
        return server.only(fl.MODEL, *prototypes, SEMANTIC, CLUSTERS)

    def initial_weights(self, ctx: fl.ClientContext) -> Weights:
        if self.share == "all" or fl.MODEL not in ctx.received:
            return super().initial_weights(ctx)
        return _PARTS.whole(ctx.received[fl.MODEL], ctx.client_state, ctx.setting)

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        """Return G from the second round on, P once there is one, the memory from the second visit on."""
        inputs: dict[str, fl.LossInputs | Tensor] = {}
        if self.mask_absent:
            inputs["held"] = (ctx.class_counts > 0).to(ctx.setting.device)
        if self.draws_to_prototypes and ctx.rounds_done > 0:
            inputs["prototypes"] = class_prototypes.received_prototypes(ctx)
        if self.draws_to_clusters and CLUSTERS in ctx.received:
            clusters, centres = ctx.received[CLUSTERS], ctx.received[SEMANTIC].means
            inputs["semantic"] = {"means": centres[clusters["assignment"]], "present": clusters["minority"]}
        if self.has_state and ctx.task_visit > 0:
            inputs["memory"] = self.remembered(ctx)
        return inputs

    def remembered(self, ctx: fl.ClientContext) -> fl.LossInputs:
        """Return the prototypes of earlier visits, and O_m, the centres of their clusters."""
        earlier = recall(ctx)
        means, present = earlier.means.cpu(), earlier.present.cpu()
        clusters = cluster_classes(means, present, self.partition(self.local_clusters, ctx, "fedmlp local clusters"))
        arrays = {"means": means, "present": present, "centres": clusters.centres, "centres_present": clusters.present}
        return {name: tensor.to(ctx.setting.device) for name, tensor in arrays.items()}

    def partition(self, number: int | None, ctx: fl.RoundContext, purpose: str) -> ClusterFunction:
        """Return a clustering of points [n, d] into `number` clusters, or the default number."""
        number = number or max(2, round(math.sqrt(ctx.setting.num_classes)))
        return partition_by(self.cluster, number, ctx.numpy_stream(purpose))

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        features, labels, weight = model.features(batch.images), batch.labels, batch.weight
        model.record_features(features)
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
        """Return L_S: ``means`` [K, d] are the centres of the classes' clusters, ``present`` bool [K] is J."""
        distance = partial(smooth_l1_to_prototypes, features, labels, means, present, reduction=self.proto_reduction)
        if self.ls_norm == "samples":
            return distance(weight=weight)
        real = features.new_ones(len(labels)) if weight is None else weight
        same = (labels.unsqueeze(1) == labels).to(real.dtype) * real
        # Shares of a sample in its class add up to 1 per class, so the weighted mean is one over classes.
        shares = real / same.sum(1).clamp_min(1)
        return distance(weight=shares) * (shares * present[labels]).sum()

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        if ctx.exchange == REPORT_LEG:
            return {COUNTS: TensorDict({"tasks": ctx.task_counts})}, ctx.client_state
        sent, state = super().reply(ctx, trained) if self.share == "all" else _PARTS.reply(ctx, trained)
        message, client_state = {**sent}, {**state}
        if self.sends_prototypes:
            own = self.made_prototypes(ctx, trained)
            message[fl.PROTOTYPES] = self.release(ctx, own, ctx.class_counts)
            if self.has_state:
                client_state |= {EARLIER: recall(ctx), NEWEST: own, VISIT: Count(ctx.task_visit)}
        if self.draws_to_clusters and self.counts == "running":
            none = TensorDict({"tasks": torch.zeros(len(ctx.task_counts), dtype=torch.bool)})
            task, seen = ctx.task or 0, ctx.client_state.get(SEEN, none)["tasks"].cpu()
            if not seen[task]:
                message[COUNTS] = TensorDict({"tasks": ctx.task_counts[task : task + 1]})
            client_state[SEEN] = TensorDict({"tasks": seen | (torch.arange(len(seen)) == task)})
        return message, client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        steps: dict[str, fl.ServerStep] = {"count-classes": count_classes} if self.draws_to_clusters else {}
        steps["aggregate"] = aggregate
        if self.sends_prototypes:
            steps["aggregate-prototypes"] = aggregate_local_prototypes
        if self.draws_to_clusters:
            steps["cluster-prototypes"] = self.cluster_prototypes
        return steps

    def cluster_prototypes(
        self, server: Record, replies: fl.Replies, ctx: fl.RoundContext
    ) -> tuple[Record, fl.Metrics]:
        """Cluster {g^k}: P are the centres, J the minority classes with a cluster."""
        prototypes, partition = server[fl.PROTOTYPES], self.partition(self.num_clusters, ctx, "fedmlp clusters")
        clusters = cluster_classes(prototypes.means, prototypes.present, partition)
        few = torch.zeros_like(prototypes.present)
        few[list(minority_classes(server[COUNTS]["classes"].numpy(), self.minority_fraction))] = True
        several = clusters.count > 1
        pulled = few & prototypes.present & several
        after: Payloads = {
            SEMANTIC: Prototypes(clusters.centres * several, clusters.present & several),
            CLUSTERS: TensorDict({"assignment": clusters.assignment, "minority": pulled}),
        }
        return server | after, {"clusters": clusters.count, "minority_classes": int(few.sum())}

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        message = super().scoring_message(server, client, ctx)
        return {**message, **server.only(fl.PROTOTYPES)} if self.share == "all" else message

    def client_model(self, received: Record, client_state: Record, setting: fl.FederationContext) -> Weights | None:
        if self.share == "all":
            return super().client_model(received, client_state, setting)
        return _PARTS.client_model(received, client_state, setting)

    @property
    def score_kind(self) -> ScoreKind:
        return "ranks" if self.share == "extractor" else super().score_kind

    def predict(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        if self.share == "extractor" and classes is None:
            return class_prototypes.nearest_prototype(model, images, known, classes)
        return super().predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, fl.Predict]:
        if self.share == "extractor":
            return {"averaged_heads": super().predict}
        return {"nearest_prototype": class_prototypes.nearest_prototype} if self.sends_prototypes else {}


def recall(ctx: fl.ClientContext) -> Prototypes:
    """Return a client's last prototype of each class from earlier visits.

    Prototypes of the visit of its last turn replace older ones, class by class, once that visit is over.
    """
    setting, client_state = ctx.setting, ctx.client_state
    if NEWEST not in client_state:
        return Prototypes.empty(setting.num_classes, setting.feature_dim)
    earlier, newest = client_state[EARLIER], client_state[NEWEST]
    if client_state[VISIT].value == ctx.task_visit:
        return earlier
    means = torch.where(newest.present.unsqueeze(1), newest.means, earlier.means)
    return Prototypes(means, earlier.present | newest.present)


def count_classes(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Add the reported samples per class of all tasks."""
    none = TensorDict({"classes": torch.zeros(ctx.setting.num_classes, dtype=torch.int64)})
    before = server.get(COUNTS, none)["classes"]
    total = sum((reported["tasks"].sum(0) for reported in replies.of(COUNTS).values()), before)
    return server | {COUNTS: TensorDict({"classes": total})}, {}


@fl.aggregates("prototypes")
def aggregate_local_prototypes(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Compute g^k, the mean of c^k over the clients that uploaded class k.

    Metrics: classes with a prototype; mean and largest norm of the *uploads*, which may grow without bound.
    """
    after, facts = class_prototypes.fused_prototypes(server, replies, ctx)
    facts = {"classes_known": float(after[fl.PROTOTYPES].present.sum()), **facts}
    sent = [upload.means[upload.present] for upload in replies.of(fl.PROTOTYPES).values()]
    norms = torch.cat(sent).double().norm(dim=1)
    if len(norms):
        facts |= {"prototype_norm_mean": float(norms.mean()), "prototype_norm_max": float(norms.max())}
    return after, facts


def without_classes(logits: Tensor, absent: Tensor) -> Tensor:
    """Return logits [B, K], finite, with probability 0 at ``absent`` classes, bool [K]."""
    return logits.masked_fill(absent, torch.finfo(logits.dtype).min / 2)
