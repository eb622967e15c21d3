"""Class exemplars as a second classifier, and its fusion with the head (FedCSPC's knowledge prediction)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flcore.io.messages import Prototypes
from flcore.math.losses.vectors import unit_vectors
from flcore.math.prototypes.class_means import class_means

Fusion = Literal["softmax", "minmax", "authors"]


def best_means(projected: Tensor, labels: Tensor, right: Tensor, num_classes: int) -> Prototypes:
    """Return per class the mean of ``projected`` [n, d] over its ``right`` rows (bool [n]), or over all without one."""
    preferred = class_means(projected[right], labels[right], num_classes)
    everything = class_means(projected, labels, num_classes)
    means = torch.where(preferred.present.unsqueeze(1), preferred.means, everything.means)
    return Prototypes(means, everything.present)


def similarities(features: Tensor, exemplars: Prototypes | None) -> Tensor | None:
    """Return cosines [B, K] of features [B, d] to the exemplars, −∞ for missing classes; None without any exemplar."""
    if exemplars is None or not exemplars.present.any():
        return None
    cosines = unit_vectors(features) @ unit_vectors(exemplars.means).mT
    return cosines.masked_fill(~exemplars.present, -torch.inf)


def fuse(logits: Tensor, cosines: Tensor, share: float, temperature: float, form: Fusion) -> Tensor:
    """Mix the head's logits [B, K] with the exemplars' cosines [B, K], −∞ where missing, at least one finite per row.

    Args:
        share: λ_p, of the exemplars.
        temperature: of the cosines.
        form: ``softmax``: probabilities of both; ``minmax``: both scaled to [0, 1] per row, 0 for classes without an
            exemplar; ``authors``: logits with exp(cosine/temperature), both unscaled (their share is 0.9).
    """
    if form == "softmax":
        return (1 - share) * logits.softmax(1) + share * (cosines / temperature).softmax(1)
    if form == "minmax":
        return (1 - share) * to_unit_range(logits) + share * to_unit_range(cosines)
    return (1 - share) * logits + share * (cosines / temperature).exp()


def to_unit_range(values: Tensor) -> Tensor:
    """Scale rows of ``values`` [B, K] so that their finite entries fill [0, 1]; 0 for −∞ and for constant rows."""
    low = values.masked_fill(values == -torch.inf, torch.inf).amin(1, keepdim=True)
    span = values.amax(1, keepdim=True) - low
    return ((values - low) / torch.where(span > 0, span, 1.0)).clamp_min(0.0)
