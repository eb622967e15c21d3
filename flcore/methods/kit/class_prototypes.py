"""The exchange of class prototypes, written once: start, own means, release, fuse, keep the old.

A method that sends one vector per class says how its clients make them and how the server weighs them; what leaves a
client goes through :meth:`ReleasesPrototypes.release`, so that minimum counts, clipping, noise and the account are
there for every such method; vectors that are not one per class (of clusters, of mixtures) go through
:meth:`ReleasesVectors.release_vectors`. `flcore/math/prototypes/release.py` says what they protect, and what they do
not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.aggregation.prototypes import fold_prototypes
from flcore.core.params import param
from flcore.io.messages import Prototypes, TensorDict
from flcore.io.records import Key, Record
from flcore.math.losses.vectors import distances
from flcore.math.prototypes.class_means import class_means
from flcore.math.prototypes.release import (
    Unit,
    clip_to_norm,
    frequent_classes,
    noisy_means,
    noisy_vectors,
    privacy_spent,
)
from flcore.methods.api import ValidatedParams
from flcore.methods.types import (
    PROTOTYPES,
    ClientContext,
    FederationContext,
    LocalModel,
    LossInputs,
    Metrics,
    Phase,
    Replies,
    RoundContext,
    TrainedClient,
)

CLASS_COUNTS = Key("class_counts", TensorDict)
"""``held`` int64 [k]: a client's samples of the classes whose prototypes it sends, in their order."""


@dataclass(frozen=True)
class ReleasesVectors(ValidatedParams):
    """Parameters and steps of whoever sends vectors in feature space; to be mixed into a method.

    As it is, for vectors of any number (clusters, components), which protects all of a client's samples at once.

    Attributes:
        covers: what the account in `metrics.json` speaks of, in words.
    """

    covers: ClassVar[str] = "prototypes alone; whatever else is sent (weights, counts, classes held) is not protected"

    proto_clip: float | None = param(None, "largest norm of what prototypes are made of; null: any", above=0)
    proto_noise: float = param(0.0, "Gaussian noise on prototypes in units of their sensitivity", low=0)
    proto_delta: float = param(1e-5, "δ of the (ε, δ) account of noisy prototypes in metrics.json", above=0, below=1)

    def __post_init__(self) -> None:
        """Refuse noise without a bound on what it hides."""
        super().__post_init__()
        if self.proto_noise > 0 and self.proto_clip is None:
            raise ValueError("proto_noise needs proto_clip, the norm that the noise is measured against")

    def release_vectors(self, ctx: ClientContext, vectors: Tensor) -> Tensor:
        """Vectors [q, d] as they leave the client, all of a turn at once, clipped and noisy if asked for."""
        if self.bound is None:
            return vectors
        stream = ctx.stream("prototype noise")
        return noisy_vectors(vectors, stream, max_norm=self.bound, noise_multiplier=self.proto_noise)

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """(ε, δ) of the noisy prototypes alone; whatever else is sent is not covered."""
        if self.noise_multiplier == 0 or not self.sends_prototypes:
            return None
        return {
            "epsilon": privacy_spent(self.noise_multiplier, releases, self.proto_delta),
            "delta": self.proto_delta,
            "unit": self.protected,
            "releases": releases,
            "covers": self.covers,
        }

    @property
    def sends_prototypes(self) -> bool:
        """Whether prototypes leave a client at all."""
        return True

    @property
    def protected(self) -> Unit:
        """What clipping and noise protect."""
        return "client"

    @property
    def bound(self) -> float | None:
        """Largest norm of what prototypes are made of; None for any."""
        return self.proto_clip

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise in units of the sensitivity, at least; 0 where nothing can be promised."""
        return self.proto_noise


@dataclass(frozen=True)
class ReleasesPrototypes(ReleasesVectors):
    """Parameters and steps of whoever sends one prototype per class; to be mixed into a method."""

    min_count: int = param(1, "samples that a class needs for its prototype to be sent", low=0)
    proto_unit: Literal["sample", "client"] = param(
        "sample", "what clipping and noise protect: one sample, or all of a client's"
    )

    @property
    def protected(self) -> Unit:
        return self.proto_unit

    def own_prototypes(self, ctx: ClientContext, trained: TrainedClient) -> Prototypes:
        """A client's class means as they leave it."""
        return self.release(ctx, self.made_prototypes(ctx, trained), ctx.class_counts)

    def made_prototypes(self, ctx: ClientContext, trained: TrainedClient) -> Prototypes:
        """A client's class means as :meth:`release` takes them: here in one pass after training."""
        return self.means_of(ctx, *trained.features())

    def means_of(self, ctx: ClientContext, features: Tensor, labels: Tensor) -> Prototypes:
        """Class means of features [n, d] with labels int64 [n], made as their release assumes."""
        if self.bound is not None and self.protected == "sample":
            features = clip_to_norm(features, self.bound)
        return class_means(features, labels, ctx.setting.num_classes)

    def release(self, ctx: ClientContext, own: Prototypes, counts: Tensor) -> Prototypes:
        """Prototypes with at least ``min_count`` samples (``counts`` int64 [K]), clipped and noisy if asked for.

        For the protection of one sample they must come from :meth:`means_of`.
        """
        counts = counts.to(own.present.device)
        released = frequent_classes(own.present, counts, self.min_count)
        if self.bound is None:
            return Prototypes(torch.where(released.unsqueeze(1), own.means, 0.0), released)
        means = noisy_means(
            own.means,
            counts,
            released,
            ctx.stream("prototype noise"),
            max_norm=self.bound,
            noise_multiplier=self.proto_noise,
            unit=self.protected,
        )
        return Prototypes(means, released)


