"""The case ``bare`` of ``models``: ``python -m benchmarks.model_loop MODEL SHAPE WORK``, the last two as JSON.

A model of the registry in the loop of `workload.py`, with what one would write by hand: PyTorch's own dropout.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn

from benchmarks.work import CLASSES, Work, report
from benchmarks.workload import bare_rounds
from flcore.models import MODELS, Backbone, build_model


class Logits(nn.Module):
    """A model whose answer is the logits alone."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] to logits [B, K]."""
        logits: Tensor = self.model(images)[1]
        return logits


def plain_model(name: str, shape: tuple[int, int, int]) -> nn.Module:
    """A model of the registry as a module from images [B, C, H, W] to logits [B, K].

    Its layers are those of :func:`flcore.models.build_model`; where the model is given uniform numbers for its
    dropout, PyTorch's layers for that stand in their places.

    Raises:
        ValueError: a model with dropout whose places are not known here.
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
    raise ValueError(f"model.name = {name}: where its dropout stands is not written down here")


def main(name: str, shape: str, work: str) -> None:
    """Do the work and print what came of it."""
    torch.set_num_threads(1)
    channels, height, width = json.loads(shape)
    module = plain_model(name, (channels, height, width))
    report(*bare_rounds(Work(**json.loads(work)), module, (channels, height, width)))


if __name__ == "__main__":
    main(*sys.argv[1:])
