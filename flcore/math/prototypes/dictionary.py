"""A dictionary of patches from sums: whitening by moments, spherical k-means by signed sums (protolda.md section 1).

Coates, Lee, Ng (AISTATS 2011) whiten patches and cluster them; both need only sums, which clients can send. Within an
image products are float32 of fixed shapes, across images sums are float64: results do not depend on the grouping.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flcore.core.portable import square_root
from flcore.math.prototypes.class_means import class_sums


@dataclass(frozen=True)
class PatchMoments:
    """Sums over ``count`` patches of d values: ``total`` float64 [d] and ``second`` float64 [d, d], Σ x xᵀ."""

    count: int
    total: Tensor
    second: Tensor


def patch_moments(blocks: Iterable[Tensor]) -> PatchMoments:
    """Return the sums of patches in blocks of images, [n, d, L] each; at least one block."""
    parts = [
        PatchMoments(
            len(patches) * patches.shape[2],
            patches.double().sum((0, 2)),
            torch.bmm(patches, patches.mT).double().sum(0),
        )
        for patches in blocks
    ]
    return merged_moments(parts)


def merged_moments(parts: Iterable[PatchMoments]) -> PatchMoments:
    """Add sums in the order given; at least one."""
    own = list(parts)
    return PatchMoments(
        sum(part.count for part in own),
        torch.stack([part.total for part in own]).sum(0),
        torch.stack([part.second for part in own]).sum(0),
    )


def whitening(moments: PatchMoments, eps: float) -> tuple[Tensor, Tensor, float]:
    """Return the mean float64 [d], W float64 [d, d] and the mean share of an eigenvalue that whitening leaves.

    W = U (L + ε·mean L)^(-1/2) Uᵀ of the covariance U L Uᵀ; negative eigenvalues, an effect of noise, count as 0.
    """
    mean = moments.total / moments.count
    covariance = moments.second / moments.count - torch.outer(mean, mean)
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(0)
    # Patches that are all alike, or drowned in noise, have no direction to shrink.
    raised = values + eps * values.mean() if values.any() else torch.ones_like(values)
    return mean, (vectors / square_root(raised)) @ vectors.mT, float((values / raised).mean())


def random_atoms(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return unit vectors of Gaussian direction, float64 [count, dim]."""
    atoms = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return atoms / atoms.norm(dim=1, keepdim=True)


def as_filters(atoms: Tensor, mean: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Turn atoms of whitened patches into filters [K, d] and biases [K] of raw patches: W a and −m·W a."""
    rows = atoms @ matrix
    return rows, -(rows @ mean)


@dataclass(frozen=True)
class AssignedPatches:
    """Patches summed by their filter.

    Attributes:
        count: number of patches.
        sums: float64 [K, d], with the sign of their product.
        signs: float64 [K], the sums of these signs.
    """

    count: int
    sums: Tensor
    signs: Tensor


def assigned_patches(blocks: Iterable[Tensor], filters: Tensor, bias: Tensor) -> AssignedPatches:
    """Assign each patch to the filter with the largest absolute product, with that product's sign.

    ``blocks`` are patches by image, float32 [n, d, L]; ``filters`` float32 [K, d], ``bias`` float32 [K].
    """
    count = 0
    sums = torch.zeros_like(filters, dtype=torch.float64)
    signs = torch.zeros_like(bias, dtype=torch.float64)
    for patches in blocks:
        count += len(patches) * patches.shape[2]
        products = torch.bmm(patches.mT, filters.mT.expand(len(patches), *filters.mT.shape)) + bias
        largest = products.abs().argmax(2)  # [n, L]
        sign = products.gather(2, largest.unsqueeze(2)).sign().squeeze(2)
        signed, own, of = (patches * sign.unsqueeze(1)).mT.flatten(0, 1), sign.flatten(), largest.flatten()
        if patches.is_cuda:  # adding rows to places has no fixed order there
            sums += class_sums(signed, of, len(filters))[0]
            signs += class_sums(own.unsqueeze(1), of, len(filters))[0].squeeze(1)
        else:
            sums.index_add_(0, of, signed.double())
            signs.index_add_(0, of, own.double())
    return AssignedPatches(count, sums, signs)


def moved_atoms(atoms: Tensor, sums: Tensor, signs: Tensor, mean: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Take a step of spherical k-means: whitened sums, normalised; an atom without patches stays.

    W is linear: W Σ±(x − m) = W(Σ±x − m Σ±1), so that ``sums`` [K, d] and ``signs`` [K] of raw patches over all clients
    suffice. ``atoms`` are float64 [K, d], ``mean`` [d], ``matrix`` [d, d] symmetric. Returns the atoms, and a bool [K]
    of those that stayed.
    """
    whitened = (sums - signs.unsqueeze(1) * mean) @ matrix
    norms = whitened.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, whitened / norms.clamp_min(1e-300), atoms), (norms == 0).flatten()
