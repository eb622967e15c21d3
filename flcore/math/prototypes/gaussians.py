"""Gaussians of each class: mixtures with diagonal covariances (GFPL), and one with a full covariance (CCVR).

Mixtures run on the CPU. Sums over clients are float64 and in ascending client id; scikit-learn runs in one thread.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flcore.core.portable import square_root
from flcore.io.messages import Mixtures
from flcore.math.prototypes.clustering import num_distinct, one_thread


@dataclass(frozen=True)
class Mixture:
    """A mixture of n diagonal Gaussians: ``weights`` [n] >= 0 with sum 1, ``means`` [n, d], ``variances`` [n, d]."""

    weights: Tensor
    means: Tensor
    variances: Tensor


def fit_mixture(
    features: Tensor,
    num_components: int,
    generator: np.random.Generator,
    *,
    variance_floor: float = 1e-4,
) -> Mixture:
    """Fit a diagonal mixture to ``features`` [N, d] of one class by EM from a k-means start (GFPL, section 4).

    The number of components is min(num_components, N // 2), at least 1 and at most the number of distinct features.
    ``variance_floor`` is added to every variance in every M-step (scikit-learn's ``reg_covar``), so that it is also a
    lower bound. EM stops after 100 iterations, or when the mean log-likelihood changes by less than 1e-3.
    """
    if len(features) < 1:
        raise ValueError("a mixture needs at least one feature")
    # float64: EM's variances are differences of squares.
    array = features.numpy().astype(np.float64)
    count = max(1, min(num_components, len(array) // 2, num_distinct(array)))
    seed = int(generator.integers(2**31))
    if count == 1:  # in closed form; scikit-learn refuses a single sample
        weights, means, variances = np.ones(1), array.mean(0)[None], array.var(0)[None] + variance_floor
    else:
        from sklearn.exceptions import ConvergenceWarning  # here, because it takes seconds
        from sklearn.mixture import GaussianMixture

        model = GaussianMixture(
            count,
            covariance_type="diag",
            reg_covar=variance_floor,
            max_iter=100,
            tol=1e-3,
            init_params="kmeans",
            random_state=seed,
        )
        with one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a fixed budget of iterations is what is asked for
            model.fit(array)
        weights, means, variances = model.weights_, model.means_, model.covariances_
    return Mixture(*(torch.from_numpy(np.array(each)).to(features.dtype) for each in (weights, means, variances)))


def fit_class_mixtures(
    features: Tensor,
    labels: Tensor,
    num_components: int,
    stream: Callable[[int], np.random.Generator],
    *,
    variance_floor: float = 1e-4,
) -> dict[int, Mixture]:
    """Return the mixture of every class present, by ascending class; ``features`` [N, d] are on the CPU.

    ``stream`` maps a class to its generator: the fit of a class does not depend on the client's other classes.
    """
    return {
        label: fit_mixture(features[labels == label], num_components, stream(label), variance_floor=variance_floor)
        for label in torch.bincount(labels).nonzero().flatten().tolist()
    }


def bhattacharyya(
    means_a: Tensor, variances_a: Tensor, means_b: Tensor, variances_b: Tensor, *, per_dimension: bool = False
) -> Tensor:
    """Return the Bhattacharyya distance of diagonal Gaussians ``[..., d]``, which broadcast, or a d-th of it.

    ``1/8 sum (m1 - m2)²/v + 1/2 sum ln(v/sqrt(v1 v2))`` with v = (v1 + v2)/2; symmetric, exactly 0 for equal arguments
    and never negative. No determinants.
    """
    middle = 0.5 * (variances_a + variances_b)
    shift = 0.125 * (means_a - means_b).square() / middle
    shape = 0.5 * (middle.log() - 0.5 * (variances_a.log() + variances_b.log()))
    distance = (shift + shape).sum(-1).clamp_min(0.0)
    return distance / means_a.shape[-1] if per_dimension else distance


def group_components(
    means: Tensor, variances: Tensor, threshold: float, *, per_dimension: bool = False
) -> list[list[int]]:
    """Return the groups of n Gaussians that GFPL's Algorithm 1 merges: disjoint, ascending, in order of their seeds.

    The first remaining component is a seed; all remaining ones nearer to it than ``threshold`` (strictly; 0 merges
    nothing) join it. The algorithm then adds those near *every* member; there are none, since they would be near the
    seed. Members need not be near each other, so the result depends on the order of the components. ``means`` and
    ``variances`` are [n, d].
    """
    left, groups = torch.arange(len(means)), []
    while len(left):
        seed = left[0]
        near = (
            bhattacharyya(means[seed], variances[seed], means[left], variances[left], per_dimension=per_dimension)
            < threshold
        )
        near[0] = True  # also with threshold 0
        groups.append(left[near].tolist())
        left = left[~near]
    return groups


def fuse_components(mixture: Mixture, groups: Sequence[Sequence[int]]) -> Mixture:
    """Merge each group into one Gaussian by moment matching (GFPL); weights are not normalised.

    ``w = sum w_j``, ``mu = sum w_j mu_j / w``, ``var = sum w_j (var_j + (mu_j - mu)²) / w``, for positive w_j.
    """
    weights, means, variances = (values.double() for values in (mixture.weights, mixture.means, mixture.variances))
    rows = []
    for group in groups:
        members = torch.tensor(group, dtype=torch.int64)
        total = weights[members].sum()
        share = (weights[members] / total).unsqueeze(1)
        mean = (share * means[members]).sum(0)
        spread = variances[members] + (means[members] - mean).square()
        rows.append((total, mean, (share * spread).sum(0)))
    return Mixture(*(torch.stack(column).to(mixture.means.dtype) for column in zip(*rows, strict=True)))


def fuse_mixtures(
    uploads: Mapping[int, Mixture], counts: Mapping[int, float] | None, threshold: float, *, per_dimension: bool = False
) -> Mixture:
    """Return GFPL's fused mixture of one class: union, Algorithm 1, moment matching, weights that sum to 1.

    Components enter Algorithm 1 by client id, then in the client's order. ``uploads`` and ``counts``, samples of the
    class, are by client id; None gives clients equal weights.
    """
    clients = sorted(uploads)
    weights = [uploads[client].weights.double() * (1.0 if counts is None else counts[client]) for client in clients]
    total = torch.cat(weights)
    means = torch.cat([uploads[client].means for client in clients]).double()
    variances = torch.cat([uploads[client].variances for client in clients]).double()
    union = Mixture(total / total.sum(), means, variances)
    groups = group_components(means, variances, threshold, per_dimension=per_dimension)
    fused = fuse_components(union, groups)
    dtype = uploads[clients[0]].means.dtype
    return Mixture(fused.weights.to(dtype), fused.means.to(dtype), fused.variances.to(dtype))


def fuse_uploads(
    uploads: Mapping[int, Mixtures], threshold: float, *, per_dimension: bool = False
) -> dict[int, Mixture]:
    """Apply :func:`fuse_mixtures` to every uploaded class, in ascending order; without counts clients weigh alike."""
    opened = {client: unpack_mixtures(upload) for client, upload in uploads.items()}
    by_class = {
        client: dict(zip(upload.classes.tolist(), upload.counts.tolist(), strict=True))
        for client, upload in uploads.items()
        if upload.counts is not None
    }
    fused = {}
    for label in sorted({label for mixtures in opened.values() for label in mixtures}):
        holders = {client: mixtures[label] for client, mixtures in opened.items() if label in mixtures}
        counts = {client: by_class[client][label] for client in holders} if by_class else None
        fused[label] = fuse_mixtures(holders, counts, threshold, per_dimension=per_dimension)
    return fused


def sample_mixture(mixture: Mixture, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` points [count, d]: a component by weight, then mean + deviation · N(0, I)."""
    component = torch.multinomial(mixture.weights, count, replacement=True, generator=generator)
    means = mixture.means[component]
    noise = torch.randn(means.shape, generator=generator, dtype=means.dtype)
    return means + square_root(mixture.variances[component]) * noise


def sample_classes(
    mixtures: Mapping[int, Mixture], per_class: int, generator: torch.Generator, *, clip_nonnegative: bool = False
) -> tuple[Tensor, Tensor]:
    """Draw GFPL's pseudo-features: ``per_class`` of every class, in ascending order of the class.

    Returns features ``[classes · per_class, d]``, with ``clip_nonnegative`` at least 0 as after a ReLU, and labels
    int64.
    """
    classes = sorted(mixtures)
    features = torch.cat([sample_mixture(mixtures[label], per_class, generator) for label in classes])
    labels = torch.tensor(classes, dtype=torch.int64).repeat_interleave(per_class)
    return (features.clamp_min(0.0) if clip_nonnegative else features), labels


def pack_mixtures(mixtures: Mapping[int, Mixture], counts: Tensor | None, dim: int) -> Mixtures:
    """Return mixtures by class as a message; ``counts`` int64 [K] are samples per class, or None; ``dim`` is d."""
    classes = sorted(mixtures)
    ordered = [mixtures[label] for label in classes]
    none = torch.zeros(0, dim)
    return Mixtures(
        classes=torch.tensor(classes, dtype=torch.int64),
        components=torch.tensor([len(mixture.weights) for mixture in ordered], dtype=torch.int64),
        weights=torch.cat([torch.zeros(0), *(mixture.weights for mixture in ordered)]).float(),
        means=torch.cat([none, *(mixture.means for mixture in ordered)]).float(),
        deviations=torch.cat([none, *(square_root(mixture.variances) for mixture in ordered)]).float(),
        counts=None if counts is None else counts[classes],
    )


def unpack_mixtures(payload: Mixtures) -> dict[int, Mixture]:
    """Return a message's mixtures by class, on the CPU, float32: the inverse of :func:`pack_mixtures`."""
    parts = [
        torch.split(values.cpu(), payload.components.tolist())
        for values in (payload.weights, payload.means, payload.deviations.square())
    ]
    return {
        label: Mixture(weights, means, variances)
        for label, weights, means, variances in zip(payload.classes.tolist(), *parts, strict=True)
    }


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
        root = (vectors * square_root(values.clamp_min(0.0))) @ vectors.mT
        noise = torch.randn(per_class, dim, generator=generator, dtype=torch.float64)
        features.append((statistics.means[label] + noise @ root).float())
    return torch.cat(features), classes.repeat_interleave(per_class)
