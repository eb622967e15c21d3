"""The work in plain PyTorch, and the case ``bare``: a hand-written loop around it.

Environments of peers import this too, so that all train the same network on the same images with the same steps. It may
import torch, and of our modules only `work`.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.work import CLASSES, MEAN, SHAPE, SHAPES, STD, Work


def make_model(seed: int = 0, model: str = "fedgen_cnn") -> nn.Sequential:
    """Return a network of the registry, defined again here.

    ``fedgen_cnn`` has 26,434 parameters, 44 statistics and 2 counters; ``pfl_cnn`` 1,626,442 parameters, with PyTorch's
    initial values: they do not affect speed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if model == "pfl_cnn":
            return nn.Sequential(
                *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
                *(nn.Dropout(0.25), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, CLASSES)),
            )
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
            *(nn.Conv2d(6, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(784, 32), nn.Linear(32, CLASSES)),
        )


def make_images(number: int, shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Tensor]:
    """Return random images uint8 [N, C, H, W] and labels int64 [N]."""
    generator = torch.Generator().manual_seed(20261121)
    images = torch.randint(0, 256, (number, *shape), dtype=torch.uint8, generator=generator)
    return images, torch.arange(number) % CLASSES


@cache
def client_data(work: Work, shape: tuple[int, ...] | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return each client's normalised images float32 [n, C, H, W] and labels int64 [n]; made once per process."""
    images, labels = make_images(work.clients * work.samples, shape or SHAPES[work.model])
    normalised = (images.float() / 255 - MEAN) / STD
    parts = (torch.split(tensor, work.samples) for tensor in (normalised, labels))
    return list(zip(*parts, strict=True))


def write_inputs(work: Work, path: Path) -> None:
    """Write initial weights by name and all clients' images and labels as ``.npz``, for peers without torch."""
    images, labels = (torch.stack(tensors).numpy() for tensors in zip(*client_data(work), strict=True))
    weights: dict[str, Any] = {
        name: tensor.numpy() for name, tensor in make_model(model=work.model).state_dict().items()
    }
    np.savez(path, images=images, labels=labels, **weights)


def train_client(module: nn.Module, images: Tensor, labels: Tensor, work: Work, generator: torch.Generator) -> None:
    """Take ``work.steps`` steps of SGD in place, over shuffled passes."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=work.lr)
    taken = 0
    while taken < work.steps:
        for chosen in torch.split(torch.randperm(len(labels), generator=generator), work.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(module(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            taken += 1
            if taken == work.steps:
                return


def bare_rounds(
    work: Work, module: nn.Module | None = None, shape: tuple[int, ...] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Load, loop over clients and batches, average; return the seconds of each round and the final weights.

    Args:
        work: to do. module: images [B, C, H, W] of ``shape`` to logits [B, K]; default: from :func:`make_model`.
        shape: of an image; default: of the work's model.
    """
    data, module = client_data(work, shape), module or make_model(model=work.model)
    generator = torch.Generator().manual_seed(0)
    server = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    seconds = []
    for _ in range(work.rounds):
        begin = time.perf_counter()
        total: dict[str, Tensor] = {}
        for client in torch.randperm(work.clients, generator=generator)[: work.cohort].tolist():
            module.load_state_dict(server)
            images, labels = data[client]
            train_client(module, images, labels, work, generator)
            for name, tensor in module.state_dict().items():
                share = tensor.double() / work.cohort
                total[name] = total[name] + share if name in total else share
        server = {name: total[name].to(tensor.dtype) for name, tensor in server.items()}
        seconds.append(time.perf_counter() - begin)
    return seconds, server


def simulate(work: Work, inputs: str) -> tuple[list[float], dict[str, Tensor]]:
    """Do the work of the case ``bare``."""
    return bare_rounds(work)
