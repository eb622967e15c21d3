"""A discriminant from products with a second moment that is too large to send (protolda.md section 3).

The solution X of (S_w + λI) X = μᵀ is approximated in the span of blocks of directions; each costs every client one
product of its second moment with C vectors, 2·D·C numbers. After each block the minimum over *all* directions is
taken, and its residual gives the next block (a block Krylov space): far fewer blocks than conjugate gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.math.prototypes.discriminant import Margins

_NOTHING_LEFT = 1e-9  # of the first residual: directions of that size are rounding


def directions(block: Tensor, margins: Margins) -> Tensor:
    """Turn standardised directions [D, m] into vectors of raw features."""
    return block / margins.scale.unsqueeze(1)


def standardised_products(vectors: Tensor, products: Tensor, margins: Margins) -> Tensor:
    """Return T V, the covariance of standardised features times V, from products Σ f (fᵀu) with ``vectors`` u.

    ``vectors`` [D, m] are from :func:`directions`; ``products`` [D, m] are summed over all clients.
    """
    mean = margins.mean
    centred = products / margins.counts.sum() - torch.outer(mean, mean @ vectors)
    return centred / margins.scale.unsqueeze(1)


def solved(
    basis: Tensor, products: Tensor, margins: Margins, shrinkage: float, *, noisy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the best X in the span of the basis, and the residual μᵀ − (S_w + λI) X, both [D, C].

    Args:
        basis: V, [D, m], standardised; need not be orthonormal. products: T V, [D, m].
        margins: of all clients. shrinkage: λ > 0.
        noisy: the products have noise: negative eigenvalues of S_w in that span count as 0. The basis must then be of
            independent directions, as :func:`next_block` returns them.
    """
    means, shares = margins.class_means, margins.shares
    applied = products - means.mT @ (shares.unsqueeze(1) * (means @ basis)) + shrinkage * basis
    gram = basis.mT @ applied
    gram, joint = (gram + gram.mT) / 2, basis.mT @ means.mT
    if noisy:
        orthonormal = torch.linalg.inv(torch.linalg.qr(basis).R)  # the basis times this is
        values, vectors = torch.linalg.eigh(orthonormal.mT @ gram @ orthonormal)
        axes = orthonormal @ vectors
        coefficients = axes @ ((axes.mT @ joint) / values.clamp_min(shrinkage).unsqueeze(1))
    else:
        coefficients = torch.linalg.lstsq(gram, joint, driver="gelsd").solution
    return basis @ coefficients, means.mT - applied @ coefficients


def next_block(basis: Tensor, residual: Tensor, first: float) -> Tensor:
    """Return orthonormal directions of a residual outside the basis, [D, k], k ≤ C; k = 0 if nothing is left.

    ``basis`` [D, m], m may be 0; ``residual`` [D, C]; ``first`` is the largest singular value of the first residual.
    """
    rest = residual
    if basis.shape[1]:
        orthonormal = torch.linalg.qr(basis).Q
        for _ in range(2):  # once is not enough in floating point
            rest = rest - orthonormal @ (orthonormal.mT @ rest)
    vectors, sizes, _ = torch.linalg.svd(rest, full_matrices=False)
    return vectors[:, sizes > _NOTHING_LEFT * first]
