"""FedCSPC (Qi, Meng, Chen, Hu, Lin, Meng, ACM MM 2023): the server calibrates the averaged head on clients' prototypes.

E is the encoder, f = E(x) [e], H the projection, z = H(f) [d], F the head. A base method trains, averages and travels
as it always does; these additions each have a switch:

* CPM. After training a client groups the f of each of its classes by k-means and sends, per cluster, ``n_repeat`` means
  of random subsets (share ``ratio``, without replacement; Eq. 6 and 7). Off (TPG): one mean per class.
* Server, *gather-prototypes*: u_g^c = plain mean of all prototypes of class c; a class without any keeps its last.
* LRL, from the second round on (Eq. 2 to 5): base loss + κ·(w_N L_N + w_A L_A + w_E L_E), L_N the cross-entropy of
  cos(f, u_g)/τ_l, L_A and L_E smooth-L1 between the angles and distances of f and those among the u_g of their labels.
* CA. Server, *calibrate* (Eq. 9, 10, 16): SGD on H and F alone, from the averaged ones, over the prototypes u:

      CE(F(H(u)), y) + η·(L_WCL + L_ACL),

  L_WCL the contrast of H(u) with weight 1 for pairs of one class and two clients or of two classes and one client, 0.5
  for the rest.
* PA, inside it: L_ACL = max(0, ‖H(u_i) − H(u⁺)‖ − ‖H(u_i) − H(u⁻)‖ + α), mean over anchors and ``n_aug`` draws, with
  u⁺ = u_j + λ_u (u_j − u_i), u⁻ = u_i + λ_u (u_k − u_i), j ≠ i of the same class and k of another, of the same client.
* KP. Server, *build-exemplars*: e_c = mean of H(u) over the prototypes of class c that the head gets right, or over all
  if it gets none right. Predictions mix the head's with the similarities to exemplars,

      (1 − λ_p)·softmax(F(z)) + λ_p·softmax(cos(z, e)/0.5).

Choices and deviations: fedcspc.md, sections 4, 5 and 7.

The server keeps the base's average and the calibrated H and F. The latter predict, and unless ``feedback`` is off they
are sent to the clients of the next round; the base compares the replies with the model that was sent. Exemplars stay at
the server: a client's own model predicts without them. CA refuses a model without a projection, which would leave both
contrasts without gradient; alignment and exemplars take f for z there.

``aux_ce`` (authors' code, not in the paper): clients add the cross-entropy of one more linear classifier, on f.

``norm_match`` (ours, section 11): every client also sends the mean ‖E(x)‖ of its samples under the received model;
calibration and exemplars see the prototypes times (mean of these over samples)/(mean ‖u‖), metric ``norm_factor``. E
lags a round: in round 1 it is the initial one.

Privacy: prototypes of small clusters are nearly single features. ``min_count`` is the least number of samples in one;
``proto_clip`` and ``proto_noise`` hide all of a client's samples in them. The number and classes of prototypes, and all
other messages, are not protected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flcore.core.errors import ConfigError
from flcore.core.optim import Sgd
from flcore.core.params import Search, param
from flcore.core.schedules import exponential
from flcore.io.messages import Payload, Prototypes, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record, on_device
from flcore.math.losses.alignment import angle_loss, edge_loss, extrapolate, triplet_hinge
from flcore.math.losses.basic import cross_entropy, weighted_mean
from flcore.math.losses.contrastive import contrastive_terms, prototype_contrast, source_weights
from flcore.math.prototypes.class_means import best_means, class_means, fuse, similarities
from flcore.math.prototypes.clustering import Drawn, Partners, cluster_prototypes
from flcore.methods import types as fl
from flcore.methods.api import ScoreKind
from flcore.methods.fedavg import sample_counts
from flcore.methods.kit.class_prototypes import ReleasesVectors
from flcore.methods.kit.on_top import WrapperMethod
from flcore.methods.kit.preset import AuthorsPreset
from flcore.methods.kit.server_training import Moving, Terms, fit, leaves
from flcore.models.network import EncodedOnce, Network, ParamDict, WithLayers

CLUSTER_PROTOTYPES = Key("cluster_prototypes", TensorDict)
"""A client's q prototypes: ``vectors`` float32 [q, e] and ``labels`` int64 [q]."""

