"""The simplex equiangular tight frame: K unit vectors with the widest equal angles (GFPL, section 8).

Clients build the same frame from a shared seed, without communication.
"""

from __future__ import annotations

import torch
from torch import Tensor


def simplex_etf(dim: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return Z = sqrt(K/(K-1)) Q (I - 11'/K), float32 ``[dim, K]``, Q with orthonormal columns in a random direction.

    Columns have norm 1, pairwise inner products -1/(K-1) and sum 0. The frame is a function of the state of
    ``generator`` (CPU).

    Raises:
        ValueError: fewer than two classes, or fewer dimensions than classes.
    """
    if num_classes < 2 or dim < num_classes:
        raise ValueError(f"a simplex frame needs 2 <= classes <= dimensions, got {num_classes} classes in {dim}")
    directions = torch.randn(dim, num_classes, generator=generator, dtype=torch.float64)
    basis, upper = torch.linalg.qr(directions)
    # The signs of Q's columns are the library's choice; a non-negative diagonal of R makes Q unique.
    return frame_of_basis(basis * torch.where(upper.diagonal() < 0, -1.0, 1.0)).float()


def frame_of_basis(basis: Tensor) -> Tensor:
    """Return the simplex frame ``[dim, K]`` on the orthonormal columns of ``basis`` [dim, K], K >= 2."""
    count = basis.shape[1]
    return (count / (count - 1)) ** 0.5 * (basis - basis.mean(1, keepdim=True))
