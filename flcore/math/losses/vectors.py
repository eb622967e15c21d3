"""Vector arithmetic: lengths, directions and distances, with finite gradients also where a root has none."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this squared norm a vector has no direction. Not smaller: the gradient of 1/norm goes with norm^-3, which must
# stay inside float32.
_SMALLEST_SQUARED_NORM = 1e-24


def safe_root(squares: Tensor) -> Tensor:
    """The square root, with gradient 0 instead of infinity at 0."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def euclidean_norm(vectors: Tensor) -> Tensor:
    """L2 norm over the last dimension, ``[..., d]`` to ``[...]``; gradient 0 at the zero vector."""
    return safe_root(vectors.square().sum(-1))


def unit_vectors(vectors: Tensor) -> Tensor:
    """``vectors`` [..., d] divided by their L2 norm; a zero vector stays zero and gets gradient 0 (not 1/epsilon)."""
    squared = vectors.square().sum(-1, keepdim=True)
    directed = squared > _SMALLEST_SQUARED_NORM
    return torch.where(directed, vectors * torch.where(directed, squared, 1.0).rsqrt(), 0.0)


def distances(rows: Tensor, columns: Tensor) -> Tensor:
    """Return Euclidean distances ``[n, m]`` of ``rows`` [n, d] and ``columns`` [m, d]; gradient 0 at distance 0.

    Computed from differences: matrix products leave small distances between equal points, and depend on the block size.
    """
    return torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")
