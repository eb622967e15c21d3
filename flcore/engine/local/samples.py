"""Sources of a phase's mini-batches: a client's samples, or inputs that the method made.

Images may come with *tables*, one row per sample: :meth:`flcore.methods.api.Method.per_sample_inputs`, or outputs of
:meth:`flcore.methods.api.Method.teachers`, looked up instead of computed in every step.
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
    """Inputs and labels of batches, on the device; concatenated over clients.

    Attributes:
        labels: int64 [n]. tables: by name, [n, ...].
    """

    @property
    def labels(self) -> Tensor: ...

    @property
    def tables(self) -> Mapping[str, Tensor]: ...

    def inputs(self, rows: Tensor) -> Tensor:
        """Return inputs [n, ...] at rows int64 [n]."""

    def raw_inputs(self, rows: Tensor) -> Tensor:
        """Return inputs likewise; images as uint8, before normalising."""


@dataclass
class ImageSamples:
    """Images of a stack, with the concatenated tables of its clients."""

    gathered: CohortSamples
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def labels(self) -> Tensor:
        return self.gathered.labels

    def inputs(self, rows: Tensor) -> Tensor:
        return self.gathered.images(rows)

    def raw_inputs(self, rows: Tensor) -> Tensor:
        return self.gathered.raw_images(rows)


@dataclass
class MadeSamples:
    """Inputs that the method made, such as pseudo-features."""

    made: Tensor
    labels: Tensor
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    def inputs(self, rows: Tensor) -> Tensor:
        return self.made.index_select(0, rows)

    raw_inputs = inputs


def phase_samples(
    phase: Phase, data: Sequence[ClientData], all_inputs: Sequence[LossInputs], tables: Mapping[str, Sequence[Tensor]]
) -> tuple[Samples, list[int]]:
    """Return the concatenated samples of a stack's clients in a phase, and the number of each client.

    Args:
        phase: its source: images, or a loss input.
        data: the clients' images, gathered together.
        all_inputs: loss inputs by client.
        tables: by name and client.
    """
    if phase.source is None:
        rows = {name: torch.cat(list(of_clients)) for name, of_clients in tables.items()}
        return ImageSamples(data[0].gathered, rows), [len(samples) for samples in data]
    made = [inputs[phase.source] for inputs in all_inputs]
    values, labels = (torch.cat([of_client[name] for of_client in made]) for name in ("inputs", "labels"))
    return MadeSamples(values, labels), [len(of_client["labels"]) for of_client in made]


def drawn_labels(labels: Tensor, sizes: Tensor, num_classes: int) -> Tensor:
    """Return int64 [A, C] on the CPU: how often each class was in each client's mini-batches.

    Args:
        labels: int64 [S, A, B], of S mini-batches of A clients.
        sizes: int64 [S, A] on the CPU; the first samples of a batch count, the rest is padding.
        num_classes: C.
    """
    _, clients, width = labels.shape
    real = (torch.arange(width) < sizes.unsqueeze(2)).to(labels.device, torch.int64)
    cells = labels + num_classes * torch.arange(clients, device=labels.device).unsqueeze(1)
    counts = torch.zeros(clients * num_classes, dtype=torch.int64, device=labels.device)
    counts.scatter_add_(0, cells.flatten(), real.flatten())
    return counts.reshape(clients, num_classes).cpu()
