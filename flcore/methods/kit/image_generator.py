"""A generator at the server; all clients receive its images in the next round. Shared machinery of FedPG."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flcore.core.optim import Adam
from flcore.core.params import Search, param
from flcore.core.rng import numpy_stream
from flcore.core.schedules import exponential
from flcore.io.messages import Count, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record, on_device
from flcore.math.generators.images import as_pixels, generated_pixels
from flcore.math.generators.networks import ImageGenerator, build_image_generator, draw_noise
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg
from flcore.methods.kit.server_training import Fitted, Moving, Terms, fit
from flcore.methods.kit.virtual_images import (
    VIRTUAL,
    as_input,
    class_major_labels,
    cycled_positions,
    global_features,
    pixel_map,
    virtual_context,
)
from flcore.models import extract_weights, load_weights

IMAGE_GENERATOR = Key("generator", Weights)
SHIPPING = Key("shipping", Count)
"""1 if the next round sends the virtual images, else 0."""

GENERATOR_BETAS = (0.5, 0.999)
"""Betas of Adam (fedpg.md section 5)."""


@dataclass(frozen=True)
class ImageGeneratorMethod(FedAvg):
    """FedAvg and a generator of images at the server; a method adds the two losses and says when images are sent."""

    n_virtual: int = param(
        64, "virtual images per class", low=1, search=Search(choices=(64, 128, 256, 512, 1024), when=lambda m: m.shows)
    )
    virtual_batch: int = param(
        64, "virtual images per local step", low=2, search=Search(choices=(16, 32, 64, 128), when=lambda m: m.shows)
    )
    virtual_dtype: Literal["float32", "uint8"] = param("float32", "how a virtual image's pixels travel")
    pixel_range: Literal["data", "authors"] = param(
        "data", "virtual images on the scale of the real ones, or taken for -1 to 1 as in the code"
    )
    generator: Literal["fc", "cnn"] = param(
        "fc", "fully connected, or convolutional", search=Search(choices=("fc", "cnn"), when=lambda m: m.shows)
    )
    noise_dim: int = param(512, "z, length of a noise vector", low=1)
    gen_steps: int = param(
        300, "generator's training steps in a round", low=0, search=Search(50, 1000, log=True, when=lambda m: m.shows)
    )
    gen_batch: int = param(128, "generated images per such step", low=2)
    gen_lr: float = param(
        2e-4, "Adam's initial rate", above=0, search=Search(2e-5, 2e-3, log=True, when=lambda m: m.trains_generator)
    )
    gen_decay: float = param(0.95, "factor of both learning rates per gen_decay_every steps", above=0, high=1)
    gen_decay_every: int = param(20, "steps between two decays", low=1)

    @property
    @abstractmethod
    def shows(self) -> bool:
        """True if clients use virtual images."""

    @property
    @abstractmethod
    def trains_generator(self) -> bool:
        """True if the generator is trained and used."""

    def architecture(self, setting: fl.FederationContext, seed: int = 0) -> ImageGenerator:
        return build_image_generator(
            self.generator, setting.num_classes, setting.image_shape, noise_dim=self.noise_dim, seed=seed
        )

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        seed = int(numpy_stream(setting.seed, "generator weights").integers(2**31))
        generator = extract_weights(self.architecture(setting, seed))
        return {**super().start_server(setting), IMAGE_GENERATOR: generator, SHIPPING: Count(0)}

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        message = super().broadcast(server, client, ctx)
        return {**message, VIRTUAL: server[VIRTUAL]} if server[SHIPPING].value else message

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        if VIRTUAL not in ctx.received:
            return {}
        images, labels = (ctx.received[VIRTUAL][name] for name in ("images", "labels"))
        return {"virtual": virtual_context(ctx.setting, images, labels, pixel_range=self.pixel_range)}

    def random_inputs(self, ctx: fl.ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        if VIRTUAL not in ctx.received:
            return {}
        size = ctx.setting.num_classes * self.n_virtual
        return {"virtual": cycled_positions(size, self.virtual_batch, steps, generator)}

    def fit_generator(
        self,
        held: Record,
        setting: fl.FederationContext,
        stream: torch.Generator,
        terms: Callable[[Tensor, Tensor], Terms],
        targets: tuple[Mapping[str, Tensor], float],
    ) -> tuple[Weights, Fitted]:
        """Train the generator for ``gen_steps`` steps through the frozen global model in evaluation mode.

        Args:
            held: server state, on the setting's device.
            setting: constants of the federation.
            stream: of noise and labels, which are uniform over all classes.
            terms: of the features [B, d] and labels [B] of generated images.
            targets: further leaves to train, which the terms read, and their learning rate; 0: constant.

        Raises:
            ArithmeticError: it diverged.
        """
        model = held[fl.MODEL].values
        network = self.architecture(setting).to(setting.device).train()
        load_weights(network, held[IMAGE_GENERATOR])
        scale, shift = pixel_map(setting, torch.float32, setting.device, self.pixel_range)

        def loss(batch: tuple[Tensor, Tensor]) -> Terms:
            noise, labels = batch
            images = as_input(as_pixels(network(noise, labels)), scale, shift)
            return terms(setting.network.features(images, model), labels)

        groups = [(dict(network.named_parameters()), self.gen_lr), targets]
        moving = [self._moving(values, rate) for values, rate in groups if rate > 0]
        fitted = fit(moving, self._inputs(setting, stream), loss, what="the generator", cure="method.gen_lr")
        return extract_weights(network), fitted

    def _moving(self, values: Mapping[str, Tensor], rate: float) -> Moving:
        optimizer = Adam(rate, betas=GENERATOR_BETAS, fused=True)
        return Moving(values, optimizer, exponential(rate, self.gen_decay, every=self.gen_decay_every))

    def _inputs(self, setting: fl.FederationContext, stream: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield noise [B, z] and uniform labels [B] of every step."""
        every = torch.randint(setting.num_classes, (self.gen_steps, self.gen_batch), generator=stream)
        for labels in every.to(setting.device):
            yield draw_noise(self.gen_batch, self.noise_dim, stream).to(setting.device), labels

    def new_images(
        self, held: Record, setting: fl.FederationContext, per_class: int, stream: torch.Generator
    ) -> Tensor:
        """Return pixels [C·n, ...] on 0 to 1, class by class; ``held`` is on the setting's device."""
        noise = draw_noise(setting.num_classes * per_class, self.noise_dim, stream).to(setting.device)
        labels = class_major_labels(setting.num_classes, noise)
        return generated_pixels(self.architecture(setting).eval(), held[IMAGE_GENERATOR], noise, labels)

    def virtual_set(self, held: Record, setting: fl.FederationContext, stream: torch.Generator) -> TensorDict:
        """Return ``n_virtual`` new images of every class, as transmitted."""
        images = self.new_images(held, setting, self.n_virtual, stream)
        if self.virtual_dtype == "uint8":
            images = (255 * images).round().to(torch.uint8)
        return TensorDict({"images": images, "labels": class_major_labels(setting.num_classes, images)})

    def virtual_images(self, server: Record, setting: fl.FederationContext) -> Tensor | None:
        return server[VIRTUAL]["images"] if VIRTUAL in server else None

    def generated_features(
        self, server: Record, setting: fl.FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        held = on_device(server.only(fl.MODEL, IMAGE_GENERATOR), setting.device)
        images = self.new_images(held, setting, count, generator)
        features = global_features(setting, images, held[fl.MODEL], self.pixel_range)
        return features, class_major_labels(setting.num_classes, images)
