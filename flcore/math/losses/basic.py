"""Loss terms and vector arithmetic that methods share: batch means of fixed shape, for one client or a stack of many.

A sample that does not count has weight 0; nothing branches on a tensor's value; gradients are finite everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.core.portable import square_root


def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of ``logits`` [B, K] against ``labels`` [B]; ``weight`` [B] is 0 for padding."""
    if weight is None:
        return F.cross_entropy(logits, labels)
    return weighted_mean(F.cross_entropy(logits, labels, reduction="none"), weight)


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of ``values`` [B], or with weights their weighted mean; 0 when all weights are 0."""
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

    A class without a sample counts as 0. ``features`` [B, d], ``labels`` [B], ``anchors`` [K, d], ``weight`` [B] with 0
    for padding; squares are summed over d.
    """
    counted = torch.ones_like(features[:, 0]) if weight is None else weight
    same = (labels.unsqueeze(1) == labels.unsqueeze(0)).to(features.dtype)
    squared = (features - anchors[labels]).square().sum(1)
    return (squared * counted / (same @ counted).clamp_min(1)).sum() / len(anchors)


# Below this squared norm a vector has no direction. Not smaller: the gradient of 1/norm goes with norm^-3, which must
# stay inside float32.
_SMALLEST_SQUARED_NORM = 1e-24


def safe_root(squares: Tensor) -> Tensor:
    """Return the square root, with gradient 0 instead of infinity at 0."""
    positive = squares > 0
    return torch.where(positive, square_root(torch.where(positive, squares, 1.0)), 0.0)


def euclidean_norm(vectors: Tensor) -> Tensor:
    """Return the L2 norm over the last dimension, ``[..., d]`` to ``[...]``; gradient 0 at the zero vector."""
    return safe_root(vectors.square().sum(-1))


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return ``vectors`` [..., d] divided by their L2 norm; a zero vector stays zero and gets gradient 0."""
    squared = vectors.square().sum(-1, keepdim=True)
    directed = squared > _SMALLEST_SQUARED_NORM
    return torch.where(directed, vectors * torch.where(directed, squared, 1.0).rsqrt(), 0.0)


def distances(rows: Tensor, columns: Tensor) -> Tensor:
    """Return Euclidean distances ``[n, m]`` of ``rows`` [n, d] and ``columns`` [m, d]; gradient 0 at distance 0.

    From differences: matrix products leave small distances between equal points, and depend on the block size.
    """
    return torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")


Scaling = Literal["code", "paper"]

_LEAST_VARIANCE = 1e-8
"""Added to each dimension's variance: a constant one, as after a dead ReLU, stays at 0."""


def correlation_penalty(features: Tensor, *, scaling: Scaling = "code", weight: Tensor | None = None) -> Tensor:
    """Return FedDecorr's correlation of the dimensions of features [B, d], a scalar; 0 for one sample or none.

    With Z the features, each dimension shifted to mean 0 and divided by its unbiased deviation over the B samples:

    - ``paper``: ‖ZᵀZ/(B − 1)‖² / d², the mean square of all entries of the correlation matrix;
    - ``code``: the mean square of the off-diagonal entries of ZᵀZ, divided by B: about (B − 1)²/B times that.

    ``weight`` [B] is 0 for padding, which is not part of B.
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


_GUARD = 1e-6  # added to the product of two norms


def linear_gradient(
    features: Tensor, labels: Tensor, classifier: Tensor, bias: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a linear classifier's gradients ``[K, d]`` and ``[K]`` of the mean cross-entropy (CReFF).

    Differentiable with respect to ``features`` [B, d], without a second-order graph. ``labels`` int64 [B],
    ``classifier`` [K, d], ``bias`` [K], ``weight`` [B] with 0 for padding.
    """
    classes = torch.arange(len(bias), device=labels.device)  # not F.one_hot, which looks at values and stops vmap
    errors = (features @ classifier.mT + bias).softmax(1) - (labels.unsqueeze(1) == classes).to(features.dtype)
    share = features.new_ones(len(labels)) if weight is None else weight
    errors = errors * (share / share.sum().clamp_min(1e-12)).unsqueeze(1)
    return errors.mT @ features, errors.sum(0)


def gradient_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Return CReFF's distance of two gradients: sum over output rows of 1 - cosine (Shang et al., IJCAI 2022).

    Both are ``[K, d]``, a bias ``[1, K]``; ``wanted`` is constant. A zero row counts 1 and has a finite gradient.
    """
    wanted = wanted.detach()
    cosines = (found * wanted).sum(1) / (euclidean_norm(found) * euclidean_norm(wanted) + _GUARD)
    return (1 - cosines).sum()
