"""The case ``bare`` of ``models``: a model of the registry in the loop of `workload`, with PyTorch's own dropout."""

from __future__ import annotations

import json

from torch import Tensor, nn

from benchmarks.work import CLASSES, Work
from benchmarks.workload import bare_rounds
from flcore.models import MODELS, Backbone, build_model


class Logits(nn.Module):
    """A model that returns only its logits."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, K]."""
        logits: Tensor = self.model(images)[1]
        return logits


def plain_model(name: str, shape: tuple[int, int, int]) -> nn.Module:
    """Return a model of the registry as a module from images [B, C, H, W] to logits [B, K].

    It shares its layers with :func:`flcore.models.build_model`; PyTorch's dropout replaces the given uniform numbers.

    Raises:
        ValueError: the model has dropout at positions unknown here.
    """
    model = build_model(MODELS[name](), shape, CLASSES)
    layers = list(model.encoder.children())
    if not model.dropout_shapes:
        return Logits(model)
    if name in ("fedproto_cnn", "femnist_cnn"):
        first, second, linear = layers
        return nn.Sequential(
            *(first, nn.MaxPool2d(2), nn.ReLU(), second, nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), linear, nn.ReLU(), nn.Dropout(0.5), model.head),
        )
    if name == "fedmlp_cnn":
        first, second, third, linear = layers
        return nn.Sequential(
            *(first, nn.MaxPool2d(2), nn.ReLU(), second, nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.ReLU()),
            *(third, nn.ReLU(), nn.Flatten(), linear, nn.ReLU(), model.head),
        )
    if name == "pfl_cnn":
        return nn.Sequential(*layers, nn.Dropout(0.25), model.projection, nn.Dropout(0.5), model.head)
    raise ValueError(f"model.name = {name}: the places of its dropout are not written down here")


def simulate(work: Work, shape: str) -> tuple[list[float], dict[str, Tensor]]:
    """Do the work; ``shape`` is an image's shape as JSON."""
    channels, height, width = json.loads(shape)
    return bare_rounds(work, plain_model(work.model, (channels, height, width)), (channels, height, width))