ENCODER_NORM = Key("encoder_norm", TensorDict)
"""``mean`` float32 [1]: mean ‖E(x)‖ over a client's samples, E of the model it received."""

ENCODER_PROTOTYPES = Key("encoder_prototypes", Prototypes)
"""u_g [K, e]."""

POOL = Key("prototype_pool", TensorDict)
"""Prototypes of all clients: ``vectors`` float32 [n, e], ``labels`` and ``sources`` (client ids) int64 [n]."""

CALIBRATED = Key("calibrated", Weights)
"""H and F from the last calibration."""

EXEMPLARS = Key("exemplars", Prototypes)
"""e_c [K, d]."""

PARTS = ("projection.", "head.")
"""Prefixes of H and F."""

AUXILIARY = "auxiliary"
"""Extra layer of ``aux_ce``."""

ANGLE_ROWS = 32
"""Samples of a mini-batch in L_A; its triples grow with the cube."""


@dataclass(frozen=True)
class FedCSPC(AuthorsPreset, ReleasesVectors, WrapperMethod, name="fedcspc", citation="Qi et al., ACM MM 2023"):
    """Clustered prototypes go up, the server calibrates the averaged head on them; plugs on a base."""

    AUTHORS: ClassVar[Mapping[str, Any]] = {
        "clusters": 1,
        "ratio": 0.8,
        "few": 5,
        "keep_stale": True,
        "aux_ce": True,
        "kappa": 0.5,
        "w_angle": 0.0,
        "w_edge": 0.0,
        "angle_mode": "all",
        "tau_g": 0.07,
        "n_aug": 1,
        "fusion": "authors",
        "lambda_p": 0.9,
    }

    use_lrl: bool = param(True, "align features with the global prototypes at the clients (LRL)", switch=True)
    use_cpm: bool = param(True, "send several prototypes of clusters (CPM); off: one mean per class (TPG)", switch=True)
    use_ca: bool = param(True, "calibrate projection and head at the server (CA)", switch=True)
    use_pa: bool = param(True, "mixed prototypes in the calibration (PA, L_ACL)", switch=True)
    use_kp: bool = param(True, "answer with the similarities to exemplars too (KP)", switch=True)
    feedback: bool = param(True, "send the calibrated model to the clients; off: the average", switch=True)
    keep_stale: bool = param(False, "also use the last prototypes of clients absent from the round", switch=True)
    aux_ce: bool = param(False, "train a linear classifier of f at the clients too (authors' code)", switch=True)
    norm_match: bool = param(False, "rescale prototypes to the global model's features (not in the paper)", switch=True)

    clusters: int = param(
        4, "K_c, clusters per class of a client", low=1, search=Search(1, 8, when=lambda m: m.clusters_features)
    )
    n_repeat: int = param(
        5, "prototypes per cluster", low=1, search=Search(1, 16, log=True, when=lambda m: m.clusters_features)
    )
    ratio: float = param(
        0.5, "r, share of cluster drawn", above=0, high=1, search=Search(0.2, 1.0, when=lambda m: m.clusters_features)
    )
    few: int = param(0, "a class of fewer samples sends its mean alone (code: 5)", low=0)
    min_cluster: int = param(1, "smaller clusters join the nearest one", low=1)
    min_count: int = param(1, "samples of a prototype, at least; else clusters join, or nothing is sent", low=0)

    kappa: float = param(
        0.1, "κ, weight of the alignment", low=0, search=Search(0.005, 1.0, log=True, when=lambda m: m.use_lrl)
    )
    w_node: float = param(
        1.0, "w_N, weight of the similarities to prototypes", low=0, search=Search(0, 1, when=lambda m: m.weighs)
    )
    w_angle: float = param(1.0, "w_A, weight of the angles", low=0, search=Search(0, 1, when=lambda m: m.weighs))
    w_edge: float = param(1.0, "w_E, weight of the distances", low=0, search=Search(0, 1, when=lambda m: m.weighs))
    tau_l: float = param(
        0.5, "temperature τ_l", above=0, search=Search(0.05, 1.0, log=True, when=lambda m: m.weighs and m.w_node > 0)
    )
    angle_mode: Literal["distinct", "all"] = param(
        "distinct",
        "triples in L_A: of three labels, or all as in the authors' code",
        search=Search(choices=("distinct", "all"), when=lambda m: m.weighs and m.w_angle > 0),
    )
    edge_same: bool = param(True, "L_E also compares samples of equal labels (distance 0)")
    edge_relative: bool = param(True, "L_E compares distances divided by their mean; off: as they are (Eq. 5)")

    eta: float = param(
        0.1, "η, weight of both contrasts", low=0, search=Search(0.005, 1.0, log=True, when=lambda m: m.calibrates)
    )
    tau_g: float = param(
        0.5, "τ_g, temperature of L_WCL", above=0, search=Search(0.05, 1.0, log=True, when=lambda m: m.contrasts)
    )
    contrast: Literal["batch", "full"] = param(
        "batch", "L_WCL compares a prototype with its mini-batch, or with all (small sets)"
    )
    n_aug: int = param(
        5, "mixed partners per prototype and visit", low=1, search=Search(1, 9, when=lambda m: m.contrasts and m.use_pa)
    )
    lambda_u: float = param(
        0.5, "λ_u, strength of the mixing", low=0, search=Search(0.05, 0.7, when=lambda m: m.contrasts and m.use_pa)
    )
    alpha: float = param(
        1.0, "α, margin of L_ACL", low=0, search=Search(0.1, 3.0, when=lambda m: m.contrasts and m.use_pa)
    )
    cal_epochs: int = param(
        100, "passes over the prototypes in a calibration", low=0, search=Search(10, 200, when=lambda m: m.use_ca)
    )
    cal_batch: int = param(
        100, "calibration's batch size", low=1, search=Search(32, 256, log=True, when=lambda m: m.calibrates)
    )
    cal_lr: float = param(
        0.1, "calibration's initial rate", above=0, search=Search(1e-3, 0.3, log=True, when=lambda m: m.calibrates)
    )
    cal_lr_schedule: Literal["rounds", "constant"] = param(
        "rounds", "rounds: cal_lr, a tenth of it after 6 rounds, a hundredth after 41; constant: always cal_lr"
    )
    cal_decay_every: int = param(30, "epochs of a calibration after which its rate falls to a tenth", low=1)
    cal_weight_decay: float = param(1e-5, "weight decay of the calibration", low=0)

    lambda_p: float = param(
        0.5, "λ_p, share of the exemplars in an answer", low=0, high=1, search=Search(0, 0.9, when=lambda m: m.use_kp)
    )
    tau_e: float = param(0.5, "temperature of the similarities to exemplars", above=0)
    fusion: Literal["softmax", "minmax", "authors"] = param(
        "softmax",
        "mix probabilities, values scaled to [0, 1], or (authors) logits and exponentials of similarities",
        search=Search(choices=("softmax", "minmax", "authors"), when=lambda m: m.use_kp and m.lambda_p > 0),
    )

    def __post_init__(self) -> None:
        """Refuse two accounts of one message, and a model where the base sends differences."""
        super().__post_init__()
        for name, needed in {"feedback": self.feedback and self.use_ca, "norm_match": self.rescales}.items():
            if needed and not self.base_method.broadcasts_model:
                raise ValueError(f"{name} = true: {self.base} sends differences of its model; set method.{name}=false")
        if self.proto_noise > 0 and self.base_method.privacy(1) is not None:
            raise ValueError(
                f"proto_noise = {self.proto_noise}: {self.base} adds noise to prototypes too; there is no account of "
                "both, set one of them to 0"
            )

    @property
    def aligns(self) -> bool:
        return self.weighs and (self.w_node > 0 or self.w_angle > 0 or self.w_edge > 0)

    @property
    def weighs(self) -> bool:
        return self.use_lrl and self.kappa > 0

    @property
    def sends_prototypes(self) -> bool:
        return self.aligns or self.use_ca or self.use_kp

    @property
    def clusters_features(self) -> bool:
        return self.sends_prototypes and self.use_cpm

    @property
    def calibrates(self) -> bool:
        return self.use_ca and self.cal_epochs > 0

    @property
    def contrasts(self) -> bool:
        return self.calibrates and self.eta > 0

    @property
    def rescales(self) -> bool:
        return self.norm_match and (self.use_ca or self.use_kp)

    @property
    def mixes(self) -> bool:
        return self.use_pa and self.eta > 0

    @property
    def smallest_cluster(self) -> int:
        """Members that a cluster needs for prototypes of ``min_count`` samples."""
        if self.min_count <= 1 or not self.use_cpm:
            return max(1, self.min_count)
        return math.ceil((self.min_count - 1e-9) / self.ratio)

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        if self.use_ca and not any(name.startswith("projection.") for name in setting.initial.params):
            raise ConfigError(
                "method.use_ca = true: the model has no projection to calibrate; choose one that has "
                "(model.name=fedcspc_cnn), or set method.use_ca=false"
            )
        server = super().start_server(setting)
        if not self.sends_prototypes:
            return server
        image = torch.zeros(1, *setting.image_shape)
        width = setting.network.encode(image, setting.initial.values).shape[1]
        return self.merged(server, {ENCODER_PROTOTYPES: Prototypes.empty(setting.num_classes, width)})

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        return self.exchanges_with(round_number, setting, *self.added_steps())

    def brings_prototypes(self, ctx: fl.RoundContext) -> bool:
        last = self.base_method.round_exchanges(ctx.round, ctx.setting)[-1]
        return self.sends_prototypes and ctx.exchange == last.name

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        return super().privacy(releases) or self.base_method.privacy(releases)

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, nn.Module]:
        layers = super().extra_layers(feature_dim, num_classes, encoded_dim)
        return self.merged(layers, {AUXILIARY: nn.Linear(encoded_dim, num_classes)}) if self.aux_ce else layers

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        message = super().broadcast(self.as_sent(server), client, ctx)
        if not self.aligns or not self.brings_prototypes(ctx):
            return message
        return self.merged(message, {ENCODER_PROTOTYPES: server[ENCODER_PROTOTYPES]})

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        inputs = super().loss_inputs(ctx)
        if ctx.rounds_done == 0 or ENCODER_PROTOTYPES not in ctx.received:
            return inputs
        prototypes = ctx.received[ENCODER_PROTOTYPES]
        return self.merged(inputs, {"encoder_means": prototypes.means, "encoder_present": prototypes.present})

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        if not self.aux_ce and "encoder_means" not in inputs:
            return super().loss(model, batch, inputs)
        once = EncodedOnce(model, batch.images)
        terms = super().loss(once, batch, inputs)
        added: dict[str, Tensor] = {}
        if self.aux_ce:
            logits = once.apply_extra(AUXILIARY, once.encoded)
            added["auxiliary"] = cross_entropy(logits, batch.labels, batch.weight)
        if "encoder_means" in inputs:
            added |= self.alignment(once.encoded, batch, inputs["encoder_means"], inputs["encoder_present"])
        return self.merged(terms, added)

    def alignment(self, encoded: Tensor, batch: fl.Batch, means: Tensor, present: Tensor) -> dict[str, Tensor]:
        """Return κ·(w_N L_N + w_A L_A + w_E L_E), term by term."""
        labels, weight, few = batch.labels, batch.weight, slice(ANGLE_ROWS)
        terms: dict[str, Tensor] = {}
        if self.w_node > 0:
            node = prototype_contrast(encoded, labels, means, present, self.tau_l, weight=weight)
            terms["node"] = self.kappa * self.w_node * node
        if self.w_angle > 0:
            rows = None if weight is None else weight[few]
            angle = angle_loss(encoded[few], labels[few], means, present, mode=self.angle_mode, weight=rows)
            terms["angle"] = self.kappa * self.w_angle * angle
        if self.w_edge > 0:
            form = {"same_label": self.edge_same, "relative": self.edge_relative}
            edge = edge_loss(encoded, labels, means, present, **form, weight=weight)
            terms["edge"] = self.kappa * self.w_edge * edge
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if not self.brings_prototypes(ctx):
            return message, client_state
        added: dict[str, Payload] = {CLUSTER_PROTOTYPES: self.own_prototypes(ctx, *trained.encoded())}
        if self.rescales:
            added[ENCODER_NORM] = TensorDict({"mean": received_norm(ctx, trained)})
        return self.merged(message, added), client_state

    def own_prototypes(self, ctx: fl.ClientContext, encoded: Tensor, labels: Tensor) -> TensorDict:
        encoded, labels = encoded.cpu(), labels.cpu()
        enough = torch.bincount(labels, minlength=1)[labels] >= self.smallest_cluster
        vectors, labels = encoded[enough], labels[enough]
        if not self.use_cpm:
            means = class_means(vectors, labels, ctx.setting.num_classes).arrays()
            vectors, labels = means["means"], means["classes"]
        elif len(labels):
            stream, smallest = partial(ctx.numpy_stream, "fedcspc prototypes"), self.smallest_cluster
            how = {"num_clusters": self.clusters, "repeats": self.n_repeat, "min_size": max(self.min_cluster, smallest)}
            vectors, labels = cluster_prototypes(vectors, labels, stream, ratio=self.ratio, few=self.few, **how)
        return TensorDict({"labels": labels, "vectors": self.release_vectors(ctx, vectors)})

    def added_steps(self) -> dict[str, fl.ServerStep]:
        steps: dict[str, fl.ServerStep] = {"gather-prototypes": self.gather_prototypes} if self.sends_prototypes else {}
        if self.use_ca:
            steps["calibrate"] = self.calibrate
        if self.use_kp:
            steps["build-exemplars"] = self.build_exemplars
        return steps

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        base = {name: self.after_feedback(step) for name, step in super().server_steps().items()}
        return self.merged(base, self.added_steps())

    def after_feedback(self, step: fl.ServerStep) -> fl.ServerStep:
        """Run a server step of the base with the model that clients received as the server's.

        Updates are clipped, and FedDC's drift is measured, from there. Later steps find the base's model alone.
        """

        @wraps(step)
        def sent_first(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Payloads, fl.Metrics]:
            sent = self.as_sent(server)
            return step(server if sent is server else sent.without(CALIBRATED), replies, ctx)

        return sent_first

    def as_sent(self, server: Record) -> Record:
        """Return the record with the model as clients receive it: with ``feedback``, with calibrated H and F.

        A base that predicts with another model than it sends (FedASAM's mean over rounds) sends it unchanged.
        """
        fits = self.base_model(server) is server[fl.MODEL]
        return with_calibrated_encoder(server) if self.feedback and fits else server

    def gather_prototypes(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Compute u_g; with ``keep_stale`` keep the latest prototypes of every client."""
        pool = pooled(server, replies)
        own = class_means(pool["vectors"], pool["labels"], ctx.setting.num_classes)
        previous = server[ENCODER_PROTOTYPES]
        fused = torch.where(own.present.unsqueeze(1), own.means, previous.means)
        gathered: dict[str, Payload] = {ENCODER_PROTOTYPES: Prototypes(fused, previous.present | own.present)}
        if self.keep_stale:
            gathered[POOL] = pool
        return server.without(CALIBRATED) | gathered, {}

    def fitting_pool(
        self, server: Record, replies: fl.Replies, device: str = "cpu"
    ) -> tuple[TensorDict, dict[str, float]]:
        """Return the prototypes for calibration and exemplars, and metrics of their number and length."""
        pool = on_device({POOL: pooled(server, replies)}, device)[POOL]
        facts = {"prototypes": float(len(pool["labels"]))}
        vectors = pool["vectors"]
        if len(vectors):
            length = facts["prototype_norm"] = float(vectors.norm(dim=1).mean())
            if self.rescales:
                sizes, norms = sample_counts(replies), replies.of(ENCODER_NORM)
                total = sum(sizes[client] * float(norm["mean"]) for client, norm in norms.items())
                facts["norm_factor"] = total / sum(sizes.values()) / length if length > 0 else 1.0
                vectors = vectors * facts["norm_factor"]
        return TensorDict({**pool.named, "vectors": vectors}), facts

    def calibrate(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Train H and F of the base's model on the prototypes; without any, change nothing.

        Metrics: the mean of each term in the last epoch, the number of prototypes and their mean length.

        Raises:
            ArithmeticError: the calibration diverged.
        """
        network, device, stream = ctx.setting.network, ctx.setting.device, ctx.stream("calibrate")
        pool, facts = self.fitting_pool(server, replies, device)
        labels = pool["labels"]
        if len(labels) == 0:
            return server, facts
        start = on_device({CALIBRATED: self.base_model(server).part(*PARTS)}, device)[CALIBRATED]
        trained = leaves(start.params)
        values = {**start.buffers, **trained}
        partners = Partners(labels, pool["sources"]) if self.mixes else None

        def batches() -> Iterator[tuple[Tensor, Drawn | None]]:
            for _ in range(self.cal_epochs):
                order = torch.randperm(len(labels), generator=stream).to(device)
                drawn = partners.draw(self.n_aug, stream) if partners else None
                for rows in torch.split(order, self.cal_batch):
                    yield rows, drawn.rows(rows) if drawn else None

        def loss(batch: tuple[Tensor, Drawn | None]) -> Terms:
            return {name: (1.0, term) for name, term in self.calibration_loss(network, values, pool, *batch).items()}

        rate = self.round_rate(ctx.rounds_done)
        sizes = [len(rows) for rows in torch.split(torch.arange(len(labels)), self.cal_batch)]
        schedule = exponential(rate, 0.1, every=self.cal_decay_every * len(sizes))
        moving = Moving(trained, Sgd(rate, weight_decay=self.cal_weight_decay), schedule)
        fitted = fit(moving, batches(), loss, what="the calibration", cure="method.cal_lr or method.eta")
        last = fitted.terms[-len(sizes) :]
        for name in last[0] if last else ():
            total = sum(size * terms[name] for size, terms in zip(sizes, last, strict=True))
            facts[f"calibration_{name}"] = float(total) / len(labels)
        return server | on_device({CALIBRATED: Weights(fitted.values)}, "cpu"), facts

    def round_rate(self, rounds_done: int) -> float:
        """Return the learning rate at the beginning of a calibration."""
        if self.cal_lr_schedule == "constant" or rounds_done < 6:
            return self.cal_lr
        return self.cal_lr * (0.1 if rounds_done < 41 else 0.01)

    def calibration_loss(
        self, network: Network, values: ParamDict, pool: TensorDict, rows: Tensor, partners: Drawn | None
    ) -> dict[str, Tensor]:
        """Return CE + η·(L_WCL + L_ACL) of a mini-batch, term by term.

        Args:
            network: the model's parts. values: H and F.
            pool: all prototypes. rows: int64 [B], the mini-batch's.
            partners: of these B; None without L_ACL.
        """
        vectors, labels = pool["vectors"], pool["labels"][rows]
        anchors = vectors[rows]
        projected = network.project(anchors, values)
        terms = {"supervised": cross_entropy(network.classify(projected, values), labels)}
        if self.eta > 0:
            terms["contrast"] = self.eta * self.source_contrast(network, values, pool, rows, projected)
        if partners is not None:
            mixed = extrapolate(anchors.unsqueeze(1), vectors[partners.same], vectors[partners.other], self.lambda_u)
            away = network.project(torch.cat(mixed).flatten(0, 1), values)
            positive, negative = away.reshape(2, len(rows), self.n_aug, -1)
            # One weight per draw: the mean is over anchors and draws.
            usable = partners.usable.expand(-1, self.n_aug).to(away.dtype)
            hinge = triplet_hinge(projected.unsqueeze(1), positive, negative, self.alpha, weight=usable)
            terms["mixed"] = self.eta * hinge
        return terms

    def source_contrast(
        self, network: Network, values: ParamDict, pool: TensorDict, rows: Tensor, projected: Tensor
    ) -> Tensor:
        """Return L_WCL of the prototypes at ``rows``, among themselves or all."""
        labels, sources = pool["labels"], pool["sources"]
        if self.contrast == "batch":
            among, labels, sources, anchors = projected, labels[rows], sources[rows], None
        else:
            among, anchors = network.project(pool["vectors"], values), rows
        weights = source_weights(labels, sources, anchors=anchors)
        losses, counted = contrastive_terms(among, labels, self.tau_g, pair_weights=weights, anchors=anchors)
        return weighted_mean(losses, counted.to(losses.dtype))

    def build_exemplars(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Compute e_c of the predicting model; none for a class without prototypes."""
        setting, part = ctx.setting, self.global_model(server).part(*PARTS)
        pool, _ = self.fitting_pool(server, replies, setting.device)
        values = on_device({CALIBRATED: part}, setting.device)[CALIBRATED].values
        with torch.no_grad():
            projected = setting.network.project(pool["vectors"], values)
            answers = setting.network.classify(projected, values)[:, : setting.num_classes].argmax(dim=1)
        exemplars = best_means(projected, pool["labels"], answers == pool["labels"], setting.num_classes)
        return server | on_device({EXEMPLARS: exemplars}, "cpu"), {}

    def global_model(self, server: Record) -> Weights:
        return self.base_model(server).with_params(server.get(CALIBRATED))

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        message = super().scoring_message(server, client, ctx)
        return self.merged(message, server.only(CALIBRATED, EXEMPLARS))

    def client_model(self, received: Record, client_state: Record, setting: fl.FederationContext) -> Weights | None:
        model = super().client_model(received, client_state, setting)
        return model and model.with_params(received.get(CALIBRATED))

    def generated_features(
        self, server: Record, setting: fl.FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        return super().generated_features(with_calibrated_encoder(server), setting, count, generator)

    @property
    def score_kind(self) -> ScoreKind:
        return super().score_kind if not self.use_kp or self.fusion == "softmax" else "ranks"

    def predict(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        logits = super().predict(model, images, known, classes)
        cosines = similarities(model.features(images), known.get(EXEMPLARS))
        if cosines is None:
            return logits
        fused = fuse(logits, cosines, self.lambda_p, self.tau_e, self.fusion)
        return fused.clamp_min(1e-12).log() if self.fusion == "softmax" else fused

    def by_exemplars(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """Return the cosines to the exemplars; before the first ones, the scores of the base."""
        cosines = similarities(model.features(images), known.get(EXEMPLARS))
        return super().predict(model, images, known, classes) if cosines is None else cosines

    def by_average(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """Return the base's scores with its averaged H and F."""
        if CALIBRATED in known:
            model = WithLayers(model, self.base_model(known).part(*PARTS).values)
        return super().predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, fl.Predict]:
        added: dict[str, fl.Predict] = (
            {"network": super().predict, "knowledge": self.by_exemplars} if self.use_kp else {}
        )
        if self.use_ca:
            added["before_calibration"] = self.by_average
        return self.merged(super().predictors(), added)


def pooled(server: Record, replies: fl.Replies) -> TensorDict:
    """Return :data:`POOL` of the replies, in client-id order, and of the absent clients in the server state."""
    own = replies.of(CLUSTER_PROTOTYPES)
    parts = [{**sent.named, "sources": torch.full_like(sent["labels"], client)} for client, sent in own.items()]
    if POOL in server:
        absent = ~torch.isin(server[POOL]["sources"], torch.tensor(list(own)))
        parts.append({name: tensor[absent] for name, tensor in server[POOL].named.items()})
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("labels", "sources", "vectors")}
    order = torch.argsort(joined["sources"], stable=True)
    return TensorDict({name: tensor[order] for name, tensor in joined.items()})


def received_norm(ctx: fl.ClientContext, trained: fl.TrainedClient) -> Tensor:
    """Return mean ‖E(x)‖ of the client's samples, E of the received model, float32 [1]; 0 without samples."""
    received = ctx.received[fl.MODEL]
    # Under `model.batchnorm: local` the client has its own statistics.
    encoded, labels = trained.encoded(Weights(received.params, received.buffers or trained.weights.buffers))
    return encoded.norm(dim=1).sum().reshape(1) / max(len(labels), 1)


def with_calibrated_encoder(server: Record) -> Record:
    """Return the record with calibrated H and F in the base's model."""
    return server | {fl.MODEL: server[fl.MODEL].with_params(server[CALIBRATED])} if CALIBRATED in server else server
