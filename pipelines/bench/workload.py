"""The work of ``overhead`` in plain PyTorch, and ``bare``: the loop that one would write by hand around it.

Also loaded in the peers' environments, so that everybody trains the same network on the same images with the same
steps; it may import torch and nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SHAPE, MEAN, STD = 10, (1, 28, 28), 0.5, 0.3


@dataclass(frozen=True)
class Work:
    """How much: ``cohort`` of ``clients`` clients a round, each ``steps`` steps of ``batch_size`` of its samples."""

    clients: int = 20
    samples: int = 640
    cohort: int = 10
    steps: int = 20
    batch_size: int = 32
    lr: float = 0.05
    rounds: int = 50
    cores: int = 2

    @property
    def total_steps(self) -> int:
        """Mini-batches of the whole run."""
        return self.rounds * self.cohort * self.steps


def make_model(seed: int = 0) -> nn.Sequential:
    """The network that ``fedgen_cnn`` is, written down again: 26,434 parameters; 44 statistics, 2 counters."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
            *(nn.Conv2d(6, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(784, 32), nn.Linear(32, CLASSES)),
        )


def make_images(number: int, shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Tensor]:
    """Random images uint8 [N, C, H, W] and labels int64 [N]; speed does not depend on what images show."""
    generator = torch.Generator().manual_seed(20261121)
    images = torch.randint(0, 256, (number, *shape), dtype=torch.uint8, generator=generator)
    return images, torch.arange(number) % CLASSES


@cache
def client_data(work: Work) -> list[tuple[Tensor, Tensor]]:
    """Each client's normalised images float32 [n, 1, 28, 28] and labels int64 [n]; made once per process."""
    images, labels = make_images(work.clients * work.samples)
    normalised = (images.float() / 255 - MEAN) / STD
    parts = (torch.split(tensor, work.samples) for tensor in (normalised, labels))
    return list(zip(*parts, strict=True))


def train_client(module: nn.Module, images: Tensor, labels: Tensor, work: Work, generator: torch.Generator) -> None:
    """``work.steps`` steps of SGD in place, over shuffled passes."""
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


def bare_rounds(work: Work) -> list[float]:
    """Seconds of each round: load the weights, loop over clients and batches, average what comes back."""
    data, module = client_data(work), make_model()
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
    return seconds


def main() -> None:
    """The case ``bare``: the work as JSON on the command line, the seconds of the rounds as JSON on standard output."""
    torch.set_num_threads(1)
    print(json.dumps({"rounds": bare_rounds(Work(**json.loads(sys.argv[1])))}))
