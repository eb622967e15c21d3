"""FedDecorr's penalty on correlated dimensions of features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scaling = Literal["code", "paper"]

_LEAST_VARIANCE = 1e-8
"""Added to each dimension's variance: a constant one, as after a dead ReLU, stays at 0."""


def correlation_penalty(features: Tensor, *, scaling: Scaling = "code", weight: Tensor | None = None) -> Tensor:
    """Return the correlation of the dimensions of a batch's features [B, d], a scalar; 0 for one sample or none.

    With Z the features, each dimension shifted to mean 0 and divided by its unbiased deviation over the B samples:

    - ``paper``: ‖ZᵀZ/(B − 1)‖² / d², the mean square of all entries of the correlation matrix;
    - ``code``: the mean square of the off-diagonal entries of ZᵀZ, divided by B: about (B − 1)²/B times that.

    ``weight`` [B] is 0 for padding, which is not part of B; None for all.
    """
    counted = torch.ones_like(features[:, 0]) if weight is None else weight.to(features.dtype)
    member, count = counted.unsqueeze(1), counted.sum().clamp_min(1)
    degrees = (count - 1).clamp_min(1)
    centred = (features - (features * member).sum(0) / count) * member
    standardised = centred * (centred.square().sum(0) / degrees + _LEAST_VARIANCE).rsqrt()
    products = standardised.mT @ standardised
    dim = features.shape[1]
    if scaling == "paper":
        return (products / degrees).square().sum() / dim**2
    off_diagonal = 1 - torch.eye(dim, dtype=products.dtype, device=products.device)
    return (products * off_diagonal).square().sum() / (max(dim * (dim - 1), 1) * count)
