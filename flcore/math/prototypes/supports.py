"""Class means of a few samples each (FedPG, Eq. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.io.messages import Prototypes
from flcore.math.prototypes.class_means import class_means


def support_means(
    features: Tensor, labels: Tensor, num_classes: int, support: int, generator: torch.Generator
) -> Prototypes:
    """Return the mean feature of some samples of every class present; ``features`` [n, d], ``labels`` int64 [n].

    Of a class with more than ``support`` samples, that many are drawn with replacement (CPU generator); else all count.
    """
    own, chosen = labels.cpu(), [torch.zeros(0, dtype=torch.int64)]
    for label in range(num_classes):
        rows = (own == label).nonzero().flatten()
        drawn = torch.randint(len(rows), (support,), generator=generator) if len(rows) > support else slice(None)
        chosen.append(rows[drawn])
    support_rows = torch.cat(chosen).to(features.device)
    return class_means(features[support_rows], labels[support_rows], num_classes)
