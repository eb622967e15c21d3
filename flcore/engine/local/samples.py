"""Sources of a phase's mini-batches: a client's samples, or inputs that the method made.

With images may come *tables*, one row per sample: of what the client remembers of it
(:meth:`flcore.methods.api.Method.per_sample_inputs`), or of what a frozen model says of it, looked up instead of
computed in every step (:meth:`flcore.methods.api.Method.teachers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flcore.engine.client_data import ClientData, CohortSamples
from flcore.methods.types import LossInputs, Phase


class Samples(Protocol):
    """Inputs and labels of batches, on the device; those of several clients are concatenated."""

    @property
    def labels(self) -> Tensor:
        """int64 [n]."""

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """By name one row per sample, [n, ...]."""

    def inputs(self, rows: Tensor) -> Tensor:
        """Inputs [n, ...] at rows int64 [n]."""

    def stored(self, rows: Tensor) -> Tensor:
        """Likewise; but images as they are stored, uint8, which are not normalised yet."""


@dataclass
class ImageSamples:
    """Images that a stack gathered, with the concatenated tables of its clients."""

    gathered: CohortSamples
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def labels(self) -> Tensor:
        """int64 [n]."""
        return self.gathered.labels

    def inputs(self, rows: Tensor) -> Tensor:
        return self.gathered.images(rows)

    def stored(self, rows: Tensor) -> Tensor:
        return self.gathered.stored(rows)


@dataclass
class GivenSamples:
    """Inputs that the method made itself, such as pseudo-features."""

    given: Tensor
    labels: Tensor
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    def inputs(self, rows: Tensor) -> Tensor:
        return self.given.index_select(0, rows)

    def stored(self, rows: Tensor) -> Tensor:
        return self.inputs(rows)


def phase_samples(
    phase: Phase, data: Sequence[ClientData], all_inputs: Sequence[LossInputs], tables: Mapping[str, Sequence[Tensor]]
) -> tuple[Samples, list[int]]:
    """Return the concatenated samples of a stack's clients in a phase, and the number of each client.

    Args:
        phase: images, or a source of the method's own.
        data: the clients' samples, gathered together.
        contexts: loss inputs of the clients, with the method's own samples.
        tables: by name and client.
    """
    if phase.source is None:
        rows = {name: torch.cat(list(own)) for name, own in tables.items()}
        return ImageSamples(data[0].gathered, rows), [len(own) for own in data]
    given = [loss_inputs[phase.source] for loss_inputs in all_inputs]
    inputs, labels = (torch.cat([own[name] for own in given]) for name in ("inputs", "labels"))
    return GivenSamples(inputs, labels), [len(own["labels"]) for own in given]


def drawn_labels(labels: Tensor, sizes: Tensor, num_classes: int) -> Tensor:
    """int64 [A, C] on the CPU: how often each class was in each client's mini-batches.

    Args:
        labels: int64 [S, A, B], of the samples that S mini-batches of A clients hold.
        sizes: int64 [S, A] on the CPU: how many of each count, the first ones.
        num_classes: C.
    """
    _, clients, width = labels.shape
    real = (torch.arange(width) < sizes.unsqueeze(2)).to(labels.device, torch.int64)
    cells = labels + num_classes * torch.arange(clients, device=labels.device).unsqueeze(1)
    counts = torch.zeros(clients * num_classes, dtype=torch.int64, device=labels.device)
    counts.scatter_add_(0, cells.flatten(), real.flatten())
    return counts.reshape(clients, num_classes).cpu()