@dataclass(frozen=True)
class RunningPrototypes(ReleasesPrototypes):
    """For who may also average the features that training computes anyway, as authors' codes do; to be mixed in.

    Attributes:
        RUNNING: the mini-batches whose features these are: all, or as many as the last local epoch has.
    """

    RUNNING: ClassVar[Literal["all", "last_pass"]] = "last_pass"

    proto_mode: Literal["final", "running"] = param(
        "final", "class means of the trained model, or of mini-batches' features during training"
    )

    def __post_init__(self) -> None:
        """Refuse a bound for one sample, which running prototypes hold several times, by different models."""
        super().__post_init__()
        if self.proto_mode == "running" and self.bound is not None and self.protected == "sample":
            raise ValueError(
                "proto_unit = sample clips the features of single samples once, which running prototypes have several "
                "times; set proto_mode = final or proto_unit = client"
            )

    def phases(self) -> tuple[Phase, ...]:
        """One, whose features are noted where prototypes are made of them."""
        return (Phase(note=self.RUNNING if self.proto_mode == "running" and self.sends_prototypes else "none"),)

    def made_prototypes(self, ctx: ClientContext, trained: TrainedClient) -> Prototypes:
        """Of what was noted, or in one pass after training."""
        return trained.noted_means() if self.proto_mode == "running" else super().made_prototypes(ctx, trained)


def no_prototypes(setting: FederationContext) -> dict[str, Prototypes]:
    """What the server holds at the start: no class has a prototype."""
    return {PROTOTYPES: Prototypes.empty(setting.num_classes, setting.feature_dim)}


def received_prototypes(ctx: ClientContext) -> LossInputs:
    """``means`` [K, d] and ``present`` bool [K] of the global prototypes, for a loss."""
    prototypes = ctx.received[PROTOTYPES]
    return {"means": prototypes.means, "present": prototypes.present}


def fused_prototypes(
    server: Record,
    replies: Replies,
    ctx: RoundContext,
    counts: Mapping[int, Tensor] | None = None,
    *,
    keep: bool = True,
) -> tuple[Record, Metrics]:
    """The round's uploads into one prototype per class, as the section ``aggregation`` says; for a stage to return.

    Args:
        server: has the prototypes of before.
        replies: of those who answered; who sent none plays no part.
        ctx: the exchange under way.
        counts: client id to samples per class, int64 [K], as weights; None: every client weighs the same.
        keep: a class that nobody uploads keeps the prototype it had; else it has none.

    Returns:
        What the server holds then, and facts about the uploads (:func:`fold_prototypes`).
    """
    uploads, previous = replies.of(PROTOTYPES), server[PROTOTYPES]
    if not uploads:
        return server, {}
    if not keep:
        previous = Prototypes.empty(*previous.means.shape)
    fused, facts = fold_prototypes(uploads, previous, counts, ctx.setting.aggregation)
    return server | {PROTOTYPES: fused}, facts


def counts_of_uploads(replies: Replies, slot: Key[Prototypes] = PROTOTYPES) -> dict[int, Tensor]:
    """Client id to samples per class, int64 [K], of those that sent :data:`CLASS_COUNTS` beside their prototypes."""
    told, counts = replies.of(CLASS_COUNTS), {}
    for client, upload in replies.of(slot).items():
        counts[client] = torch.zeros(len(upload.present), dtype=torch.int64)
        counts[client][upload.present] = told[client]["held"]
    return counts


def nearest_prototype(model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
    """Minus the Euclidean distance of each image's feature to each global prototype [B, K]; logits before there is one.

    A class without prototype scores 1 less than the farthest. ``classes`` plays no part.
    """
    features, prototypes = model.features(images), known[PROTOTYPES]
    apart = distances(features, prototypes.means)
    farthest = apart.masked_fill(~prototypes.present, 0).amax(1, keepdim=True)
    nearest = -torch.where(prototypes.present, apart, farthest + 1)
    return torch.where(prototypes.present.any(), nearest, model.classify(features))
