"""Class means of features, and their mean over clients (FedProto, Tan et al., AAAI 2022, Eq. 3 and 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.messages import Prototypes


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> Prototypes:
    """The mean feature of every class present.

    Args:
        features: float32 ``[n, d]``.
        labels: int64 ``[n]`` in ``0..num_classes - 1``.
        num_classes: K, the number of rows of the result.
    """
    sums = features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)
    counts = torch.bincount(labels, minlength=num_classes)
    return Prototypes(sums / counts.clamp_min(1).unsqueeze(1), counts > 0)
