"""What a run is scored on: the global test set, and each client's part of it (or of its own data)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flcore.errors import DataError
from flcore.experiment import Experiment


@dataclass(frozen=True)
class ScoredData:
    """Images and their labels.

    Attributes:
        images: uint8 [N, C, H, W]; the first ``num_shared`` are for the global model.
        labels: int64 [N].
        clients: of each client the rows that it is tested on.
        num_shared: n.
    """

    images: Tensor
    labels: Tensor
    clients: list[Tensor]
    num_shared: int

    @property
    def shared_labels(self) -> Tensor:
        """int64 [n]."""
        return self.labels[: self.num_shared]


def scored_data(experiment: Experiment) -> ScoredData:
    """Test data, or with ``evaluation.split: validation`` the clients' validation data.

    Raises:
        DataError: there is no validation sample.
    """
    dataset, partition = experiment.dataset, experiment.partition
    if experiment.config.evaluation.split == "validation":
        own = [torch.from_numpy(client.val.copy()) for client in partition.clients]
        held = torch.unique(torch.cat(own))
        if len(held) == 0:
            raise DataError("no client has a validation sample; raise partition.validation and partition again")
        rows = [torch.searchsorted(held, indices) for indices in own]
        return ScoredData(dataset.train.images[held], dataset.train.labels[held], rows, len(held))
    own = [torch.from_numpy(client.test.copy()) for client in partition.clients]
    size = len(dataset.test)
    if partition.test_source == "test":
        return ScoredData(dataset.test.images, dataset.test.labels, own, size)
    # Clients tested on their own data: those images stand behind the official test set.
    held = torch.cat(own)
    images = torch.cat([dataset.test.images, dataset.train.images[held]])
    labels = torch.cat([dataset.test.labels, dataset.train.labels[held]])
    rows = list(torch.split(torch.arange(size, size + len(held)), [len(indices) for indices in own]))
    return ScoredData(images, labels, rows, size)
