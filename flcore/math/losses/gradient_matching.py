"""Gradients as targets (CReFF): a linear classifier's gradient in closed form, and the distance of two gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.math.losses.vectors import euclidean_norm

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
