"""Class means of features (FedProto, Tan et al., AAAI 2022, Eq. 3; of a few samples each: FedPG, Eq. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.io.messages import Prototypes


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> Prototypes:
    """Return the mean feature of every class present: ``features`` float32 [n, d], ``labels`` int64 [n] in 0..K-1."""
    if features.is_cuda:  # where adding rows to places has no fixed order
        sums, counts = class_sums(features, labels, num_classes)
        return Prototypes((sums / counts.clamp_min(1).unsqueeze(1)).to(features.dtype), counts > 0)
    sums = features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)
    counts = torch.bincount(labels, minlength=num_classes)
    return Prototypes(sums / counts.clamp_min(1).unsqueeze(1), counts > 0)


def class_sums(
    features: Tensor, labels: Tensor, num_classes: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sums of features by class, float64 ``[..., K, d]``, and their numbers, float64 ``[..., K]``.

    A product with the one-hot membership: one order of summation on every device, and stacks work. ``features``
    [..., B, d], ``labels`` int64 [..., B], ``weight`` [..., B] with 0 for padding.
    """
    member = (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).double()
    if weight is not None:
        member = member * weight.unsqueeze(-1)
    return member.mT @ features.double(), member.sum(-2)
