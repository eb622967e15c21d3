"""One vector per class: means of features (FedProto, Tan et al., AAAI 2022, Eq. 3), exemplars, and a fixed frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from flcore.io.messages import Prototypes
from flcore.math.losses.basic import distances, unit_vectors


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> Prototypes:
    """Return the mean feature of every class present: ``features`` float32 [n, d], ``labels`` int64 [n] in 0..K-1."""
    if features.is_cuda:  # adding rows to places has no fixed order there
        sums, counts = class_sums(features, labels, num_classes)
        return Prototypes((sums / counts.clamp_min(1).unsqueeze(1)).to(features.dtype), counts > 0)
    sums = features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)
    counts = torch.bincount(labels, minlength=num_classes)
    return Prototypes(sums / counts.clamp_min(1).unsqueeze(1), counts > 0)


def class_sums(
    features: Tensor, labels: Tensor, num_classes: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sums of features by class, float64 ``[..., K, d]``, and their numbers, float64 ``[..., K]``.

    A product with the one-hot membership has one order of summation on every device and allows stacks: ``features``
    [..., B, d], ``labels`` int64 [..., B], ``weight`` [..., B] with 0 for padding.
    """
    member = (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).double()
    if weight is not None:
        member = member * weight.unsqueeze(-1)
    return member.mT @ features.double(), member.sum(-2)


def support_means(
    features: Tensor, labels: Tensor, num_classes: int, support: int, generator: torch.Generator
) -> Prototypes:
    """Return the mean feature of some samples of every class present (FedPG, Eq. 4); ``features`` are [n, d].

    Of a class with more than ``support`` samples, that many are drawn with replacement (CPU generator); else all count.
    """
    own, chosen = labels.cpu(), [torch.zeros(0, dtype=torch.int64)]
    for label in range(num_classes):
        rows = (own == label).nonzero().flatten()
        drawn = torch.randint(len(rows), (support,), generator=generator) if len(rows) > support else slice(None)
        chosen.append(rows[drawn])
    support_rows = torch.cat(chosen).to(features.device)
    return class_means(features[support_rows], labels[support_rows], num_classes)


def fuse_prototypes(
    uploads: Mapping[int, Prototypes], previous: Prototypes, counts: Mapping[int, Tensor] | None = None
) -> Prototypes:
    """Average each class over its uploads; a class without upload keeps its ``previous`` value (baselines.md, 15).

    ``uploads`` and ``counts`` (samples per class, int64 [K]) are by client id; without counts all uploads weigh the
    same (FedProto's code, FedPG, FedMLP).
    """
    if counts is None:
        return average_prototypes(uploads, previous)
    clients = sorted(uploads)
    weights = torch.stack([counts[client] * uploads[client].present for client in clients])
    means, present = weighted_class_means(torch.stack([uploads[client].means for client in clients]).double(), weights)
    return Prototypes(torch.where(present.unsqueeze(1), means.float(), previous.means), previous.present | present)


def weighted_class_means(means: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return φ_c = Σ_k w_kc·φ_kc/Σ_k w_kc, float32 [K, d], and the classes with a weight, bool [K] (fedpa.md 5.1).

    ``means`` are [S, K, d], ``weights`` [S, K], such as sample counts n_kc (FedPA). Classes without weight have mean 0.
    """
    heavy = weights.to(means.dtype).unsqueeze(2)
    total = heavy.sum(dim=0)
    sums = torch.where(heavy > 0, means * heavy, 0.0).sum(dim=0)
    return sums / torch.where(total > 0, total, 1.0), total.squeeze(1) > 0


def average_prototypes(uploads: Mapping[int, Prototypes], previous: Prototypes) -> Prototypes:
    """Average each class over its uploads without weights, in client-id order; else keep the ``previous`` value."""
    sums = torch.zeros_like(previous.means)
    holders = torch.zeros_like(previous.present, dtype=torch.int64)
    for client in sorted(uploads):
        sums += uploads[client].means * uploads[client].present.unsqueeze(1)
        holders += uploads[client].present
    fresh = (holders > 0).unsqueeze(1)
    means = torch.where(fresh, sums / holders.clamp_min(1).unsqueeze(1), previous.means)
    return Prototypes(means, previous.present | (holders > 0))


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

    ``share`` λ_p is the exemplars', ``temperature`` the cosines'. ``softmax`` mixes probabilities; ``minmax`` both
    scaled to [0, 1] per row, 0 for classes without an exemplar; ``authors`` logits with exp(cosine/temperature), both
    unscaled (their share is 0.9).
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


def simplex_etf(dim: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return Z = sqrt(K/(K-1)) Q (I - 11'/K), float32 ``[dim, K]``, Q with orthonormal columns in a random direction.

    The 2 <= K <= ``dim`` columns have norm 1, pairwise inner products -1/(K-1) and sum 0 (GFPL, section 8). Clients
    build the same frame from a shared seed; ``generator`` is on the CPU.
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


def class_distances(features: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the Euclidean spread within classes and distance between them; ``features`` [n, d], ``labels`` int64 [n].

    Returns:
        ``intra``: mean over classes of the mean distance of two samples of the class; ``inter``: mean over pairs of
            classes
        of the mean distance of two samples, one of each; ``centroid_inter``: mean distance of two class means.
            Undefined
        values are left out.
    """
    points = features.detach().to("cpu", torch.float64)
    classes, position = torch.unique(labels.cpu(), return_inverse=True)
    sizes = torch.bincount(position, minlength=len(classes)).double()
    # A block of rows at a time: all pairs at once would be gigabytes for a hundred classes.
    sums = torch.zeros(len(classes), len(classes), dtype=torch.float64)
    for row in range(len(classes)):
        between = distances(points[position == row], points).sum(0)
        sums[row].index_add_(0, position, between)
    means = torch.stack([points[position == row].mean(0) for row in range(len(classes))])
    values: dict[str, float] = {}
    several = sizes > 1
    if several.any():
        pairs = sizes * (sizes - 1)  # ordered; a sample and itself have distance 0
        values["intra"] = float((sums.diagonal()[several] / pairs[several]).mean())
    if len(classes) > 1:
        upper = torch.triu(torch.ones_like(sums, dtype=torch.bool), diagonal=1)
        values["inter"] = float((sums / torch.outer(sizes, sizes))[upper].mean())
        values["centroid_inter"] = float(distances(means, means)[upper].mean())
    return values


def nearest_real(generated: Tensor, labels: Tensor, real: Tensor, real_labels: Tensor) -> dict[str, float]:
    """Return the distance of generated features to real ones of their class (evaluation.md section 5.3, GFPL's check).

    ``generated`` [n, d] and ``real`` [m, d] have ``labels`` [n] and ``real_labels`` [m].

    Returns:
        ``nearest_distance``: mean Euclidean distance to the nearest real feature of the class; ``nearest_cosine``: mean
        cosine of the same pairs (0 where a feature is zero). Empty if no class has both.
    """
    lengths, cosines = [], []
    for label in torch.unique(labels).tolist():
        own = generated[labels == label].detach().to("cpu", torch.float64)
        others = real[real_labels == label].detach().to("cpu", torch.float64)
        if len(others) == 0:
            continue
        nearest = distances(own, others).min(1)
        lengths.append(nearest.values)
        cosines.append(torch.cosine_similarity(own, others[nearest.indices]))
    if not lengths:
        return {}
    return {"nearest_distance": float(torch.cat(lengths).mean()), "nearest_cosine": float(torch.cat(cosines).mean())}
