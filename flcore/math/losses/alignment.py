"""Loss terms that pull features or predictions towards given targets: prototypes, geometry, another model's output.

Shared by FedCSPC (angles, edges, hinge), FedProto and FedPA (distances), FedMLP (smooth L1, KL), FedHKD (distances),
FedNTD (not-true distillation) and GFPL (dot regression). Targets are constants: no gradient reaches them. Shape-stable:
what does not count is masked, nothing branches on a tensor's value, and an empty mask gives 0 with gradient 0.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.math.losses.basic import weighted_mean
from flcore.math.losses.vectors import distances, euclidean_norm, unit_vectors

AngleMode = Literal["distinct", "all"]
Reduction = Literal["mean", "sum"]
Direction = Literal["zc", "cz"]
DistanceForm = Literal["mse", "l2"]


def vertex_cosines(points: Tensor) -> Tensor:
    """Cosine of the angle at b between a and c, ``[B, B, B]`` indexed [b, a, c]; 0 where a or c coincides with b."""
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
    """FedCSPC's L_A: smooth-L1 (beta 1) between the angles of features and those of their prototypes.

    Time and memory are B² d + B³: for large batches pass a part of the (shuffled) batch, such as its first 32 rows.

    Args:
        features: ``[B, d]``.
        labels: int64 ``[B]``.
        means: ``[K, d]``, any finite values in rows of missing classes.
        present: bool ``[K]``; samples of other classes take no part.
        mode: mean over the ordered triples with three ``distinct`` labels, or over ``all`` ordered triples, those with
            equal labels and equal indices included (the authors' code).
        weight: ``[B]``, 0 for padding; None for all.

    Returns:
        A scalar; 0 when there is no such triple.
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
    """FedCSPC's L_E: smooth-L1 (beta 1) between the distances of features and those of their prototypes.

    Args:
        features: ``[B, d]``.
        labels: int64 ``[B]``.
        means: ``[K, d]``, any finite values in rows of missing classes.
        present: bool ``[K]``; samples of other classes take no part.
        same_label: mean over all ordered pairs (target 0 for equal labels, the diagonal included), or only over those
            with different labels.
        relative: divide each of the two distance matrices by the mean of its own positive entries (the authors' code,
            free of scale); otherwise the literal Eq. 5.
        weight: ``[B]``, 0 for padding; None for all.

    Returns:
        A scalar; 0 when all prototypes involved coincide, as in a batch of one class.
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
    # No positive distance: all are 0 and stay 0, whatever they are divided by.
    return lengths * positive.sum() / torch.where(total > 0, total, 1.0)


def _zero_to(found: Tensor, wanted: Tensor) -> Tensor:
    return F.smooth_l1_loss(found, wanted, reduction="none")


def _usable(labels: Tensor, present: Tensor, weight: Tensor | None) -> Tensor:
    """Which samples [B] are no padding and have a prototype."""
    return present[labels] if weight is None else present[labels] & (weight > 0)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the entries where ``mask`` holds, 0 if nowhere."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def extrapolate(anchor: Tensor, positive: Tensor, negative: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """FedCSPC's prototype mix-up: the positive is moved away from the anchor, the negative towards it.

    ``u+ = u_j + lambda (u_j - u_i)``, ``u- = u_i + lambda (u_k - u_i)``; so their distances from the anchor are
    1 + lambda and lambda times those of u_j and u_k.

    Args:
        anchor: u_i ``[..., d]``. positive: u_j ``[..., d]``. negative: u_k ``[..., d]``.
        strength: lambda_u >= 0.
    """
    return positive + strength * (positive - anchor), anchor + strength * (negative - anchor)


def triplet_hinge(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """FedCSPC's L_ACL: max(0, |z - z+| - |z - z-| + margin), un-squared norms, mean over all leading dimensions.

    Eq. 9 has squares and no hinge and is unbounded below; this is the authors' code (fedcspc.md, 7a).

    Args:
        anchor: H(u_i) ``[..., p]``, not normalised. positive: H(u+). negative: H(u-). Leading dimensions, such as
            anchors and draws, broadcast.
        margin: alpha.
        weight: 0 for rows that do not count, shape of the leading dimensions; None for all.
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
    """Mean distance of features to the prototype of their label: FedProto's alignment, FedPA's L_po and L_ad.

    A sample whose class has no prototype contributes 0, has no gradient and still counts in the mean (baselines.md
    section 15). Prototypes receive no gradient.

    Args:
        features: ``[B, d]``.
        labels: int64 ``[B]``.
        prototypes: ``[K, d]``; rows of missing classes are ignored whatever stands in them.
        present: bool ``[K]``.
        form: ``mse``: the mean of squares over d (the public codes); ``l2``: the un-squared norm (FedPA's paper).
        cap: clamps the distance of a single sample, in the unit of ``form``; beyond it a sample has no gradient. Keeps
            FedPA's generator, which *maximises* this term, from running away (``ad_cap``, fedpa.md section 5.2).
        weight: ``[B]``, 1 for samples, 0 for padding; None for all.
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
    """FedMLP's L_P: smooth-L1 (beta 1) of each feature to the prototype of its class, over the samples used.

    L_S (Eq. 6) is the same with ``means = centres[cluster_of_class]`` and ``present`` reduced to the minority classes
    that belong to a cluster.

    Args:
        features: ``[B, d]``.
        labels: int64 ``[B]``.
        means: ``[K, d]``, any finite values in rows of missing classes.
        present: bool ``[K]``; samples of other classes are skipped and do not count in the mean.
        reduction: over the d dimensions of a sample.
        weight: ``[B]``, 1 for samples, 0 for padding; None for all.
    """
    elements = _zero_to(features, means.detach()[labels])
    losses = elements.mean(1) if reduction == "mean" else elements.sum(1)
    used = present[labels].to(losses.dtype)
    return weighted_mean(losses, used if weight is None else used * weight)


def row_distance(rows: Tensor, targets: Tensor, weight: Tensor | None = None, *, form: DistanceForm = "mse") -> Tensor:
    """Mean distance of ``rows`` [n, d] to constant ``targets`` [n, d] (both terms of FedHKD, Chen et al., ICLR 2023).

    The body's term takes features, ``means[labels]`` and weight ``present[labels]``; the head's takes the predictions
    on the K mean features, the mean soft predictions and weight ``present``.

    Args:
        rows: ``[n, d]``.
        targets: ``[n, d]``.
        weight: ``[n]``, bool or float, 0 for rows that do not count; None for all.
        form: ``mse``, the squared distance divided by d, or ``l2``, the Euclidean norm (gradient 0 at distance 0).
    """
    difference = rows - targets.detach()
    apart = difference.square().mean(1) if form == "mse" else euclidean_norm(difference)
    return weighted_mean(apart, None if weight is None else weight.to(rows.dtype))


def softmax_divergence(
    features: Tensor, targets: Tensor, *, temperature: float = 1.0, direction: Direction = "zc"
) -> Tensor:
    """KL divergence between softmax(z/T) and softmax(c/T) over the d dimensions, ``[B]`` (FedMLP).

    Written with logarithms of softmax on both sides: ``F.kl_div`` has the same value and NaN gradients as soon as an
    entry of softmax(z) underflows.

    Args:
        features: z ``[B, d]``.
        targets: c ``[B, d]``, constant.
        temperature: T > 0; no factor T².
        direction: ``zc`` for KL(z || c), ``cz`` for KL(c || z).
    """
    ours = (features / temperature).log_softmax(-1)
    theirs = (targets.detach() / temperature).log_softmax(-1)
    if direction == "cz":
        return (theirs.exp() * (theirs - ours)).sum(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


def nearest_centres(points: Tensor, centres: Tensor, present: Tensor) -> Tensor:
    """Index int64 ``[B]`` of the centre nearest to each of ``points`` [B, d] (Euclidean, the first of equals).

    Args:
        points: ``[B, d]``.
        centres: ``[U, d]``, padded.
        present: bool ``[U]``; with no centre present the index is 0.
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
    """FedMLP's L_I: divergence from what the client remembers of the sample's class.

    Classes without memory take, per sample, the nearest of the client's semantic prototypes (Eq. 7). Samples without
    either are skipped.

    Args:
        features: ``[B, d]``.
        labels: int64 ``[B]``.
        means: ``[K, d]``, the remembered class prototypes, any finite values in rows of missing classes.
        present: bool ``[K]``.
        centres: ``[U, d]``, padded centres of the clusters of ``means``.
        centres_present: bool ``[U]``.
        temperature: see :func:`softmax_divergence`.
        direction: see :func:`softmax_divergence`.
        weight: ``[B]``, 1 for samples, 0 for padding; None for all.
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
    """FedNTD's distillation of the classes that are not true (Lee et al., NeurIPS 2022), batch mean.

    KL(softmax(teacher/T) || softmax(student/T)), both without the entry of the true class. With K = 2 one class is
    left and the term is 0 everywhere.

    Args:
        logits: ``[B, K]`` of the model in training.
        teacher: ``[B, K]`` of the received model, constant.
        labels: int64 ``[B]``.
        temperature: T > 0.
        tau_squared: multiply by T² (not in the official code).
        weight: ``[B]``, 1 for samples, 0 for padding; None for all.
    """
    position = torch.arange(logits.shape[1] - 1, device=logits.device)
    others = position + (position >= labels.unsqueeze(1)).long()  # 0..K-1 without the label, [B, K - 1]
    losses = softmax_divergence(
        logits.gather(1, others), teacher.gather(1, others), temperature=temperature, direction="cz"
    )
    return weighted_mean(losses * temperature**2 if tau_squared else losses, weight)


def dot_regression(projections: Tensor, labels: Tensor, frame: Tensor, weight: Tensor | None = None) -> Tensor:
    """GFPL's regression to a fixed frame: mean of ½ (h·z_y - 1)², h = projection/norm (Yang et al., NeurIPS 2022).

    Args:
        projections: ``[B, d_p]``, normalised here.
        labels: int64 ``[B]``.
        frame: ``[d_p, K]`` with unit columns, constant (see :func:`flcore.math.prototypes.etf.simplex_etf`).
        weight: ``[B]``, 1 for samples, 0 for padding; None for all.
    """
    dots = (unit_vectors(projections) * frame.detach().mT[labels]).sum(1)
    return weighted_mean(0.5 * (dots - 1).square(), weight)
