"""The exchange of class prototypes: initialise, compute class means, release, aggregate, keep old ones.

A method defines how clients compute prototypes and how the server weighs them. Minimum counts, clipping, noise and the
account are the same for all; `flcore/math/prototypes/release.py` documents the protection and its limits.
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
from flcore.math.losses.basic import distances
from flcore.math.prototypes.class_means import class_means
from flcore.math.prototypes.release import (
    Unit,
    clip_to_norm,
    frequent_classes,
    noisy_means,
    noisy_vectors,
    privacy_spent,
)
from flcore.methods import types as fl
from flcore.methods.api import ValidatedParams

CLASS_COUNTS = Key("class_counts", TensorDict)
"""``held`` int64 [k]: a client's samples of the classes with a prototype in its message, in their order."""


@dataclass(frozen=True)
class ReleasesVectors(ValidatedParams):
    """Mixin for methods that send any number of vectors in feature space; protects all samples of a client at once.

    Attributes:
        covers: scope of the account in `metrics.json`, in words.
    """

    covers: ClassVar[str] = "prototypes alone; other payloads (weights, counts, classes held) are not protected"

    proto_clip: float | None = param(None, "largest norm of what prototypes are made of; null: any", above=0)
    proto_noise: float = param(0.0, "Gaussian noise on prototypes in units of their sensitivity", low=0)
    proto_delta: float = param(1e-5, "δ of the (ε, δ) account of noisy prototypes in metrics.json", above=0, below=1)

    def __post_init__(self) -> None:
        """Refuse noise without a bound on what it hides."""
        super().__post_init__()
        if self.proto_noise > 0 and self.proto_clip is None:
            raise ValueError("proto_noise needs proto_clip, the norm that the noise is measured against")

    def release_vectors(self, ctx: fl.ClientContext, vectors: Tensor) -> Tensor:
        """Return vectors [q, d], clipped and noisy if configured."""
        if self.bound is None:
            return vectors
        stream = ctx.stream("prototype noise")
        return noisy_vectors(vectors, stream, max_norm=self.bound, noise_multiplier=self.proto_noise)

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """Return (ε, δ) of the noisy prototypes alone; other payloads are not covered."""
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
        return True

    @property
    def protected(self) -> Unit:
        return "client"

    @property
    def bound(self) -> float | None:
        """Largest norm of the vectors that prototypes are made of; None for any."""
        return self.proto_clip

    @property
    def noise_multiplier(self) -> float:
        """Least standard deviation of the noise in units of the sensitivity; 0 without a guarantee."""
        return self.proto_noise


@dataclass(frozen=True)
class ReleasesPrototypes(ReleasesVectors):
    """Mixin for methods that send one prototype per class."""

    min_count: int = param(1, "samples that a class needs for its prototype to be sent", low=0)
    proto_unit: Literal["sample", "client"] = param(
        "sample", "what clipping and noise protect: one sample, or all of a client's"
    )

    @property
    def protected(self) -> Unit:
        return self.proto_unit

    def own_prototypes(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> Prototypes:
        return self.release(ctx, self.made_prototypes(ctx, trained), ctx.class_counts)

    def made_prototypes(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> Prototypes:
        """Return class means before :meth:`release`: by default in one pass after training."""
        return self.means_of(ctx, *trained.features())

    def means_of(self, ctx: fl.ClientContext, features: Tensor, labels: Tensor) -> Prototypes:
        """Return class means of features [n, d] with labels int64 [n], clipped as their release assumes."""
        if self.bound is not None and self.protected == "sample":
            features = clip_to_norm(features, self.bound)
        return class_means(features, labels, ctx.setting.num_classes)

    def release(self, ctx: fl.ClientContext, own: Prototypes, counts: Tensor) -> Prototypes:
        """Return prototypes of at least ``min_count`` samples (``counts`` int64 [K]), clipped and noisy if configured.

        The protection of one sample requires prototypes from :meth:`means_of`.
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
    """Mixin for prototypes that may also average the features computed in training, as authors' codes do.

    Attributes:
        RUNNING: mini-batches to average: all, or as many as the last local epoch has.
    """

    RUNNING: ClassVar[Literal["all", "last_pass"]] = "last_pass"

    proto_mode: Literal["final", "running"] = param(
        "final", "class means of the trained model, or of mini-batches' features during training"
    )

    def __post_init__(self) -> None:
        """Refuse a bound for one sample: running prototypes contain a sample several times, by different models."""
        super().__post_init__()
        if self.proto_mode == "running" and self.bound is not None and self.protected == "sample":
            raise ValueError(
                "proto_unit = sample clips the features of single samples once, which running prototypes have several "
                "times; set proto_mode = final or proto_unit = client"
            )

    def phases(self) -> tuple[fl.Phase, ...]:
        return (
            fl.Phase(
                record_features=self.RUNNING if self.proto_mode == "running" and self.sends_prototypes else "none"
            ),
        )

    def made_prototypes(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> Prototypes:
        return trained.recorded_means() if self.proto_mode == "running" else super().made_prototypes(ctx, trained)


def no_prototypes(setting: fl.FederationContext) -> dict[str, Prototypes]:
    """Return the initial server state: no class has a prototype."""
    return {fl.PROTOTYPES: Prototypes.empty(setting.num_classes, setting.feature_dim)}


def received_prototypes(ctx: fl.ClientContext) -> fl.LossInputs:
    """Return ``means`` [K, d] and ``present`` bool [K] of the global prototypes, for a loss."""
    prototypes = ctx.received[fl.PROTOTYPES]
    return {"means": prototypes.means, "present": prototypes.present}


def fused_prototypes(
    server: Record,
    replies: fl.Replies,
    ctx: fl.RoundContext,
    counts: Mapping[int, Tensor] | None = None,
    keep: bool = True,
) -> tuple[Record, fl.Metrics]:
    """Aggregate the uploads into one prototype per class by the rule of section ``aggregation``.

    Args:
        server: has the previous prototypes.
        replies: clients without prototypes are ignored.
        ctx: of the round.
        counts: client id to samples per class, int64 [K], as weights; None: every client weighs the same.
        keep: a class without uploads keeps its prototype; else it has none.
    """
    uploads, previous = replies.of(fl.PROTOTYPES), server[fl.PROTOTYPES]
    if not uploads:
        return server, {}
    if not keep:
        previous = Prototypes.empty(*previous.means.shape)
    fused, facts = fold_prototypes(uploads, previous, counts, ctx.setting.aggregation)
    return server | {fl.PROTOTYPES: fused}, facts


def counts_of_uploads(replies: fl.Replies, slot: Key[Prototypes] = fl.PROTOTYPES) -> dict[int, Tensor]:
    """Return client id to samples per class, int64 [K], from the :data:`CLASS_COUNTS` sent with prototypes."""
    reported, counts = replies.of(CLASS_COUNTS), {}
    for client, upload in replies.of(slot).items():
        counts[client] = torch.zeros(len(upload.present), dtype=torch.int64)
        counts[client][upload.present] = reported[client]["held"]
    return counts


def nearest_prototype(model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
    """Return minus the Euclidean distance of features to global prototypes [B, K]; logits if there are none.

    A class without prototype scores 1 less than the farthest. ``classes`` is unused.
    """
    features, prototypes = model.features(images), known[fl.PROTOTYPES]
    apart = distances(features, prototypes.means)
    farthest = apart.masked_fill(~prototypes.present, 0).amax(1, keepdim=True)
    nearest = -torch.where(prototypes.present, apart, farthest + 1)
    return torch.where(prototypes.present.any(), nearest, model.classify(features))
