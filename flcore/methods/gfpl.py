"""GFPL (Lu, He, Li, Wang, Gong): personal models; mixtures of Gaussians travel, not weights; a fixed frame aligns them.

With its linear head g a client has a projection l of features f (Linear, d_f to d_p), h = l(f)/‖l(f)‖, and the simplex
equiangular tight frame Z, a function of the run's seed. Local training, in every round:

    L = CE(g(f), y) + λ · mean ½ (h·z_y − 1)²                                         (dual-classifier structure, DCS)

Exchange, in rounds t (from 0) with t ≥ t1 and t mod S_T = 0, after local training (pseudo-feature generation, PFG):

1. a client fits a mixture of at most n diagonal Gaussians to its features of each class and sends means, deviations,
   weights and sample counts; weights of the model never travel;
2. the server merges, class by class, components with Bhattacharyya distances to all others of their group below S_C
   (Algorithm 1), by moment matching;
3. every client draws r pseudo-features of *every* class from the fused mixtures and trains g and l on them for one
   pass, with the same loss and a fresh optimiser; the body is frozen.

Until t1 nothing is sent. Without DCS (or with λ = 0) there is neither l nor Z; without DCS and PFG this is local
training to the bit.

Choices (gfpl.md, sections 4 to 7): dropout before the last layer belongs to g, and l reads the feature without it. The
exchange follows the local epochs, not every mini-batch (Algorithm 2's indentation). Components: min(n, N/2), at least
1; ``variance_floor`` is *added* to variances (scikit-learn's ``reg_covar``). Components of a class weigh π·N over
clients (without ``use_counts``: π); of a merged covariance the diagonal is kept. ``retrain_source: own`` draws from the
client's own mixtures, and sends nothing. Without ``use_ce`` the dot regression is the whole loss (Fig. 2a and c), the
linear head keeps its initial weights, and the frame predicts.

Traffic per exchange, d the feature's length: up n·(2d + 1) scalars per (client, class), 404 for n = 4 and d = 50; down
the same per fused component, to every client. The paper counts the way up alone (``scalars_up``), over S_T rounds.

Privacy: means and deviations of a class with a few samples are nearly single features; ``min_count`` withholds it.
``proto_clip`` and ``proto_noise`` act on the means and deviations sent, each a vector, and protect all of a client's
samples at once; the account counts exchanges. It does not cover weights and numbers of components, classes held and
sample counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from flcore.core.errors import ConfigError
from flcore.core.optim import Sgd
from flcore.core.params import Search, param
from flcore.core.rng import torch_stream
from flcore.io.messages import Count, Mixtures, Payload, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.alignment import dot_regression
from flcore.math.losses.basic import cross_entropy, unit_vectors
from flcore.math.prototypes.class_means import simplex_etf
from flcore.math.prototypes.gaussians import (
    Mixture,
    fit_class_mixtures,
    fuse_uploads,
    pack_mixtures,
    sample_classes,
    unpack_mixtures,
)
from flcore.methods import types as fl
from flcore.methods.api import Method, ScoreKind, kept_model
from flcore.methods.kit.class_prototypes import ReleasesVectors
from flcore.models.network import WithLayers

RETRAIN_LEG = "retrain-heads"

Head = Literal["linear", "etf", "sum"]
HEADS: tuple[Head, ...] = get_args(Head)

MIXTURES = Key("mixtures", Mixtures)
"""A client's or the fused mixtures in a message; between the exchanges, the client's own in its state."""

FRAME = Key("frame", TensorDict)
"""``frame`` float32 [d_p, K] at the server and in its messages for scoring."""

BEFORE = Key("heads_before", Weights)
"""A client's heads before its last retraining, in its state."""

RETRAINED = Key("retrained", Count)
"""The round of that retraining."""

ROUND = Key("round", Count)
"""For scoring: a round with an exchange."""

_HEADS = ("head.", "extra.")

_WIDEST_PROJECTION = 128  # by default min(d_f, 128) but at least K: MNIST 50, CIFAR 128, as in the paper


def _in_rounds(classes: int | None, rounds: int) -> int:
    return min(50, rounds - 1)


