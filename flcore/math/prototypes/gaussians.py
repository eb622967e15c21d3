"""One full-covariance Gaussian per class: exact federated merging (CCVR, Luo et al., NeurIPS 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassGaussians:
    """One Gaussian per class: ``counts`` int64 [K], ``means`` float64 [K, d], ``covariances`` float64 [K, d, d].

    Covariances are unbiased (divided by n - 1); 0 for classes with fewer than two samples, means 0 for those with none.
    """

    counts: Tensor
    means: Tensor
    covariances: Tensor


def class_gaussians(features: Tensor, labels: Tensor, num_classes: int) -> ClassGaussians:
    """Return count, mean and unbiased covariance of every class: ``features`` [n, d], ``labels`` int64 [n]."""
    dim = features.shape[1]
    means = features.new_zeros(num_classes, dim, dtype=torch.float64)
    covariances = features.new_zeros(num_classes, dim, dim, dtype=torch.float64)
    counts = torch.bincount(labels, minlength=num_classes)
    for label in counts.nonzero().flatten().tolist():
        own = features[labels == label].double()
        means[label] = own.mean(0)
        centred = own - means[label]
        covariances[label] = centred.mT @ centred / max(len(own) - 1, 1)
    return ClassGaussians(counts, means, covariances)


def class_gaussian(features: Tensor) -> ClassGaussians:
    """Return the statistics of a single class, K = 1, of features ``[n, d]``, n >= 1."""
    return class_gaussians(features, torch.zeros(len(features), dtype=torch.int64, device=features.device), 1)


def upper_triangles(covariances: Tensor, offset: int = 0) -> Tensor:
    """Return symmetric matrices ``[..., d, d]`` row by row from the diagonal (``offset`` 0, or 1: after it) on."""
    dim = covariances.shape[-1]
    first, second = torch.triu_indices(dim, dim, offset, device=covariances.device)
    return covariances[..., first, second]


def from_upper_triangles(triangles: Tensor, offset: int = 0) -> Tensor:
    """Return the inverse of :func:`upper_triangles`, ``[..., d, d]``; the diagonal is 0 with ``offset`` 1."""
    dim = (math.isqrt(8 * triangles.shape[-1] + 1) - 1) // 2 + offset
    first, second = torch.triu_indices(dim, dim, offset, device=triangles.device)
    covariances = triangles.new_zeros(*triangles.shape[:-1], dim, dim)
    covariances[..., first, second] = triangles
    covariances[..., second, first] = triangles
    return covariances


def merge_gaussians(uploads: Mapping[int, ClassGaussians]) -> ClassGaussians:
    """Return the exact statistics of the pooled samples from those per client (CCVR), summed in order of client id.

    The scatter is summed as within plus between clients, ``sum (n_k - 1) S_k + n_k (m_k - m)(m_k - m)'``: equal to the
    paper's difference of raw moments, without cancellation.
    """
    clients = sorted(uploads)
    counts = torch.stack([uploads[client].counts for client in clients])
    total = counts.sum(0)
    share = counts.double() / total.clamp_min(1)
    means = torch.zeros_like(uploads[clients[0]].means, dtype=torch.float64)
    for row, client in zip(share, clients, strict=True):
        means += row.unsqueeze(1) * uploads[client].means.double()
    scatter = torch.zeros_like(uploads[clients[0]].covariances, dtype=torch.float64)
    for number, client in zip(counts, clients, strict=True):
        held = number.double()[:, None, None]
        shift = uploads[client].means.double() - means
        within = (held - 1).clamp_min(0) * uploads[client].covariances.double()
        scatter += within + held * shift.unsqueeze(2) * shift.unsqueeze(1)
    return ClassGaussians(total, means, scatter / (total - 1).clamp_min(1)[:, None, None])


def map_gaussians(statistics: ClassGaussians, weight: Tensor, bias: Tensor) -> ClassGaussians:
    """Return the exact statistics of W x + b: means W mu + b, covariances W S W' (CCVR's ``tap=hidden``).

    Classes without a sample keep mean 0. W is ``weight`` [p, d], b is ``bias`` [p].
    """
    linear = weight.double()
    means = statistics.means @ linear.mT + bias.double()
    held = (statistics.counts > 0).unsqueeze(1)
    return ClassGaussians(statistics.counts, torch.where(held, means, 0.0), linear @ statistics.covariances @ linear.mT)


def sample_gaussians(
    statistics: ClassGaussians, per_class: int, generator: torch.Generator, *, min_count: int = 2
) -> tuple[Tensor, Tensor]:
    """Draw CCVR's virtual features: ``per_class`` of N(mean, covariance) for every class with ``min_count`` samples.

    Rank-deficient covariances are allowed: the symmetric root through ``eigh``, eigenvalues clamped at 0, does not
    depend on the signs or the basis that LAPACK picks. Returns features float32 ``[classes · per_class, d]`` and labels
    int64, in ascending order of the class.
    """
    dim = statistics.means.shape[1]
    features = [torch.zeros(0, dim)]
    classes = (statistics.counts >= min_count).nonzero().flatten()
    for label in classes.tolist():
        covariance = statistics.covariances[label]
        values, vectors = torch.linalg.eigh(0.5 * (covariance + covariance.mT))
        root = (vectors * values.clamp_min(0.0).sqrt()) @ vectors.mT
        noise = torch.randn(per_class, dim, generator=generator, dtype=torch.float64)
        features.append((statistics.means[label] + noise @ root).float())
    return torch.cat(features), classes.repeat_interleave(per_class)
