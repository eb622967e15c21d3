"""Clients' training samples in an exchange: indices, labels, and images that are normalised on first use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flcore.data.images import normalise
from flcore.experiment.experiment import Experiment

CACHE_BYTES = 256 * 2**20
"""Largest set of normalised images kept in memory; batches of larger sets are normalised one by one (same bits)."""

_BLOCK = 1024  # images that are normalised at a time


class CohortSamples:
    """Training samples of one client, or of several, concatenated, on the device.

    Attributes:
        experiment: the run.
        indices: int64 [n], of the training split.
        labels: int64 [n].
    """

    def __init__(self, experiment: Experiment, indices: Tensor) -> None:
        self.experiment = experiment
        self.indices = indices.to(experiment.config.engine.device)
        self.labels = experiment.resident_train.labels.index_select(0, self.indices)
        self._fits = 4 * len(indices) * math.prod(experiment.dataset.meta.shape) <= CACHE_BYTES
        self._normalised: Tensor | None = None
        self._requested = 0

    def images(self, positions: Tensor) -> Tensor:
        """Return normalised images at positions int64 [m]."""
        # All are normalised once as many were requested as there are: at most twice the optimal cost, and no copy for
        # training on a fifth of the images.
        self._requested += len(positions)
        if self._normalised is None and (not self._fits or self._requested <= len(self.indices)):
            return self._load(self.indices.index_select(0, positions))
        return self._all().index_select(0, positions)

    def raw_images(self, positions: Tensor) -> Tensor:
        """Return images uint8 [m, C, H, W] at positions int64 [m]."""
        return self.experiment.resident_train.images.index_select(0, self.indices.index_select(0, positions))

    def block(self, start: int, stop: int) -> Tensor:
        """Return normalised images of a range."""
        return self._all()[start:stop] if self._fits else self._load(self.indices[start:stop])

    def _all(self) -> Tensor:
        if self._normalised is None:
            # By blocks: the temporary tensors of normalising are as large as its result.
            whole = torch.empty(len(self.indices), *self.experiment.dataset.meta.shape, device=self.indices.device)
            for start in range(0, len(whole), _BLOCK):
                whole[start : start + _BLOCK] = self._load(self.indices[start : start + _BLOCK])
            self._normalised = whole
        return self._normalised

    def _load(self, indices: Tensor) -> Tensor:
        meta = self.experiment.dataset.meta
        return normalise(self.experiment.resident_train.images.index_select(0, indices), meta.mean, meta.std)


class ClientData:
    """One client's training samples in a round: a range of its stack's samples.

    Attributes:
        gathered: samples of the stack. offset: of the client's first one.
        labels: int64 [n], on the device.
    """

    def __init__(self, gathered: CohortSamples, offset: int, length: int) -> None:
        self.gathered, self.offset = gathered, offset
        self.labels = gathered.labels[offset : offset + length]

    @classmethod
    def of(cls, experiment: Experiment, clients: Sequence[int], round_number: int) -> list[ClientData]:
        """Return the samples of a stack's clients in a round."""
        indices = [experiment.training_indices(client, round_number) for client in clients]
        gathered, offset, parts = CohortSamples(experiment, torch.cat(indices)), 0, []
        for of_client in indices:
            parts.append(cls(gathered, offset, len(of_client)))
            offset += len(of_client)
        return parts

    def __len__(self) -> int:
        return self.labels.shape[0]

    def images(self, positions: Tensor) -> Tensor:
        """Return normalised images at the client's positions int64 [m]."""
        return self.gathered.images(positions + self.offset)

    def block(self, start: int, stop: int) -> Tensor:
        """Return normalised images of a range of the client's samples."""
        return self.gathered.block(self.offset + start, self.offset + stop)
