"""Data to score on: the global test set, and each client's part of it (or of its own data)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flcore.core.errors import DataError
from flcore.experiment.experiment import Experiment


@dataclass(frozen=True)
class ScoredData:
    """Images and their labels.

    Attributes:
        images: uint8 [N, C, H, W]; the first ``num_shared`` are for the global model.
        labels: int64 [N].
        clients: test rows by client.
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


def eval_data(experiment: Experiment) -> ScoredData:
    """Return test data, or with ``evaluation.split: validation`` the clients' validation data.

    Where clients are writers or users (``by_group``), the global model is tested on the merged test samples of
    participating ones only (data.md, section 1.3).

    Raises:
        DataError: there is no validation sample, or no participating writer or user has a test sample.
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
    shared = _of_participants(experiment)
    if shared is None and partition.test_source == "test":
        return ScoredData(dataset.test.images, dataset.test.labels, own, len(dataset.test))
    images, labels = dataset.test.images, dataset.test.labels
    if shared is not None:
        images, labels = images[shared], labels[shared]
    # Clients' test rows follow the shared ones.
    of_clients = dataset.train if partition.test_source == "train" else dataset.test
    size, held = len(labels), torch.cat(own)
    images = torch.cat([images, of_clients.images[held]])
    labels = torch.cat([labels, of_clients.labels[held]])
    rows = list(torch.split(torch.arange(size, size + len(held)), [len(indices) for indices in own]))
    return ScoredData(images, labels, rows, size)


def _of_participants(experiment: Experiment) -> Tensor | None:
    """Return test rows of the writers or users that some client trains on; None: all rows."""
    train, test = experiment.dataset.train, experiment.dataset.test
    if experiment.partition.parameters.get("name") != "by_group" or train.groups is None or test.groups is None:
        return None
    samples = torch.cat([torch.from_numpy(client.train.copy()) for client in experiment.partition.clients])
    rows = torch.isin(test.groups, train.groups[samples]).nonzero().flatten()
    if len(rows) == 0:
        raise DataError("by_group: none of the drawn writers or users has a test sample; draw more clients")
    return rows
