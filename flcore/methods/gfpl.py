"""GFPL (Lu, He, Li, Wang, Gong): personal models; mixtures of Gaussians travel, not weights; a fixed frame aligns them.

Beside its linear head g a client has a projection l of features f (Linear, d_f to d_p), h = l(f)/‖l(f)‖, and the
simplex equiangular tight frame Z, which everybody builds from the run's seed. Local training, in every round:

    L = CE(g(f), y) + λ · mean ½ (h·z_y − 1)²                                         (dual-classifier structure, DCS)

Exchange, in rounds t (from 0) with t ≥ t1 and t mod S_T = 0, after local training (pseudo-feature generation, PFG):

1. a client fits a mixture of at most n diagonal Gaussians to its features of each class and sends means, deviations,
   weights and sample counts: no weights of the model ever travel;
2. the server (stage ``fuse-prototypes``) merges, class by class, components whose Bhattacharyya distance to all others
   of their group is below S_C (Algorithm 1), by moment matching;
3. every client draws r pseudo-features of *every* class from the fused mixtures and trains g and l on them for one
   pass, with the same loss and a fresh optimiser; the body is frozen.

Until t1 nothing is sent. Without DCS (or with λ = 0) there is neither l nor Z; without DCS and PFG this is local
training to the bit.

Choices (gfpl.md, sections 4 to 7): CE runs over all classes. Dropout in front of the last layer belongs to g, so it is
active in both trainings, and l reads the feature without it. The exchange follows the local epochs and is not repeated
in every mini-batch (Algorithm 2's indentation). Components: min(n, N/2), at least 1; ``variance_floor`` is *added* to
variances (scikit-learn's ``reg_covar``). Components of a class weigh π·N over clients (``use_counts``; without it
nobody tells how many samples it has), normalised over the class at the end; of a merged covariance the diagonal is
kept. ``retrain_source: own`` draws from the client's own mixtures, and nothing is sent at all. Where there is nothing
to draw from (nobody's mixtures came in time) the retraining changes nothing.

``projection_dim`` null: as long as the feature, but from K to 128: 50 for MNIST and 128 for CIFAR, as in the paper; its
80 for FEMNIST has to be said. ``retrain_lr_factor`` multiplies the loss of the retraining, which with SGD without decay
and clipping is a learning rate of its own: 10 is 0.1 where ``local.lr`` is 0.01. ImageNet weights (``pretrained``) are
a matter of the model, not of the method.

What is scored: the head ``head`` among all classes, or among the client's own (``eval_classes``); beside it the other
heads, the other set of classes, and, as ``before_retraining``, the heads as they were after local training and before
the retraining. Those are kept as constants next to the model, since a round is scored when its last leg is over; in
rounds without an exchange both are the same.

Traffic per exchange, d the feature's length: up n·(2d + 1) scalars per (client, class), 404 for n = 4 and d = 50; down
the same per fused component, to every client; ids and counts are integers, in bytes only. The paper counts the way up
alone (``scalars_up``), spread over S_T rounds; ``bytes_up`` and ``bytes_down`` are both ways.

Privacy: means and deviations of classes with a few samples are nearly single features, and counts are told as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flcore.errors import ConfigError
from flcore.losses.alignment import dot_regression
from flcore.losses.basic import cross_entropy
from flcore.losses.contrastive import unit_vectors
from flcore.messages import Arrays, Facts, Mixtures, Weights
from flcore.methods.base import Method
from flcore.methods.vocabulary import (
    Batch,
    Context,
    Leg,
    LocalModel,
    Phase,
    Predict,
    Setting,
    Stage,
    TrainedClient,
    Turn,
)
from flcore.params import Search, param
from flcore.prototypes.etf import simplex_etf
from flcore.prototypes.mixtures import Mixture, fit_class_mixtures, fuse_mixtures, sample_classes
from flcore.records import Record, payload_of
from flcore.rng import numpy_stream, torch_stream

Head = Literal["linear", "etf", "sum"]
HEADS: tuple[Head, ...] = ("linear", "etf", "sum")

LOCAL_LEG, RETRAIN_LEG = "train-clients", "retrain-heads"

# (what is trained, its copy of before the retraining)
HEAD = ("head.", "extra.head_before.")
PROJECTION = ("extra.projection.", "extra.projection_before.")
_WIDEST_PROJECTION = 128


@dataclass(frozen=True)
class GFPL(Method):
    """Personal models with two heads, retrained on features drawn from everybody's mixtures."""

    name: ClassVar[str] = "gfpl"
    summary: ClassVar[str] = (
        "personal models with a linear and a fixed-frame head; mixtures of features travel, no weights"
    )
    citation: ClassVar[str] = "Lu, He, Li, Wang, Gong: GFPL, Generative Federated Prototype Learning"
    has_global_model: ClassVar[bool] = False

    use_dcs: bool = param(True, "the second head: projection, frame and dot regression", switch=True)
    use_pfg: bool = param(True, "the exchange and the retraining on pseudo-features", switch=True)
    weight: float = param(2.0, "weight λ of the dot regression", low=0, search=Search(0, 4))
    projection_dim: int | None = param(
        None,
        "d_p, length of the projection, at least the number of classes; null: the feature's, within that and 128",
        low=2,
        search=Search(choices=(50, 80, 128, 256)),
    )
    components: int = param(4, "n, Gaussians per client and class", low=1, search=Search(1, 16))
    variance_floor: float = param(1e-4, "added to the variances of fitted Gaussians", above=0)
    merge_distance: float = param(
        1.0, "S_C, Gaussians nearer than this are merged; 0: none", low=0, search=Search(1, 200, log=True)
    )
    bd_per_dim: bool = param(False, "divide the Bhattacharyya distance by the feature's length")
    use_counts: bool = param(True, "send samples per class, and let each client's Gaussians weigh by them")
    interval: int = param(10, "S_T, rounds from one exchange to the next", low=1, search=Search(1, 50, log=True))
    first_exchange: int = param(
        10, "t1, rounds before the first exchange may be, which is at a multiple of S_T", low=0, search=Search(0, 50)
    )
    samples_per_class: int = param(16, "r, pseudo-features of every class", low=1, search=Search(4, 128, log=True))
    clip_nonneg: bool = param(False, "set negative entries of pseudo-features to 0")
    retrain_epochs: int = param(1, "passes over the pseudo-features", low=1, search=Search(1, 20, log=True))
    retrain_lr_factor: float = param(
        1.0,
        "factor on the retraining's loss: with plain or momentum SGD its learning rate over local.lr",
        above=0,
        search=Search(0.1, 10, log=True),
    )
    retrain_classes: Literal["all", "local"] = param("all", "retrain on every class, or on those the client holds")
    retrain_source: Literal["global", "own"] = param(
        "global", "draw from the fused mixtures, or from the client's own, which are then not sent"
    )
    head: Literal["linear", "etf", "sum"] = param(
        "linear", "answer with the linear head, the frame, or the sum softmax + cosine"
    )
    eval_classes: Literal["all", "own"] = param("all", "answer among all classes, or those the client holds")

    def __post_init__(self) -> None:
        """Refuse to answer with a head that is not there."""
        if self.head != "linear" and not self.dual:
            raise ValueError(f"head = {self.head} needs use_dcs and a weight above 0")

    @property
    def dual(self) -> bool:
        """Whether there is a second head."""
        return self.use_dcs and self.weight > 0

    @property
    def sends(self) -> bool:
        """Whether anything travels."""
        return self.use_pfg and self.retrain_source == "global"

    def exchanges(self, round_number: int) -> bool:
        """Whether a round (1-based) ends with a retraining."""
        passed = round_number - 1
        return self.use_pfg and passed >= self.first_exchange and passed % self.interval == 0

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, nn.Module]:
        """The projection l, and copies of the heads for scoring.

        Raises:
            ConfigError: a projection too short for the frame.
        """
        dim = self.projection_dim or max(num_classes, min(feature_dim, _WIDEST_PROJECTION))
        layers: dict[str, nn.Module] = {}
        if self.dual:
            if dim < num_classes:
                raise ConfigError(f"method.projection_dim = {dim}: a frame of {num_classes} classes needs as many")
            layers["projection"] = nn.Linear(feature_dim, dim)
        if self.use_pfg:
            layers["head_before"] = ConstantLinear(feature_dim, num_classes)
            if self.dual:
                layers["projection_before"] = ConstantLinear(feature_dim, dim)
        return layers

    def frame(self, setting: Setting) -> Tensor:
        """Z [d_p, K], the same for everybody who knows the seed."""
        dim = len(setting.initial.params["extra.projection.bias"])
        return simplex_etf(dim, setting.num_classes, torch_stream(setting.seed, "simplex frame"))

    def start_server(self, setting: Setting) -> Record:
        """The frame, for scoring."""
        return {"frame": Arrays({"frame": self.frame(setting)})} if self.dual else {}

    def legs(self, round_number: int, setting: Setting) -> tuple[Leg, ...]:
        """Local training; in rounds with an exchange also the retraining of the heads."""
        if not self.exchanges(round_number):
            return (Leg(LOCAL_LEG, stages=()),)
        heads = ("head.", "extra.")
        retraining = Phase(heads, epochs=self.retrain_epochs, source="pseudo", loss=self.retrain_loss)
        fuse, end = (("fuse-prototypes",), ("end-exchange",)) if self.sends else ((), ())
        return (Leg(LOCAL_LEG, stages=fuse), Leg(RETRAIN_LEG, phases=(retraining,), stages=end))

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The fused mixtures, while an exchange is under way; else nothing."""
        return {"mixtures": server["mixtures"]} if "mixtures" in server else {}

    def context(self, turn: Turn) -> Context:
        """The frame; for the retraining the pseudo-features and the factor of their loss."""
        device = turn.setting.device
        context: dict[str, Context | Tensor] = {"frame": self.frame(turn.setting).to(device)} if self.dual else {}
        if turn.leg != RETRAIN_LEG:
            return context
        mixtures = self.retraining_mixtures(turn)
        if mixtures:
            stream, clip = turn.stream("pseudo-features"), self.clip_nonneg
            inputs, labels = sample_classes(mixtures, self.samples_per_class, stream, clip_nonnegative=clip)
        else:
            inputs, labels = torch.zeros(1, turn.setting.feature_dim), torch.zeros(1, dtype=torch.int64)
        pseudo = {"inputs": inputs.to(device), "labels": labels.to(device)}
        factor = torch.tensor(self.retrain_lr_factor if mixtures else 0.0, device=device)
        return {**context, "pseudo": pseudo, "factor": factor}

    def retraining_mixtures(self, turn: Turn) -> dict[int, Mixture]:
        """What a client draws from, by class."""
        record = turn.inbox if self.retrain_source == "global" else turn.memory
        if "mixtures" not in record:
            return {}
        mixtures = unpacked(payload_of(Mixtures, record, "mixtures"))
        if self.retrain_classes == "all":
            return mixtures
        return {label: mixture for label, mixture in mixtures.items() if turn.counts[label] > 0}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """L on images."""
        return self.both_heads(model, model.features(batch.images), batch, context)

    def retrain_loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """L on pseudo-features."""
        terms = self.both_heads(model, batch.images, batch, context)
        return {f"retrain_{name}": context["factor"] * term for name, term in terms.items()}

    def both_heads(self, model: LocalModel, features: Tensor, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy of the linear head and, with a second head, its dot regression."""
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if self.dual:
            projected = model.apply_extra("projection", features)
            regression = dot_regression(projected, batch.labels, context["frame"], batch.weight)
            terms["dot_regression"] = self.weight * regression
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """In an exchange the mixtures of the client's classes; its model stays with it."""
        if turn.leg == RETRAIN_LEG:
            return {}, {"model": trained.weights}
        memory: Record = {"model": self.with_heads_kept(trained.weights)}
        if not self.exchanges(turn.round):
            return {}, memory
        mixtures = {"mixtures": self.own_mixtures(turn, trained)}
        return (mixtures, memory) if self.sends else ({}, {**memory, **mixtures})

    def own_mixtures(self, turn: Turn, trained: TrainedClient) -> Mixtures:
        """A mixture of the features of each of the client's classes."""
        keys = (turn.round, turn.client)
        features, labels = trained.features()
        fitted = fit_class_mixtures(
            features,
            labels,
            self.components,
            lambda label: numpy_stream(turn.setting.seed, "mixtures", *keys, label),
            variance_floor=self.variance_floor,
        )
        return packed(fitted, turn.counts if self.use_counts else None)

    def with_heads_kept(self, weights: Weights) -> Weights:
        """Weights whose copies of the heads are those of now."""
        copies = {
            copy + part: weights.params[own + part].clone()  # what is stored shares no memory
            for own, copy in (HEAD, PROJECTION)
            for part in ("weight", "bias")
            if copy + part in weights.buffers
        }
        return replace(weights, buffers={**weights.buffers, **copies})

    def client_model(self, server: Record, client: int, memory: Record, setting: Setting) -> Weights:
        """The client's own; the initial one before its first turn."""
        return payload_of(Weights, memory, "model") if "model" in memory else self.with_heads_kept(setting.initial)

    def stages(self) -> Mapping[str, Stage]:
        """Fuse the mixtures before the heads are retrained; afterwards the exchange is over."""
        return {"fuse-prototypes": self.fuse_prototypes, "end-exchange": end_exchange} if self.sends else {}

    def fuse_prototypes(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Server stage: per class Algorithm 1 on the union of all clients' Gaussians, in order of their ids."""
        uploads = {client: payload_of(Mixtures, replies[client], "mixtures") for client in sorted(replies)}
        opened = {client: unpacked(upload) for client, upload in uploads.items()}
        fused: dict[int, Mixture] = {}
        for label in sorted({label for mixtures in opened.values() for label in mixtures}):
            holders = {client: mixtures[label] for client, mixtures in opened.items() if label in mixtures}
            counts = {client: class_count(uploads[client], label) for client in holders} if self.use_counts else None
            fused[label] = fuse_mixtures(holders, counts, self.merge_distance, per_dimension=self.bd_per_dim)
        mixtures = packed(fused, None)
        facts = {
            "components_uploaded": float(sum(len(upload.weights) for upload in uploads.values())),
            "components": float(len(mixtures.weights)),
            "classes": float(len(mixtures.classes)),
        }
        return {**server, "mixtures": mixtures, "facts": Facts(facts)}

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """Scores of the chosen head; of classes that do not count -inf."""
        return self.scores(model, images, server, classes, self.head, self.eval_classes)

    def alternatives(self) -> Mapping[str, Predict]:
        """The other heads, the other set of classes, and the chosen head before the last retraining."""
        heads = [head for head in HEADS if head != self.head] if self.dual else []
        other = "own" if self.eval_classes == "all" else "all"
        ways: dict[str, Predict] = {
            f"{head}_head": partial(self.scores, head=head, eval_classes=self.eval_classes) for head in heads
        }
        ways[f"{other}_classes"] = partial(self.scores, head=self.head, eval_classes=other)
        if self.use_pfg:
            ways["before_retraining"] = partial(
                self.scores, head=self.head, eval_classes=self.eval_classes, before=True
            )
        return ways

    def scores(
        self,
        model: LocalModel,
        images: Tensor,
        server: Record,
        classes: Tensor | None,
        head: Head,
        eval_classes: str,
        before: bool = False,
    ) -> Tensor:
        """Scores [B, K] of one head: logits, cosines to the frame, or softmax + cosines."""
        features = model.features(images)
        logits = model.apply_extra("head_before", features) if before else model.classify(features)
        if head != "linear":
            layer = "projection_before" if before else "projection"
            cosines = unit_vectors(model.apply_extra(layer, features)) @ payload_of(Arrays, server, "frame")["frame"]
            logits = cosines if head == "etf" else logits.softmax(dim=1) + cosines
        if eval_classes == "all" or classes is None:
            return logits
        return logits.masked_fill(~classes.to(logits.device), -torch.inf)

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Draws from the fused mixtures of the last exchange."""
        name = "mixtures" if "mixtures" in server else "last_mixtures"
        if name not in server:
            return None
        mixtures = unpacked(payload_of(Mixtures, server, name))
        features, labels = sample_classes(mixtures, count, generator, clip_nonnegative=self.clip_nonneg)
        return features.to(setting.device), labels.to(setting.device)


class ConstantLinear(nn.Module):
    """A linear layer without parameters: its weight and bias are buffers, which no optimiser moves."""

    weight: Tensor
    bias: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        """Zeros, until other values are loaded."""
        super().__init__()
        self.register_buffer("weight", torch.zeros(outputs, inputs))
        self.register_buffer("bias", torch.zeros(outputs))

    def forward(self, values: Tensor) -> Tensor:
        """[B, inputs] to [B, outputs]."""
        return F.linear(values, self.weight, self.bias)


def end_exchange(server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
    """Server stage: the fused mixtures are kept, and no longer sent."""
    kept = {name: payload for name, payload in server.items() if name != "mixtures"}
    return {**kept, "last_mixtures": server["mixtures"]} if "mixtures" in server else kept


def packed(mixtures: Mapping[int, Mixture], counts: Tensor | None) -> Mixtures:
    """Mixtures by class as they travel.

    Args:
        mixtures: class to mixture, at least one.
        counts: int64 [K], samples per class; None to leave them out.
    """
    classes = sorted(mixtures)
    ordered = [mixtures[label] for label in classes]
    return Mixtures(
        classes=torch.tensor(classes, dtype=torch.int64),
        components=torch.tensor([len(mixture.weights) for mixture in ordered], dtype=torch.int64),
        weights=torch.cat([mixture.weights for mixture in ordered]).float(),
        means=torch.cat([mixture.means for mixture in ordered]).float(),
        deviations=torch.cat([mixture.variances.sqrt() for mixture in ordered]).float(),
        counts=None if counts is None else counts[classes],
    )


def unpacked(payload: Mixtures) -> dict[int, Mixture]:
    """Mixtures by class, on the CPU: the inverse of :func:`packed`, to float32."""
    parts = [
        torch.split(values.cpu(), payload.components.tolist())
        for values in (payload.weights, payload.means, payload.deviations.square())
    ]
    return {
        label: Mixture(weights, means, variances)
        for label, weights, means, variances in zip(payload.classes.tolist(), *parts, strict=True)
    }


def class_count(payload: Mixtures, label: int) -> float:
    """How many samples of a class there are, as told.

    Raises:
        ValueError: the sender did not tell.
    """
    if payload.counts is None:
        raise ValueError("a client sent mixtures without counts")
    return float(payload.counts[payload.classes == label].item())
