"""Clients' training samples in an exchange: indices, labels, and images that are normalised on first use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flcore.data.images import normalise
from flcore.experiment.experiment import Experiment

MOST_BYTES = 256 * 2**20
"""Normalised images that are held at once; of larger sets every mini-batch is normalised by itself (the same bits)."""

_BLOCK = 1024  # images that are normalised at a time


class CohortSamples:
    """Training samples of one client, or of several, concatenated, on the device.

    Attributes:
        experiment: the run.
        indices: int64 [n], of the training split.
        labels: int64 [n].
    """

    def __init__(self, experiment: Experiment, indices: Tensor, labels: Tensor | None = None) -> None:
        """Take the samples at ``indices`` int64 [n] of the training split; with their labels, or the experiment's."""
        self.experiment = experiment
        self.indices = indices.to(experiment.config.engine.device)
        self.labels = experiment.resident_train.labels.index_select(0, self.indices) if labels is None else labels
        self._fits = 4 * len(indices) * math.prod(experiment.dataset.meta.shape) <= MOST_BYTES
        self._normalised: Tensor | None = None
        self._asked = 0

    def images(self, positions: Tensor) -> Tensor:
        """Normalised images at positions int64 [m]; the same bits whether they are held or not."""
        # Training on a fifth of the images, or on each once, needs no copy of all: that is made once as many images
        # were requested as there are, which costs at most twice the optimum.
        self._asked += len(positions)
        if self._normalised is None and (not self._fits or self._asked <= len(self.indices)):
            return self._load(self.indices.index_select(0, positions))
        return self._all().index_select(0, positions)

    def stored(self, positions: Tensor) -> Tensor:
        """Return raw images uint8 [m, C, H, W] at positions int64 [m]."""
        return self.experiment.resident_train.images.index_select(0, self.indices.index_select(0, positions))

    def block(self, start: int, stop: int) -> Tensor:
        """Normalised images of a range."""
        return self._all()[start:stop] if self._fits else self._load(self.indices[start:stop])

    def _all(self) -> Tensor:
        if self._normalised is None:
            meta = self.experiment.dataset.meta
            # A block at a time: what normalising has on its way is as large as its result.
            whole = torch.empty(len(self.indices), *meta.shape, device=self.indices.device)
            for start in range(0, len(whole), _BLOCK):
                whole[start : start + _BLOCK] = self._load(self.indices[start : start + _BLOCK])
            self._normalised = whole
        return self._normalised

    def _load(self, indices: Tensor) -> Tensor:
        meta = self.experiment.dataset.meta
        return normalise(self.experiment.resident_train.images.index_select(0, indices), meta.mean, meta.std)


class ClientData:
    """One client's training samples in a round; a part of what its stack gathered.

    Attributes:
        labels: int64 [n], on the device.
        offset: where its samples begin in what the stack gathered.
        gathered: what the stack gathered.
    """

    def __init__(self, gathered: CohortSamples, offset: int, length: int) -> None:
        self.gathered, self.offset = gathered, offset
        self.labels = gathered.labels[offset : offset + length]

    @classmethod
    def of(cls, experiment: Experiment, clients: Sequence[int], round_number: int) -> list[ClientData]:
        """The samples of the clients of a stack in a round, gathered together."""
        return cls._gathered(experiment, [experiment.training_indices(client, round_number) for client in clients])

    @classmethod
    def together(cls, parts: Sequence[ClientData]) -> list[ClientData]:
        """Samples that were gathered apart, by runs on the same data, gathered together in the order given."""
        indices = [own.gathered.indices[own.offset : own.offset + len(own)] for own in parts]
        # Labels of poisoned clients depend on a run's seed.
        return cls._gathered(parts[0].gathered.experiment, indices, torch.cat([own.labels for own in parts]))

    @classmethod
    def _gathered(
        cls, experiment: Experiment, indices: Sequence[Tensor], labels: Tensor | None = None
    ) -> list[ClientData]:
        gathered = CohortSamples(experiment, torch.cat(list(indices)), labels)
        offsets = [0]
        for own in indices:
            offsets.append(offsets[-1] + len(own))
        return [cls(gathered, offset, len(own)) for offset, own in zip(offsets, indices, strict=False)]

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, positions: Tensor) -> Tensor:
        """Normalised images at the client's own positions int64 [m]."""
        return self.gathered.images(positions + self.offset)

    def block(self, start: int, stop: int) -> Tensor:
        """Normalised images of a range of the client's own samples, for forward passes."""
        return self.gathered.block(self.offset + start, self.offset + stop)
