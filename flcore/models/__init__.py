"""Models by name, and the one way to build them."""

from __future__ import annotations

from typing import Protocol

import torch

from flcore.models.base import Backbone, Noise, extract_weights, load_weights
from flcore.models.cnn import FedCspcCnn, FedGenCnn, FedProtoCnn
from flcore.models.resnet import ResNet18

__all__ = [
    "MODELS",
    "Backbone",
    "ModelSpec",
    "Noise",
    "build_model",
    "extract_weights",
    "load_weights",
]


class ModelSpec(Protocol):
    """A model's hyper-parameters, able to build it."""

    @property
    def name(self) -> str:
        """The registry's name."""

    @property
    def summary(self) -> str:
        """One line: the architecture and who uses it."""

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        """Assemble the network for images of ``shape`` (C, H, W)."""


MODELS: dict[str, type] = {spec.name: spec for spec in (FedGenCnn, FedProtoCnn, FedCspcCnn, ResNet18)}


def build_model(spec: ModelSpec, shape: tuple[int, int, int], num_classes: int, seed: int = 0) -> Backbone:
    """Build a model with PyTorch's default initialisation, as a function of ``seed`` alone.

    PyTorch initialises from the global generator; it is forked and put back, so that building a model disturbs nobody.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return spec.build(shape, num_classes)
