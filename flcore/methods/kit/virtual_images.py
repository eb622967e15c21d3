"""Virtual images on clients, for VHL (a fixed set) and FedPG (a new set every round).

Client loss on a real batch (x, y) and a virtual one (x', y') (fedpg.md section 4, baselines.md section 8), f the
features, SC the supervised contrastive loss over L2-normalised features, sg a constant:

    CE(x, y) + w · CE(x', y') + λ · [ SC(f(x) ∪ sg f(x')) + a · SC(f(x')) ].

Virtual images travel and are stored as pixels, float32 on 0 to 1 or uint8 on 0 to 255; mini-batches are normalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key
from flcore.math.losses.basic import cross_entropy
from flcore.math.losses.contrastive import supervised_contrastive
from flcore.methods import types as fl

PixelRange = Literal["data", "authors"]

VIRTUAL = Key("virtual", TensorDict)
"""``images`` [K·n, C, H, W] as pixels, class by class, equally many of each; FedPG's with ``labels`` int64 [K·n]."""

_BLOCK = 256  # images that go through a network at a time


def cycled_positions(size: int, batch: int, steps: int, generator: torch.Generator) -> Tensor:
    """Return rows int64 [``steps``, min(batch, size)] of mini-batches, cut from consecutive permutations of a set."""
    width = min(batch, size)
    rounds = -(-steps * width // size)
    rows = [torch.randperm(size, generator=generator) for _ in range(rounds)]
    chained = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    return chained[: steps * width].reshape(steps, width)


def class_major_labels(num_classes: int, images: Tensor) -> Tensor:
    """Return labels int64 [K·n] of images [K·n, ...] in class order."""
    return torch.arange(num_classes, device=images.device).repeat_interleave(len(images) // num_classes)


def pixel_map(
    setting: fl.FederationContext, dtype: torch.dtype, device: torch.device | str, pixel_range: PixelRange = "data"
) -> tuple[Tensor, Tensor]:
    """Return scale and shift [C, 1, 1] that turn virtual pixels into the model's input.

    Args:
        setting: has the statistics that normalise real images.
        dtype: of the pixels: uint8 on 0 to 255, floating on 0 to 1.
        device: of the result.
        pixel_range: ``data``: like real images. ``authors``: FedPG's code, which feeds real images as 0 to 1 and the
            generator's −1 to 1 as they are: a virtual pixel p is taken for 2p − 1.
    """
    unit = 1.0 if dtype.is_floating_point else 255.0
    span, offset = (2.0, -1.0) if pixel_range == "authors" else (1.0, 0.0)
    pairs = list(zip(setting.pixel_mean, setting.pixel_std, strict=True))
    scale = torch.tensor([span / (unit * std) for _, std in pairs], device=device)
    shift = torch.tensor([(offset - mean) / std for mean, std in pairs], device=device)
    return scale.view(-1, 1, 1), shift.view(-1, 1, 1)


def as_input(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return the model's input, float32, for pixels [B, C, H, W], as `flcore.data.images.normalise` computes it."""
    return torch.addcmul(shift, images.to(torch.float32), scale)


def virtual_context(
    setting: fl.FederationContext,
    images: Tensor,
    labels: Tensor,
    outputs: Tensor | None = None,
    pixel_range: PixelRange = "data",
) -> fl.LossInputs:
    """Return the constants of :class:`VirtualLoss` for images [N, C, H, W] as pixels with labels int64 [N].

    ``outputs`` int64 [N] are the head outputs for the labels; None: the labels.
    """
    scale, shift = pixel_map(setting, images.dtype, images.device, pixel_range)
    outputs = labels if outputs is None else outputs
    return {"images": images, "labels": labels, "outputs": outputs, "scale": scale, "shift": shift}


@torch.no_grad()
def global_features(
    setting: fl.FederationContext, images: Tensor, model: Weights, pixel_range: PixelRange = "data"
) -> Tensor:
    """Return features [N, d] of virtual images as they travel, by a model on their device."""
    scale, shift = pixel_map(setting, images.dtype, images.device, pixel_range)
    blocks = (as_input(block, scale, shift) for block in torch.split(images, _BLOCK))
    return torch.cat([setting.network.features(block, model.values) for block in blocks])


@dataclass(frozen=True)
class VirtualLoss:
    """A client's loss on real and virtual images; a term of weight 0 is not evaluated.

    Attributes:
        cross_entropy: w, weight of the virtual images' cross-entropy.
        contrast: λ, weight of the contrastive part. alone: a, share of virtual images alone in it.
        temperature: T. base_temperature: T0; None: as T.
        detach: whether virtual features are constants in the contrast with real ones.
        joint: one pass of the model for both kinds of images, which then share BatchNorm's statistics; else two.
    """

    cross_entropy: float
    contrast: float
    alone: float
    temperature: float
    base_temperature: float | None
    detach: bool
    joint: bool

    @property
    def is_on(self) -> bool:
        """True if the loss uses virtual images."""
        return self.cross_entropy > 0 or self.contrast > 0

    def terms(self, model: fl.LocalModel, batch: fl.Batch, virtual: fl.LossInputs) -> dict[str, Tensor]:
        """Return ``cross_entropy`` of the real batch, ``virtual`` cross-entropy and ``contrast``, weighted.

        Args:
            model: in training.
            batch: real images; random input ``virtual`` int64 [W] has the indices of the step's virtual images.
            virtual: from :func:`virtual_context`.
        """
        rows = batch.random_inputs["virtual"]
        images = as_input(virtual["images"][rows], virtual["scale"], virtual["shift"])
        labels, size = virtual["labels"][rows], len(batch.labels)
        handle = model.for_extra_inputs()
        if self.joint:
            both = model.features(torch.cat([batch.images, images]))
            real, made = both[:size], both[size:]
        else:
            real, made = model.features(batch.images), handle.features(images)
        terms = {"cross_entropy": cross_entropy(model.classify(real), batch.labels, batch.weight)}
        if self.cross_entropy > 0:
            logits = handle.classify(made)
            terms["virtual"] = self.cross_entropy * cross_entropy(logits, virtual["outputs"][rows])
        if self.contrast > 0:
            terms["contrast"] = self.contrast * self._contrast(real, made, batch, labels)
        return terms

    def _contrast(self, real: Tensor, made: Tensor, batch: fl.Batch, labels: Tensor) -> Tensor:
        weight = None if batch.weight is None else torch.cat([batch.weight, batch.weight.new_ones(len(labels))])
        members = torch.cat([real, made.detach() if self.detach else made])
        total = self._supervised(members, torch.cat([batch.labels, labels]), weight)
        return total + self.alone * self._supervised(made, labels, None) if self.alone > 0 else total

    def _supervised(self, features: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        return supervised_contrastive(
            features, labels, self.temperature, base_temperature=self.base_temperature, weight=weight
        )
