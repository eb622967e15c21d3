"""VHL (Tang, Zhang, Shi, He, Han, Chu, ICML 2022): one fixed set of noise images, the same for all clients.

Virtual set: per class a random mean map and images around it, or images of an untrained StyleGAN2 from latents around a
mean of the class (`flcore/math/generators/`: the code has both, and the paper's results are of the latter). It is sent
once to every client, at its first participation, as uint8 in order of classes (labels follow from the order). It is
drawn from the seed and not stored; the server only records which clients have received it.

Client, on B real and B_v virtual images: CE(x, y) + λ_v · CE(x', ỹ) + λ_a · [SC(f(x) ∪ sg f(x')) + a · SC(f(x'))], the
contrastive part (temperature 0.07) in the first ``align_epochs`` local passes only. Label ỹ of class c: its own output
C + c (``extra``), which can never win in a test, or c itself (``patch``); SC always means c. Server: FedAvg.

Choices of baselines.md section 8: the released script's form of the contrastive part (``feat_detach``, ``noise_supcon``
= 0.1; the configuration file says neither), λ_v = 1 (code 0.5), 200 images per class (code 5,000), one-channel noise
for one-channel data (the code repeats images to three channels). One pass for real and virtual images as in the code
(``passes: joint``): BatchNorm's statistics then mix both. With λ_v = 0 no term distinguishes virtual classes, and no
outputs are added. With both weights 0 the method is FedAvg, and sends no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.core.rng import torch_stream
from flcore.io.messages import TensorDict
from flcore.io.records import Key, Payloads, Record, on_device
from flcore.math.generators.images import gaussian_virtual_images
from flcore.math.generators.style import style_virtual_images
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg
from flcore.methods.kit.preset import AuthorsPreset
from flcore.methods.kit.virtual_images import (
    VIRTUAL,
    VirtualLoss,
    class_major_labels,
    cycled_positions,
    global_features,
    virtual_context,
)

HOLDERS = Key("holders", TensorDict)
"""``clients`` bool [K]: whether a client has received the virtual set."""


@dataclass(frozen=True)
class VHL(
    AuthorsPreset,
    FedAvg,
    name="vhl",
    citation="Tang et al., ICML 2022",
    reduces_to_fedavg={"lambda_v": 0.0, "lambda_a": 0.0},
):
    """FedAvg with a fixed set of virtual noise images that all clients share."""

    AUTHORS: ClassVar[Mapping[str, Any]] = {"lambda_v": 0.5, "per_class": 5000}

    lambda_v: float = param(
        1.0, "λ_v, weight of the virtual images' cross-entropy; 0: off", low=0, search=Search(0.1, 2.0, log=True)
    )
    lambda_a: float = param(
        1.0, "weight λ_a of contrast", low=0, search=Search(choices=(0.1, 1.0, 10.0), when=lambda m: m.align_epochs > 0)
    )
    label_style: Literal["extra", "patch"] = param(
        "extra", "virtual class c is a new output C + c of the head, or the output c"
    )
    per_class: int = param(
        200, "virtual images per class", low=1, search=Search(choices=(50, 200, 1000), when=lambda m: m.shows)
    )
    virtual_batch: int = param(
        128, "B_v, virtual images per local step", low=2, search=Search(choices=(32, 64, 128), when=lambda m: m.shows)
    )
    temperature: float = param(
        0.07, "T of the contrastive part", above=0, search=Search(0.05, 0.5, log=True, when=lambda m: m.aligns)
    )
    base_temperature: float | None = param(0.07, "T0: the contrastive part counts T/T0; null: as T", above=0)
    align_epochs: int = param(5, "local passes with the contrastive part, from the first", low=0)
    feat_detach: bool = param(
        True, "virtual features are constants in the contrast with real ones (released script)", switch=True
    )
    noise_supcon: float = param(0.1, "a, share of the contrast of virtual images alone (released script)", low=0)
    passes: Literal["joint", "separate"] = param(
        "joint", "real and virtual images pass the model together, as in the code, or apart"
    )
    images: Literal["gaussian", "stylegan"] = param(
        "gaussian", "virtual images: around a random mean map of the class, or of an untrained StyleGAN2"
    )
    map_size: int = param(8, "side of the random mean maps, in pixels", low=1)
    std: float = param(0.5, "deviation from the class's mean map (or latent), in units of the map's", low=0)

    @property
    def aligns(self) -> bool:
        return self.lambda_a > 0 and self.align_epochs > 0

    @property
    def shows(self) -> bool:
        return self.lambda_v > 0 or self.aligns

    @property
    def client_loss(self) -> VirtualLoss:
        return VirtualLoss(
            cross_entropy=self.lambda_v,
            contrast=self.lambda_a if self.aligns else 0.0,
            alone=self.noise_supcon,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            detach=self.feat_detach,
            joint=self.passes == "joint",
        )

    @property
    def has_extra_outputs(self) -> bool:
        return self.label_style == "extra" and self.lambda_v > 0

    def num_outputs(self, num_classes: int) -> int:
        return 2 * num_classes if self.has_extra_outputs else num_classes

    def virtual_set(self, setting: fl.FederationContext) -> Tensor:
        """Return uint8 [C·M, ...] on the setting's device, class by class."""
        return _virtual_set(self, setting.seed, setting.num_classes, setting.image_shape, setting.device)

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        holders = TensorDict({"clients": torch.zeros(setting.num_clients, dtype=torch.bool)})
        return {**super().start_server(setting), **({HOLDERS: holders} if self.client_loss.is_on else {})}

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        message = super().broadcast(server, client, ctx)
        if not self.client_loss.is_on or bool(server[HOLDERS]["clients"][client]):
            return message
        return {**message, VIRTUAL: TensorDict({"images": self.virtual_set(ctx.setting)})}

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        if not self.client_loss.is_on:
            return {}
        images = self.virtual_set(ctx.setting)
        labels = class_major_labels(ctx.setting.num_classes, images)
        outputs = labels + ctx.setting.num_classes if self.has_extra_outputs else labels
        return {"virtual": virtual_context(ctx.setting, images, labels, outputs)}

    def random_inputs(self, ctx: fl.ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        loss = self.client_loss
        if not loss.is_on:
            return {}
        size = ctx.setting.num_classes * self.per_class
        drawn = {"virtual": cycled_positions(size, self.virtual_batch, steps, generator)}
        if loss.contrast > 0:
            drawn["aligned"] = (torch.arange(steps) < self.align_epochs * ctx.steps_per_pass).to(torch.float32)
        return drawn

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        if "virtual" not in inputs:
            return super().loss(model, batch, inputs)
        terms = self.client_loss.terms(model, batch, inputs["virtual"])
        if "contrast" in terms:
            terms["contrast"] = batch.random_inputs["aligned"] * terms["contrast"]
        return terms

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        own: dict[str, fl.ServerStep] = {"note-holders": note_holders} if self.client_loss.is_on else {}
        return {**super().server_steps(), **own}

    def predict(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        logits = super().predict(model, images, known, classes)
        return logits[:, : logits.shape[1] // 2] if self.has_extra_outputs else logits

    def virtual_images(self, server: Record, setting: fl.FederationContext) -> Tensor | None:
        return self.virtual_set(setting) if self.client_loss.is_on else None

    def generated_features(
        self, server: Record, setting: fl.FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Return features of the first ``count`` virtual images of every class, by the global model."""
        if not self.client_loss.is_on:
            return None
        images = self.virtual_set(setting)
        images = images.reshape(setting.num_classes, -1, *images.shape[1:])[:, :count].flatten(0, 1)
        model = on_device(server.only(fl.MODEL), setting.device)[fl.MODEL]
        return global_features(setting, images, model), class_major_labels(setting.num_classes, images)


def note_holders(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Record that the clients that answered have the virtual set."""
    holders = server[HOLDERS]["clients"].clone()
    holders[list(replies)] = True
    return server | {HOLDERS: TensorDict({"clients": holders})}, {}


@lru_cache(maxsize=2)
def _virtual_set(method: VHL, seed: int, num_classes: int, shape: tuple[int, int, int], device: str) -> Tensor:
    """Draw the set once in a process, so that all clients share one tensor."""
    stream, size = torch_stream(seed, "vhl images"), (num_classes, method.per_class, shape)
    if method.images == "stylegan":
        return style_virtual_images(*size, stream, std=method.std).to(device)
    return gaussian_virtual_images(*size, stream, map_size=method.map_size, std=method.std).to(device)
