"""VHL (Tang, Zhang, Shi, He, Han, Chu, ICML 2022): one fixed set of noise images, the same for all clients.

Virtual set: per class a random mean map, images around it (Gaussian; `flcore/generators/virtual.py`), sent once to
every client, at its first participation, as uint8 in order of classes (labels follow from the order).

Client, on B real and B_v virtual images: CE(x, y) + λ_v · CE(x', ỹ) + λ_a · [SC(f(x) ∪ sg f(x')) + a · SC(f(x'))], the
contrastive part (temperature 0.07) in the first ``align_epochs`` local passes only. Label ỹ of class c: its own output
C + c (``extra``), which can never win in a test, or c itself (``patch``); SC always means c. Server: FedAvg.

Choices of baselines.md section 8: the released script's form of the contrastive part (``feat_detach``, ``noise_supcon``
= 0.1; the configuration file says neither), λ_v = 1 (code 0.5), 200 images per class (code 5,000), one-channel noise
for one-channel data (the code repeats images to three channels). One pass for real and virtual images as in the code
(``passes: joint``): BatchNorm's statistics then mix both. With λ_v = 0 nothing tells virtual classes apart, and no
outputs are added. With both weights 0 the method is FedAvg, and nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flcore.generators.virtual import gaussian_virtual_images
from flcore.messages import Arrays, Weights
from flcore.methods.fedavg import FedAvg
from flcore.methods.virtual_images import (
    VirtualLoss,
    as_input,
    class_major_labels,
    cycled_positions,
    pixel_map,
    virtual_context,
)
from flcore.methods.vocabulary import Batch, Context, LocalModel, Setting, Stage, TrainedClient, Turn
from flcore.params import Search, param
from flcore.records import Record, payload_of
from flcore.rng import torch_stream


@dataclass(frozen=True)
class VHL(FedAvg):
    """FedAvg whose clients also learn from noise images, and pull real features to those of the same class."""

    name: ClassVar[str] = "vhl"
    summary: ClassVar[str] = "FedAvg with a fixed set of virtual noise images that all clients share"
    citation: ClassVar[str] = "Tang et al., ICML 2022"

    lambda_v: float = param(
        1.0, "λ_v, weight of the virtual images' cross-entropy; 0: off", low=0, search=Search(0.1, 2.0, log=True)
    )
    lambda_a: float = param(
        1.0, "λ_a, weight of the contrastive part; 0: off", low=0, search=Search(choices=(0.1, 1.0, 10.0))
    )
    label_style: Literal["extra", "patch"] = param(
        "extra", "virtual class c is a new output C + c of the head, or the output c"
    )
    per_class: int = param(200, "virtual images per class", low=1, search=Search(choices=(50, 200, 1000)))
    virtual_batch: int = param(128, "B_v, virtual images per local step", low=2, search=Search(choices=(32, 64, 128)))
    temperature: float = param(0.07, "T of the contrastive part", above=0, search=Search(0.05, 0.5, log=True))
    base_temperature: float | None = param(0.07, "T0: the contrastive part counts T/T0; null: as T", above=0)
    align_epochs: int = param(5, "local passes with the contrastive part, from the first", low=0)
    feat_detach: bool = param(
        True, "virtual features are constants in the contrast with real ones (released script)", switch=True
    )
    noise_supcon: float = param(0.1, "a, share of the contrast of virtual images alone (released script)", low=0)
    passes: Literal["joint", "separate"] = param(
        "joint", "real and virtual images pass the model together, as in the code, or apart"
    )
    map_size: int = param(8, "side of the random mean maps, in pixels", low=1)
    std: float = param(0.5, "deviation of an image from its class's mean map, in units of the map's", low=0)

    @property
    def client_loss(self) -> VirtualLoss:
        """What clients minimise."""
        return VirtualLoss(
            cross_entropy=self.lambda_v,
            contrast=self.lambda_a if self.align_epochs > 0 else 0.0,
            alone=self.noise_supcon,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            detach=self.feat_detach,
            joint=self.passes == "joint",
        )

    @property
    def has_extra_outputs(self) -> bool:
        """Whether the head has outputs of virtual classes."""
        return self.label_style == "extra" and self.lambda_v > 0

    def num_outputs(self, num_classes: int) -> int:
        """C, or 2C with outputs of virtual classes."""
        return 2 * num_classes if self.has_extra_outputs else num_classes

    def start_server(self, setting: Setting) -> Record:
        """The initial model, the virtual set, and who has it: nobody."""
        server = super().start_server(setting)
        if not self.client_loss.is_on:
            return server
        images = gaussian_virtual_images(
            setting.num_classes,
            self.per_class,
            setting.image_shape,
            torch_stream(setting.seed, "vhl images"),
            map_size=self.map_size,
            std=self.std,
        )
        holders = torch.zeros(setting.num_clients, dtype=torch.bool)
        return {**server, "virtual": Arrays({"images": images}), "holders": Arrays({"clients": holders})}

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The global model, and the virtual set for a client that does not have it."""
        message = super().broadcast(server, client, exchange)
        if "virtual" not in server or bool(payload_of(Arrays, server, "holders")["clients"][client]):
            return message
        return {**message, "virtual": server["virtual"]}

    def context(self, turn: Turn) -> Context:
        """The virtual set, received or kept."""
        if not self.client_loss.is_on:
            return {}
        images = _virtual_set(turn)["images"]
        labels = class_major_labels(turn.setting.num_classes, images)
        outputs = labels + turn.setting.num_classes if self.has_extra_outputs else labels
        return {"virtual": virtual_context(turn.setting, images, labels, outputs)}

    def draws(self, turn: Turn, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Which virtual images go with each step, and whether (1 or 0) it has the contrastive part."""
        loss = self.client_loss
        if not loss.is_on:
            return {}
        size = turn.setting.num_classes * self.per_class
        drawn = {"virtual": cycled_positions(size, self.virtual_batch, steps, generator)}
        if loss.contrast > 0:
            aligned = torch.arange(steps) < self.align_epochs * _steps_of_a_pass(turn)
            drawn["aligned"] = aligned.to(torch.float32)
        return drawn

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy of real and of virtual images, and the contrastive part while it lasts."""
        if "virtual" not in context:
            return super().loss(model, batch, context)
        terms = self.client_loss.terms(model, batch, context["virtual"])
        if "contrast" in terms:
            terms["contrast"] = batch.draws["aligned"] * terms["contrast"]
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The trained weights with n_k; the virtual set is remembered."""
        message, memory = super().reply(turn, trained)
        # An empty record leaves a memory as it is: the set is written once, unless something else was kept beside it.
        if not self.client_loss.is_on or set(turn.memory) == {"virtual"}:
            return message, memory
        return message, {**memory, "virtual": _virtual_set(turn)}

    def stages(self) -> Mapping[str, Stage]:
        """Aggregate, then note who has the virtual set."""
        return {**super().stages(), "note-holders": note_holders} if self.client_loss.is_on else super().stages()

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """The head's logits [B, C], without those of virtual classes."""
        logits = super().predict(model, images, server, classes)
        return logits[:, : logits.shape[1] // 2] if self.has_extra_outputs else logits

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Features of the first ``count`` virtual images of every class, by the global model."""
        if "virtual" not in server:
            return None
        images = payload_of(Arrays, server, "virtual")["images"]
        images = images.reshape(setting.num_classes, -1, *images.shape[1:])[:, :count].flatten(0, 1)
        scaled = as_input(images, *pixel_map(setting, images.dtype, images.device))
        features = setting.network.features(scaled, payload_of(Weights, server, "model").values)
        return features, class_major_labels(setting.num_classes, images)


def note_holders(server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
    """Who answered has received the virtual set, and kept it."""
    holders = payload_of(Arrays, server, "holders")["clients"].clone()
    holders[sorted(replies)] = True
    return {**server, "holders": Arrays({"clients": holders})}


def _virtual_set(turn: Turn) -> Arrays:
    return payload_of(Arrays, turn.inbox if "virtual" in turn.inbox else turn.memory, "virtual")


def _steps_of_a_pass(turn: Turn) -> int:
    """Mini-batches of one pass over the client's data; BatchNorm skips a last one of a single sample."""
    samples, size = int(turn.counts.sum()), turn.setting.batch_size
    steps = -(-samples // size)
    return steps - 1 if turn.setting.initial.buffers and samples % size == 1 else steps