@dataclass(frozen=True)
class GFPL(
    ReleasesVectors,
    Method,
    name="gfpl",
    citation="Lu, He, Li, Wang, Gong: GFPL, Generative Federated Prototype Learning",
):
    """Personal models with a linear and a fixed-frame head; mixtures of features travel, no weights."""

    has_global_model = False
    covers = "means and deviations alone; weights and numbers of components, counts and classes are not"

    use_dcs: bool = param(True, "the second head: projection, frame and dot regression", switch=True)
    use_pfg: bool = param(True, "the exchange and the retraining on pseudo-features", switch=True)
    use_ce: bool = param(True, "the cross-entropy of the linear head; without it set head=etf")
    weight: float = param(2.0, "weight λ of the dot regression", low=0, search=Search(0, 4, when=lambda m: m.use_dcs))
    projection_dim: int | None = param(
        None,
        "d_p, length of the projection, at least the number of classes; null: the feature's, at most 128",
        low=2,
        search=Search(choices=(50, 80, 128, 256), least=lambda classes, rounds: classes or 0, when=lambda m: m.dual),
    )
    components: int = param(
        4, "n, Gaussians per client and class", low=1, search=Search(1, 16, when=lambda m: m.use_pfg)
    )
    variance_floor: float = param(1e-4, "added to the variances of fitted Gaussians", above=0)
    merge_distance: float = param(
        1.0,
        "S_C, Gaussians nearer than this are merged; 0: none",
        low=0,
        # Divided by the feature's length, distances are 0.05 to 5: another range, not searched.
        search=Search(1, 200, log=True, when=lambda m: m.sends_prototypes and not m.bd_per_dim),
    )
    bd_per_dim: bool = param(False, "divide the Bhattacharyya distance by the feature's length")
    use_counts: bool = param(True, "send samples per class, and let each client's Gaussians weigh by them")
    interval: int = param(
        10, "S_T, rounds between exchanges", low=1, search=Search(1, _in_rounds, log=True, when=lambda m: m.use_pfg)
    )
    first_exchange: int = param(
        10, "t1, rounds before the first exchange", low=0, search=Search(0, _in_rounds, when=lambda m: m.use_pfg)
    )
    samples_per_class: int = param(
        16, "r, pseudo-features of every class", low=1, search=Search(4, 128, log=True, when=lambda m: m.use_pfg)
    )
    clip_nonneg: bool = param(False, "set negative entries of pseudo-features to 0")
    retrain_epochs: int = param(
        1, "passes over the pseudo-features", low=1, search=Search(1, 20, log=True, when=lambda m: m.use_pfg)
    )
    retrain_lr: float | None = param(
        None, "retraining's rate; null: as local", above=0, search=Search(1e-3, 0.1, log=True, when=lambda m: m.use_pfg)
    )
    retrain_momentum: float = param(0.5, "momentum of SGD, where retrain_lr is set", low=0, below=1)
    retrain_classes: Literal["all", "local"] = param("all", "retrain on every class, or on those the client holds")
    retrain_source: Literal["global", "own"] = param(
        "global", "draw from the fused mixtures, or from the client's own, which are then not sent"
    )
    head: Literal["linear", "etf", "sum"] = param(
        "linear", "answer with the linear head, the frame, or the sum softmax + cosine"
    )
    eval_classes: Literal["all", "own"] = param("all", "answer among all classes, or those the client holds")
    min_count: int = param(1, "samples that a class needs for its mixture to be sent", low=0)

    def __post_init__(self) -> None:
        """Refuse to predict with a missing or untrained head."""
        super().__post_init__()
        if not self.use_ce and (not self.dual or self.head != "etf"):
            raise ValueError("use_ce = false leaves only the second head; set use_dcs, head=etf and a weight above 0")
        if self.head != "linear" and not self.dual:
            raise ValueError(f"head = {self.head} needs use_dcs and a weight above 0")

    @property
    def dual(self) -> bool:
        return self.use_dcs and self.weight > 0

    @property
    def sends_prototypes(self) -> bool:
        return self.use_pfg and self.retrain_source == "global"

    def exchanges(self, round_number: int) -> bool:
        """True if a round (1-based) ends with a retraining."""
        passed = round_number - 1
        return self.use_pfg and passed >= self.first_exchange and passed % self.interval == 0

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, nn.Module]:
        """Return the projection l.

        Raises:
            ConfigError: a projection too short for the frame.
        """
        if not self.dual:
            return {}
        dim = self.projection_dim or max(num_classes, min(feature_dim, _WIDEST_PROJECTION))
        if dim < num_classes:
            raise ConfigError(f"method.projection_dim = {dim}: a frame of {num_classes} classes needs as many")
        return {"projection": nn.Linear(feature_dim, dim)}

    def frame(self, setting: fl.FederationContext) -> Tensor:
        """Return Z [d_p, K]."""
        dim = len(setting.initial.params["extra.projection.bias"])
        return simplex_etf(dim, setting.num_classes, torch_stream(setting.seed, "simplex frame"))

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        return {FRAME: TensorDict({"frame": self.frame(setting)})} if self.dual else {}

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        if not self.exchanges(round_number):
            return (fl.Exchange(server_steps=()),)
        sgd = None if self.retrain_lr is None else partial(Sgd, self.retrain_lr, self.retrain_momentum)
        updates = (fl.StepSpec(optimizer=sgd),)
        retraining = fl.Phase(
            _HEADS, epochs=self.retrain_epochs, source="pseudo", loss=self.retrain_loss, updates=updates
        )
        training = fl.Exchange(server_steps=tuple(self.server_steps()))
        return (training, fl.Exchange(RETRAIN_LEG, phases=(retraining,), server_steps=()))

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return server.only(MIXTURES) if ctx.exchange == RETRAIN_LEG else {}

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        device = ctx.setting.device
        frame: dict[str, fl.LossInputs | Tensor] = {"frame": self.frame(ctx.setting).to(device)} if self.dual else {}
        if ctx.exchange != RETRAIN_LEG:
            return frame
        features, labels = torch.zeros(0, ctx.setting.feature_dim), torch.zeros(0, dtype=torch.int64)
        if mixtures := self.retraining_mixtures(ctx):
            # Not `ctx.stream`, which would add the name of the exchange to the key.
            stream = torch_stream(ctx.setting.seed, "pseudo-features", ctx.round, ctx.client)
            number, clip = self.samples_per_class, self.clip_nonneg
            features, labels = sample_classes(mixtures, number, stream, clip_nonnegative=clip)
        return {**frame, "pseudo": {"inputs": features.to(device), "labels": labels.to(device)}}

    def retraining_mixtures(self, ctx: fl.ClientContext) -> dict[int, Mixture]:
        """Return the mixtures that a client draws from, by class."""
        packed = (ctx.received if self.retrain_source == "global" else ctx.client_state).get(MIXTURES)
        mixtures = {} if packed is None else unpack_mixtures(packed)
        if self.retrain_classes == "all":
            return mixtures
        return {label: mixture for label, mixture in mixtures.items() if ctx.class_counts[label] > 0}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        return self.both_heads(model, model.features(batch.images), batch, inputs)

    def retrain_loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        terms = self.both_heads(model, batch.images, batch, inputs)
        return {f"retrain_{name}": term for name, term in terms.items()}

    def both_heads(
        self, model: fl.LocalModel, features: Tensor, batch: fl.Batch, inputs: fl.LossInputs
    ) -> dict[str, Tensor]:
        terms = {}
        if self.use_ce:
            terms["cross_entropy"] = cross_entropy(model.classify(features), batch.labels, batch.weight)
        if self.dual:
            projected = model.apply_extra("projection", features)
            regression = dot_regression(projected, batch.labels, inputs["frame"], batch.weight)
            terms["dot_regression"] = self.weight * regression
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        client_state: Payloads = {fl.MODEL: trained.weights}
        if ctx.exchange == RETRAIN_LEG:
            heads = kept_model(ctx).part(*_HEADS).without_buffers()
            return {}, {**client_state, BEFORE: heads, RETRAINED: Count(ctx.round)}
        if not self.exchanges(ctx.round):
            return {}, client_state
        own: Payloads = {MIXTURES: self.own_mixtures(ctx, trained)}
        return (own, client_state) if self.sends_prototypes else ({}, {**client_state, **own})

    def own_mixtures(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> Mixtures:
        """Return a mixture of the features of each class; clipped and noisy if configured and sent."""
        features, labels = (values.cpu() for values in trained.features())
        rows = (ctx.class_counts >= (self.min_count if self.sends_prototypes else 0))[labels]
        stream, floor = partial(ctx.numpy_stream, "mixtures"), self.variance_floor
        fitted = fit_class_mixtures(features[rows], labels[rows], self.components, stream, variance_floor=floor)
        own = pack_mixtures(fitted, ctx.class_counts if self.use_counts else None, ctx.setting.feature_dim)
        if self.bound is None or not self.sends_prototypes:
            return own
        means, deviations = self.release_vectors(ctx, torch.cat([own.means, own.deviations])).tensor_split(2)
        return replace(own, means=means, deviations=deviations.clamp_min(self.variance_floor**0.5))

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        return super().privacy(sum(map(self.exchanges, range(1, releases + 1))))

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"fuse-prototypes": self.fuse_prototypes} if self.sends_prototypes else {}

    def fuse_prototypes(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Run Algorithm 1 per class on the union of all clients' Gaussians, in order of their ids."""
        uploads = replies.of(MIXTURES)
        merged = fuse_uploads(uploads, self.merge_distance, per_dimension=self.bd_per_dim)
        fused = pack_mixtures(merged, None, ctx.setting.feature_dim)
        facts = {"components_uploaded": sum(len(upload.weights) for upload in uploads.values())}
        return server | {MIXTURES: fused}, {**facts, "components": len(fused.weights), "classes": len(fused.classes)}

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        """Send the frame; after an exchange also the round, so that a client knows if its old heads are current."""
        message: dict[str, Payload] = {**server.only(FRAME)}
        return {**message, ROUND: Count(ctx.round)} if self.exchanges(ctx.round) else message

    @property
    def score_kind(self) -> ScoreKind:
        return "logits" if self.head == "linear" else "ranks"

    def predict(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        return self.scores(model, images, known, classes, head=self.head, among=self.eval_classes)

    def predictors(self) -> Mapping[str, fl.Predict]:
        heads = [head for head in HEADS if head != self.head] if self.dual and self.use_ce else []
        other = "own" if self.eval_classes == "all" else "all"
        by_head = {f"{head}_head": partial(self.scores, head=head, among=self.eval_classes) for head in heads}
        others: dict[str, fl.Predict] = {f"{other}_classes": partial(self.scores, head=self.head, among=other)}
        return {**by_head, **others, **({"before_retraining": self.predict_before} if self.use_pfg else {})}

    def predict_before(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """Predict with the heads before this round's retraining, if the client had one."""
        if BEFORE in known and ROUND in known and known[RETRAINED] == known[ROUND]:
            model = WithLayers(model, known[BEFORE].values)
        return self.predict(model, images, known, classes)

    def scores(
        self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None, *, head: Head, among: str
    ) -> Tensor:
        """Return scores [B, K] of one head: logits, cosines to the frame, or softmax + cosines."""
        features = model.features(images)
        logits = model.classify(features)
        if head != "linear":
            cosines = projected(model, features) @ known[FRAME]["frame"]
            logits = cosines if head == "etf" else logits.softmax(dim=1) + cosines
        if among == "all" or classes is None:
            return logits
        return logits.masked_fill(~classes.to(logits.device), -torch.inf)

    @property
    def projections(self) -> fl.Predict | None:
        return (lambda model, images, server, classes: projected(model, model.features(images))) if self.dual else None

    def generated_features(
        self, server: Record, setting: fl.FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        mixtures = unpack_mixtures(server[MIXTURES]) if MIXTURES in server else {}
        if not mixtures:
            return None
        features, labels = sample_classes(mixtures, count, generator, clip_nonnegative=self.clip_nonneg)
        return features.to(setting.device), labels.to(setting.device)


def projected(model: fl.LocalModel, features: Tensor) -> Tensor:
    """Return H = l(f)/‖l(f)‖, [B, d_p], for features [B, d]."""
    return unit_vectors(model.apply_extra("projection", features))
