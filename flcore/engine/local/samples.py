"""Where mini-batches come from: a client's images, or inputs that the method made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flcore.data.images import normalise
from flcore.experiment import Experiment


class Samples(Protocol):
    """Inputs and labels that batches are taken from, on the device."""

    def __len__(self) -> int:
        """How many."""

    def take(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, ...] and labels [n] at positions [n]."""


class ClientImages:
    """Training images of one client, or of several behind one another: normalised once where memory allows.

    Normalising is element-wise, so when it is done changes no bit.
    """

    _MOST_BYTES = 256 * 2**20

    def __init__(self, experiment: Experiment, indices: Tensor) -> None:
        """Take the samples at ``indices`` of the training set."""
        self._experiment = experiment
        self._indices = indices.to(experiment.config.engine.device)
        self._labels = experiment.resident_train.labels.index_select(0, self._indices)
        size = 4 * len(indices) * math.prod(experiment.dataset.meta.shape)
        self._normalised = self._load(self._indices) if size <= self._MOST_BYTES else None

    def _load(self, indices: Tensor) -> Tensor:
        meta = self._experiment.dataset.meta
        return normalise(self._experiment.resident_train.images.index_select(0, indices), meta.mean, meta.std)

    def __len__(self) -> int:
        """How many."""
        return len(self._indices)

    def take(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and labels at positions [n]."""
        labels = self._labels.index_select(0, positions)
        if self._normalised is None:
            return self._load(self._indices.index_select(0, positions)), labels
        return self._normalised.index_select(0, positions), labels


@dataclass(frozen=True)
class GivenSamples:
    """Inputs that the method made itself, such as pseudo-features."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """How many."""
        return len(self.labels)

    def take(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at positions [n]."""
        return self.inputs.index_select(0, positions), self.labels.index_select(0, positions)
