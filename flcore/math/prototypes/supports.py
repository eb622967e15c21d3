"""Class means of a few samples each (FedPG, Eq. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.io.messages import Prototypes
from flcore.math.prototypes.class_means import class_means


def support_means(
    features: Tensor, labels: Tensor, num_classes: int, support: int, generator: torch.Generator
) -> Prototypes:
    """The mean feature of some samples of every class present.

    Args:
        features: ``[n, d]`` of all samples.
        labels: int64 ``[n]``.
        num_classes: K.
        support: m: of a class with more samples, m are drawn with replacement; of the others all count.
        generator: a CPU generator.
    """
    own, chosen = labels.cpu(), [torch.zeros(0, dtype=torch.int64)]
    for label in range(num_classes):
        rows = (own == label).nonzero().flatten()
        drawn = torch.randint(len(rows), (support,), generator=generator) if len(rows) > support else slice(None)
        chosen.append(rows[drawn])
    support_rows = torch.cat(chosen).to(features.device)
    return class_means(features[support_rows], labels[support_rows], num_classes)
