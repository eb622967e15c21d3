"""Loss terms that several methods share: batch means of fixed shape, for one client or a stack of many.

A sample that does not count has weight 0; nothing branches on a tensor's value.
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
    """Return (mu/2)·||w - w_g||² over all trainable parameters, buffers excluded (FedProx, Li et al. 2020, Eq. 2)."""
    squares = [(params[name] - anchor[name]).square().sum() for name in params]
    return 0.5 * mu * torch.stack(squares).sum()


def inner_product(params: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
    """Return ⟨w, v⟩ over all trainable parameters, buffers excluded: a term with gradient v."""
    return torch.stack([(params[name] * direction[name]).sum() for name in params]).sum()


def anchor_distance(features: Tensor, labels: Tensor, anchors: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean over K classes of the mean squared distance of a class's samples to its anchor.

    A class without a sample counts as 0. ``features`` [B, d], ``labels`` [B], ``anchors`` [K, d]; squares are summed
    over d. ``weight`` [B] is 0 for padding.
    """
    counted = torch.ones_like(features[:, 0]) if weight is None else weight
    same = (labels.unsqueeze(1) == labels.unsqueeze(0)).to(features.dtype)
    squared = (features - anchors[labels]).square().sum(1)
    return (squared * counted / (same @ counted).clamp_min(1)).sum() / len(anchors)
