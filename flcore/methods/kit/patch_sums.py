"""A dictionary of patches from sums over clients: the first exchanges of all methods on `patch_dictionary`.

1. ``patch-moments``: sum and second moment of a client's patches. Server ``whiten``: mean m, W = U (L + ε·mean
   L)^(-1/2) Uᵀ of the covariance ULUᵀ; K Gaussian directions a_k, not clients' patches.
2. ``dictionary-1`` … ``-s``, spherical k-means: a client receives the filters W a_k; each patch x goes to the filter
   with the largest |a_kᵀW(x − m)|; it sends the signed sum of its patches per filter. Server ``fit-dictionary``: a_k ←
   the whitened sums, normalised; an atom without patches stays.

W stays at the server, and sums of patches travel as they are: W Σ±(x − m) = W(Σ±x − m Σ±1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.core.rng import torch_stream
from flcore.io.messages import Payload, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.prototypes import dictionary
from flcore.math.prototypes.gaussians import from_upper_triangles, upper_triangles
from flcore.math.prototypes.release import clip_to_norm
from flcore.methods import types as fl
from flcore.methods.kit.noisy_sums import NoisySums
from flcore.models.base import Backbone
from flcore.models.patch_dictionary import PatchFeatures

DICTIONARY = ("encoder.dictionary.weight", "encoder.dictionary.bias")
"""The convolution's parameters, [K, C, p, p] and [K]."""

FILTERS = Key("filters", Weights)
"""The dictionary as a convolution."""

PATCH_MOMENTS = Key("patch_moments", TensorDict)
"""A client's n patches: ``count`` int64 [1], ``sum`` [d], ``second`` [d(d + 1)/2]; with ``balance`` also ``classes``
int64 [C]."""

ASSIGNED = Key("assigned_patches", TensorDict)
"""``sums`` [K, d]: patches by filter, with the sign of their product; ``signs`` [K]: the sums of these signs."""

WHITENING = Key("whitening", TensorDict)
"""At the server, float64: ``mean`` [d], ``matrix`` [d, d], ``atoms`` [K, d]."""

CLASS_WEIGHTS = Key("class_weights", TensorDict)
"""``weights`` float64 [C]: weight of a sample by class."""

MOMENTS_LEG = "patch-moments"

ASKS_ONCE = "asks every client once and cannot follow tasks; set it to none, or take another method, such as protolda"
"""Reason to refuse a stream of tasks, for :attr:`flcore.methods.api.Method.task_stream_error`."""


