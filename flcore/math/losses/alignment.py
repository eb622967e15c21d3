"""Loss terms that pull features or predictions towards constant targets: prototypes, geometry, another model's output.

Used by FedCSPC, FedProto, FedPA, FedMLP, FedHKD, FedNTD and GFPL. No gradient reaches targets. Masks replace branches
on a tensor's value; an empty mask gives 0 with gradient 0. Arguments that all terms share: ``features`` [B, d];
``labels`` int64 [B]; ``means`` [K, d], with any finite values in rows of missing classes; ``present`` bool [K];
``weight`` [B], 1 for samples and 0 for padding, None for all samples.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.math.losses.basic import distances, euclidean_norm, unit_vectors, weighted_mean

AngleMode = Literal["distinct", "all"]
Reduction = Literal["mean", "sum"]
Direction = Literal["zc", "cz"]
DistanceForm = Literal["mse", "l2"]


def vertex_cosines(points: Tensor) -> Tensor:
    """Return the cosine of the angle at b between a and c, ``[B, B, B]`` as [b, a, c]; 0 where a or c is b."""
    directions = unit_vectors(points.unsqueeze(0) - points.unsqueeze(1))
    return directions @ directions.mT


def angle_loss(
    features: Tensor,
    labels: Tensor,
    means: Tensor,
    present: Tensor,
    *,
    mode: AngleMode = "distinct",
    weight: Tensor | None = None,
) -> Tensor:
    """Return FedCSPC's L_A: smooth-L1 (beta 1) between the angles of features and of their prototypes.

    Mean over the ordered triples with three ``distinct`` labels, or over ``all`` ordered triples, equal labels and
    indices included (the authors' code); 0 without a triple. Samples of missing classes are left out. Time and memory
    are B² d + B³: for large batches pass a part of the shuffled batch, such as its first 32 rows.
    """
    difference = _zero_to(vertex_cosines(features), vertex_cosines(means.detach()[labels]))
    real = _usable(labels, present, weight)
    triples = real[:, None, None] & real[None, :, None] & real[None, None, :]
    if mode == "distinct":
        other = labels.unsqueeze(1) != labels.unsqueeze(0)
        triples = triples & other[:, :, None] & other[:, None, :] & other[None, :, :]
    return _masked_mean(difference, triples)


def edge_loss(
    features: Tensor,
    labels: Tensor,
    means: Tensor,
    present: Tensor,
    *,
    same_label: bool = True,
    relative: bool = True,
    weight: Tensor | None = None,
) -> Tensor:
    """Return FedCSPC's L_E: smooth-L1 (beta 1) between the distances of features and of their prototypes.

    Samples of missing classes are left out. The loss is 0 if all prototypes coincide, as in a batch of one class.

    Args:
        same_label: mean over all ordered pairs (target 0 for equal labels, the diagonal included), else over pairs with
            different labels.
        relative: divide each distance matrix by the mean of its positive entries (the authors' code, scale-free); else
            Eq. 5 as printed.
    """
    real = _usable(labels, present, weight)
    pairs = real.unsqueeze(0) & real.unsqueeze(1)
    targets = means.detach()[labels]
    found, wanted = distances(features, features), distances(targets, targets)
    informative = (pairs & (wanted > 0)).any()
    if relative:
        found, wanted = _over_mean_of_positive(found, pairs), _over_mean_of_positive(wanted, pairs)
    if not same_label:
        pairs = pairs & (labels.unsqueeze(1) != labels.unsqueeze(0))
    return _masked_mean(_zero_to(found, wanted), pairs & informative)


def _over_mean_of_positive(lengths: Tensor, pairs: Tensor) -> Tensor:
    positive = pairs & (lengths > 0)
    total = torch.where(positive, lengths, 0.0).sum()
    # Without a positive distance all are 0 and stay 0.
    return lengths * positive.sum() / torch.where(total > 0, total, 1.0)


def _zero_to(found: Tensor, wanted: Tensor) -> Tensor:
    return F.smooth_l1_loss(found, wanted, reduction="none")


def _usable(labels: Tensor, present: Tensor, weight: Tensor | None) -> Tensor:
    return present[labels] if weight is None else present[labels] & (weight > 0)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def extrapolate(anchor: Tensor, positive: Tensor, negative: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Mix FedCSPC's prototypes: move the positive away from the anchor and the negative towards it.

    ``u+ = u_j + lambda (u_j - u_i)``, ``u- = u_i + lambda (u_k - u_i)``: their distances from the anchor are 1 + lambda
    and lambda times the distances of u_j and u_k. All are ``[..., d]``; ``strength`` is lambda >= 0.
    """
    return positive + strength * (positive - anchor), anchor + strength * (negative - anchor)


def triplet_hinge(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """Return FedCSPC's L_ACL: max(0, |z - z+| - |z - z-| + margin), plain norms, mean over all leading dimensions.

    This is the authors' code; Eq. 9 has squares, no hinge and no lower bound (fedcspc.md, 7a). ``anchor`` H(u_i),
    ``positive`` H(u+) and ``negative`` H(u-) are [..., p], not normalised, and broadcast; ``margin`` is alpha;
    ``weight`` has the leading dimensions, 0 for rows that do not count.
    """
    gap = euclidean_norm(anchor - positive) - euclidean_norm(anchor - negative) + margin
    return weighted_mean(gap.relu(), weight)


def prototype_pull(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    present: Tensor,
    form: DistanceForm = "mse",
    *,
    cap: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the mean distance of features to their label's prototype: FedProto's alignment, FedPA's L_po and L_ad.

    A sample without a prototype contributes 0, has no gradient and counts in the mean (baselines.md section 15).

    Args:
        form: ``mse``: mean of squares over d (the public codes); ``l2``: the norm (FedPA's paper).
        cap: upper limit of a sample's distance, in the unit of ``form``, without gradient beyond it. Bounds FedPA's
            generator, which *maximises* this term (``ad_cap``, fedpa.md section 5.2).
    """
    known = present[labels]
    difference = torch.where(known.unsqueeze(1), features - prototypes.detach()[labels], 0.0)
    apart = difference.square().mean(1) if form == "mse" else euclidean_norm(difference)
    return weighted_mean(apart if cap is None else apart.clamp_max(cap), weight)


def smooth_l1_to_prototypes(
    features: Tensor,
    labels: Tensor,
    means: Tensor,
    present: Tensor,
    *,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Return FedMLP's L_P: smooth-L1 (beta 1) of features to the prototype of their class, mean over samples with one.

    L_S (Eq. 6) is the same with ``means = centres[cluster_of_class]`` and ``present`` for minority classes in a
    cluster. ``reduction`` is over the d dimensions.
    """
    elements = _zero_to(features, means.detach()[labels])
    losses = elements.mean(1) if reduction == "mean" else elements.sum(1)
    used = present[labels].to(losses.dtype)
    return weighted_mean(losses, used if weight is None else used * weight)


def row_distance(rows: Tensor, targets: Tensor, weight: Tensor | None = None, *, form: DistanceForm = "mse") -> Tensor:
    """Return the mean distance of ``rows`` [n, d] to constant ``targets`` [n, d] (FedHKD, Chen et al., ICLR 2023).

    The body's term takes features, ``means[labels]`` and weight ``present[labels]``; the head's takes the predictions
    on the K mean features, the mean soft predictions and weight ``present``. ``weight`` [n] is bool or float; ``form``
    is ``mse``, the squared distance divided by d, or ``l2``, the norm (gradient 0 at distance 0).
    """
    difference = rows - targets.detach()
    apart = difference.square().mean(1) if form == "mse" else euclidean_norm(difference)
    return weighted_mean(apart, None if weight is None else weight.to(rows.dtype))


def softmax_divergence(
    features: Tensor, targets: Tensor, *, temperature: float = 1.0, direction: Direction = "zc"
) -> Tensor:
    """Return the KL divergence between softmax(z/T) and softmax(c/T) over d, ``[B]`` (FedMLP), without a factor T².

    z are ``features`` and c constant ``targets``, both [B, d]; ``zc`` is KL(z || c), ``cz`` KL(c || z). Both sides use
    log-softmax: ``F.kl_div`` has NaN gradients as soon as an entry of softmax(z) underflows.
    """
    ours = (features / temperature).log_softmax(-1)
    theirs = (targets.detach() / temperature).log_softmax(-1)
    if direction == "cz":
        return (theirs.exp() * (theirs - ours)).sum(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


def nearest_centres(points: Tensor, centres: Tensor, present: Tensor) -> Tensor:
    """Return the index int64 ``[B]`` of the nearest centre (Euclidean, first of equals) of each of ``points`` [B, d].

    ``centres`` [U, d] are padded, ``present`` bool [U]; without any centre the index is 0.
    """
    squared = (points.detach().unsqueeze(1) - centres).square().sum(-1)
    return squared.masked_fill(~present, torch.inf).argmin(1)


def memory_divergence(
    features: Tensor,
    labels: Tensor,
    means: Tensor,
    present: Tensor,
    centres: Tensor,
    centres_present: Tensor,
    *,
    temperature: float = 1.0,
    direction: Direction = "zc",
    weight: Tensor | None = None,
) -> Tensor:
    """Return FedMLP's L_I: divergence from the client's remembered prototype of the sample's class.

    A class without memory takes, per sample, the nearest semantic prototype (Eq. 7). Samples without either are
    skipped. ``means`` are remembered, ``centres`` [U, d] the padded centres of their clusters, ``centres_present`` bool
    [U]; for the other arguments see :func:`softmax_divergence`.
    """
    known = present[labels]
    nearest = centres[nearest_centres(features, centres, centres_present)]
    targets = torch.where(known.unsqueeze(1), means[labels], nearest)
    losses = softmax_divergence(features, targets, temperature=temperature, direction=direction)
    used = (known | centres_present.any()).to(losses.dtype)
    return weighted_mean(losses, used if weight is None else used * weight)


def not_true_distillation(
    logits: Tensor,
    teacher: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    tau_squared: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """Return FedNTD's distillation of the classes that are not true (Lee et al., NeurIPS 2022), batch mean.

    KL(softmax(teacher/T) || softmax(student/T)) without the entry of the true class; 0 everywhere for K = 2. ``logits``
    [B, K] of the model in training, ``teacher`` [B, K] of the received model, constant; ``tau_squared`` multiplies by
    T² (not in the official code).
    """
    position = torch.arange(logits.shape[1] - 1, device=logits.device)
    others = position + (position >= labels.unsqueeze(1)).long()  # 0..K-1 without the label, [B, K - 1]
    losses = softmax_divergence(
        logits.gather(1, others), teacher.gather(1, others), temperature=temperature, direction="cz"
    )
    return weighted_mean(losses * temperature**2 if tau_squared else losses, weight)


def dot_regression(projections: Tensor, labels: Tensor, frame: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return GFPL's dot regression: mean of ½ (h·z_y - 1)², h = projection/norm (Yang et al., NeurIPS 2022).

    ``projections`` [B, d_p] are normalised here; ``frame`` [d_p, K] has unit columns and is constant
    (:func:`flcore.math.prototypes.class_means.simplex_etf`).
    """
    dots = (unit_vectors(projections) * frame.detach().mT[labels]).sum(1)
    return weighted_mean(0.5 * (dots - 1).square(), weight)
