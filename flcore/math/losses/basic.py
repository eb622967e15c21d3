"""Loss terms that several methods share.

All are batch means and shape-stable: a sample that does not count has weight 0, nothing branches on a tensor's value.
So the same function serves the serial loop and many clients at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of ``logits`` [B, K] against ``labels`` [B]; ``weight`` [B] is 0 for padded samples."""
    if weight is None:
        return F.cross_entropy(logits, labels)
    return weighted_mean(F.cross_entropy(logits, labels, reduction="none"), weight)


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Mean of ``values`` [B], or with weights their weighted mean; 0 when all weights are 0."""
    return values.mean() if weight is None else (values * weight).sum() / weight.sum().clamp_min(1e-12)


def proximal(params: Mapping[str, Tensor], anchor: Mapping[str, Tensor], mu: float) -> Tensor:
    """(mu/2)·||w - w_g||², summed over every trainable parameter (FedProx, Li et al. 2020, Eq. 2); buffers excluded."""
    squares = [(params[name] - anchor[name]).square().sum() for name in params]
    return 0.5 * mu * torch.stack(squares).sum()


def inner_product(params: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
    """⟨w, v⟩, summed over every trainable parameter: a term whose gradient is v itself; buffers excluded."""
    return torch.stack([(params[name] * direction[name]).sum() for name in params]).sum()


def anchor_distance(features: Tensor, labels: Tensor, anchors: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean over all K classes of the mean squared distance of a class's samples in the batch to its anchor.

    A class without a sample counts as 0. ``features`` [B, d], ``labels`` [B], ``anchors`` [K, d]; squares are summed
    over d. ``weight`` [B] is 0 for padded samples.
    """
    counted = torch.ones_like(features[:, 0]) if weight is None else weight
    same = (labels.unsqueeze(1) == labels.unsqueeze(0)).to(features.dtype)
    squared = (features - anchors[labels]).square().sum(1)
    return (squared * counted / (same @ counted).clamp_min(1)).sum() / len(anchors)