@dataclass(frozen=True)
class PatchSums(NoisySums):
    """Fit a dictionary first; a subclass adds its exchanges, messages and server steps."""

    required_config: ClassVar[Mapping[str, tuple[Any, ...]]] = {"model.name": ("patch_dictionary",)}
    first_covers: ClassVar[str] = "patch moments, assigned patches, "

    eps: float = param(
        0.5,
        "ε, added to the whitening's eigenvalues in units of their mean",
        above=0,
        search=Search(0.01, 1.0, log=True),
    )
    steps: int = param(5, "s, steps of the dictionary's k-means; 0: random directions", low=0, search=Search(0, 20))
    stride: int = param(3, "positions between the patches that moments and k-means look at", low=1)
    balance: bool = param(False, "weight samples by one over the size of their class in the first round", switch=True)
    patch_clip: float = param(10.0, "largest norm of a patch, where noise is added", above=0)

    def __post_init__(self) -> None:
        """Refuse options that the account of noise does not cover."""
        super().__post_init__()
        if self.noise_multiplier and self.balance:
            raise ValueError("balance tells class counts without noise; use noise_multiplier = 0 with it")

    @property
    def first_messages(self) -> int:  # type: ignore[override]
        return 1 + self.steps

    def first_legs(self) -> tuple[fl.Exchange, ...]:
        steps = (
            fl.Exchange(f"dictionary-{step}", phases=(), server_steps=("fit-dictionary",))
            for step in range(1, self.steps + 1)
        )
        return (fl.Exchange(MOMENTS_LEG, phases=(), server_steps=("whiten",)), *steps)

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return {} if ctx.exchange == MOMENTS_LEG else server.only(FILTERS)

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        setting = ctx.setting
        images = trained.images(setting.network.call(partial(_rows, setting.image_shape, self.stride), {}))
        if ctx.exchange == MOMENTS_LEG:
            return {PATCH_MOMENTS: self.patch_moments(ctx, images)}, ctx.client_state
        return {ASSIGNED: self.assigned(ctx, images)}, ctx.client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"whiten": self.whiten, "fit-dictionary": self.fit_dictionary}

    def patch_moments(self, ctx: fl.ClientContext, images: Iterable[Tensor]) -> TensorDict:
        """Return number, sum and second moment of patches at every ``stride``-th position.

        With noise: an image has L patches of norm at most ``patch_clip``; replacing it moves the scaled pair of sums by
        at most L·√(2² + 2), second moments being positive.
        """
        moments = dictionary.patch_moments(self._patches(ctx.setting, images))
        moved = math.sqrt(6) * moments.count / int(ctx.class_counts.sum())
        total = moments.total.cpu() + self._noise(ctx, "patch sums", moments.total.shape, moved * self.patch_clip)
        noise = self._symmetric(ctx, "patch moments", len(total), moved * self.patch_clip**2)
        arrays = {
            "count": torch.tensor([moments.count], dtype=torch.int64),
            "sum": self._sent(total),
            "second": self._sent(upper_triangles(moments.second.cpu() + noise)),
        }
        if self.balance:
            arrays["classes"] = ctx.class_counts
        return TensorDict(arrays)

    def assigned(self, ctx: fl.ClientContext, images: Iterable[Tensor]) -> TensorDict:
        """Return the patches summed by the filter of the largest product, with its sign.

        With noise: replacing an image moves the scaled sums of patches and signs by at most 2·√2·L.
        """
        weight, bias = (ctx.received[FILTERS].params[name] for name in DICTIONARY)
        found = dictionary.assigned_patches(self._patches(ctx.setting, images), weight.flatten(1), bias)
        moved = 2 * math.sqrt(2) * found.count / int(ctx.class_counts.sum())
        sums = found.sums.cpu() + self._noise(ctx, "assigned patches", found.sums.shape, moved * self.patch_clip)
        signs = found.signs.cpu() + self._noise(ctx, "assigned signs", found.signs.shape, moved)
        return TensorDict({"sums": self._sent(sums), "signs": self._sent(signs)})

    def _patches(self, setting: fl.FederationContext, images: Iterable[Tensor]) -> Iterator[Tensor]:
        for block in images:
            patches = setting.network.call(partial(_patches_of, block, self.stride), {})
            yield clip_to_norm(patches.mT, self.patch_clip).mT if self.noise_multiplier else patches

    def whiten(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Whiten patches, and draw directions. Metric: share of the patches' variance that ε leaves whitened."""
        setting, sent = ctx.setting, list(replies.of(PATCH_MOMENTS).values())
        moments = dictionary.merged_moments(
            dictionary.PatchMoments(
                int(own["count"]), own["sum"].double(), from_upper_triangles(own["second"].double())
            )
            for own in sent
        )
        mean, matrix, share = dictionary.whitening(moments, self.eps)
        count = len(setting.initial.params[DICTIONARY[1]])
        atoms = dictionary.random_atoms(count, len(mean), torch_stream(setting.seed, "dictionary"))
        made: dict[str, Payload] = _dictionary(atoms, mean, matrix, setting)
        if self.balance:
            sizes = torch.stack([own["classes"] for own in sent]).sum(0).double()
            # A class that comes later, with another task or client, has the mean weight: its size is unknown.
            weights = torch.where(sizes > 0, sizes.sum() / ((sizes > 0).sum() * sizes.clamp_min(1)), 1.0)
            made[CLASS_WEIGHTS] = TensorDict({"weights": weights})
        return server | made, {"whitened_share": share}

    def fit_dictionary(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Take a step of k-means. Metrics: turn of the atoms (mean of 1 − cosine), atoms without a patch."""
        sent = list(replies.of(ASSIGNED).values())
        sums, signs = (torch.stack([own[name].double() for own in sent]).sum(0) for name in ("sums", "signs"))
        before, mean, matrix = (server[WHITENING][name] for name in ("atoms", "mean", "matrix"))
        atoms, stayed = dictionary.moved_atoms(before, sums, signs, mean, matrix)
        facts = {"atoms_turned": float((1 - (atoms * before).sum(1)).mean()), "empty_atoms": float(stayed.sum())}
        return server | _dictionary(atoms, mean, matrix, ctx.setting), facts


def _rows(shape: tuple[int, int, int], stride: int, model: Backbone) -> int:
    encoder = model.encoder
    assert isinstance(encoder, PatchFeatures)  # as `required_config` says
    return encoder.rows(shape, stride)


def _patches_of(images: Tensor, stride: int, model: Backbone) -> Tensor:
    encoder = model.encoder
    assert isinstance(encoder, PatchFeatures)  # as `required_config` says
    return encoder.patches(images, stride)


def _dictionary(atoms: Tensor, mean: Tensor, matrix: Tensor, setting: fl.FederationContext) -> dict[str, Payload]:
    filters = zip(DICTIONARY, dictionary.as_filters(atoms, mean, matrix), strict=True)
    like = setting.initial.params
    sent = {name: value.float().reshape(like[name].shape) for name, value in filters}
    return {WHITENING: TensorDict({"mean": mean, "matrix": matrix, "atoms": atoms}), FILTERS: Weights(sent)}
