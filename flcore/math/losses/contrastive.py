"""Contrastive loss terms: against samples, another model's features, or class prototypes.

Used by FedPG, VHL, FedCSPC, FedProc and MOON. Masks replace branches on a tensor's value; an empty mask gives 0 with
gradient 0. Arguments that all share: ``features`` [B, d], normalised here; ``labels`` int64 [B]; ``temperature`` T > 0;
``weight`` [B], 1 for samples and 0 for padding, None for all samples.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flcore.math.losses.basic import unit_vectors, weighted_mean

Similarity = Literal["cosine", "inner"]


def source_weights(labels: Tensor, sources: Tensor, anchors: Tensor | None = None) -> Tensor:
    """Return FedCSPC's pair weights sigma (Eq. 10), float32 ``[B, B]``, or ``[A, B]`` for rows ``anchors`` int64 [A].

    1 for pairs of the same class from different clients and of different classes from the same client, 0.5 for the
    rest, a sample with itself included. ``labels`` and ``sources``, each row's client, are int64 [B].
    """
    rows = slice(None) if anchors is None else anchors
    same_class = labels[rows].unsqueeze(1) == labels.unsqueeze(0)
    same_source = sources[rows].unsqueeze(1) == sources.unsqueeze(0)
    return torch.where(same_class != same_source, 1.0, 0.5)


def contrastive_terms(
    features: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    base_temperature: float | None = None,
    weight: Tensor | None = None,
    pair_weights: Tensor | None = None,
    anchors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the supervised contrastive loss of every anchor (Khosla et al., NeurIPS 2020, Eq. 2, sum outside).

    With z = features/norm, P(i) = the other samples with the label of i, and sigma = ``pair_weights`` (default 1):
    ``-(T/T0) mean_{j in P(i)} log( sigma_ij exp(z_i·z_j/T) / sum_{k != i} sigma_ik exp(z_i·z_k/T) )``. The sigma of the
    numerator changes the value, not the gradient (FedCSPC, Eq. 10, literal).

    Args:
        base_temperature: T0 > 0; None for T0 = T (factor 1).
        pair_weights: ``[B, B]`` (``[A, B]``), positive.
        anchors: int64 ``[A]``, rows to return the loss of; all rows are positives and negatives. None for all.

    Returns:
        The losses ``[B]`` (``[A]``), 0 for anchors without positives, and bool likewise: the anchors that have one.
    """
    unit, rows = unit_vectors(features), slice(None) if anchors is None else anchors
    logits = unit[rows] @ unit.mT / temperature
    if pair_weights is not None:
        logits = logits + pair_weights.log()
    places = torch.arange(len(labels), device=labels.device)
    others = places[rows].unsqueeze(1) != places
    if weight is not None:
        real = weight > 0
        others = others & real.unsqueeze(0) & real[rows].unsqueeze(1)
    positives = others & (labels[rows].unsqueeze(1) == labels.unsqueeze(0))
    # The smallest float, not -inf: a row without any other sample must stay finite.
    denominator = logits.masked_fill(~others, torch.finfo(logits.dtype).min).logsumexp(1, keepdim=True)
    log_share = torch.where(positives, logits - denominator, 0.0).sum(1)
    number = positives.sum(1)
    scale = 1.0 if base_temperature is None else temperature / base_temperature
    return -scale * log_share / number.clamp_min(1), number > 0


def supervised_contrastive(
    features: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    base_temperature: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the mean of :func:`contrastive_terms` over all anchors, 0 for those without positives (SupCon)."""
    losses, _ = contrastive_terms(features, labels, temperature, base_temperature=base_temperature, weight=weight)
    return weighted_mean(losses, weight)


def model_contrast(
    features: Tensor,
    positive: Tensor,
    negatives: Tensor,
    present: Tensor,
    temperature: float,
    weight: Tensor | None = None,
) -> Tensor:
    """Return MOON's contrast of models (Li et al., CVPR 2021, Eq. 3).

    ``-log( exp(cos(z, z_g)/T) / (exp(cos(z, z_g)/T) + sum_m exp(cos(z, z_m)/T)) )``, batch mean. Without a previous
    model the loss and its gradient are exactly 0.

    Args:
        features: z of the model in training. positive: ``[B, d]``, z_g of the received model, constant.
        negatives: ``[M, B, d]``, z_m of the client's previous models, constant; any finite values where absent.
        present: bool ``[M]``, the previous models that exist.
    """
    unit = unit_vectors(features)
    agreement = (unit * unit_vectors(positive.detach())).sum(-1) / temperature
    disagreement = (unit * unit_vectors(negatives.detach())).sum(-1) / temperature
    disagreement = disagreement.masked_fill(~present.unsqueeze(1), torch.finfo(features.dtype).min)
    logits = torch.cat([agreement.unsqueeze(0), disagreement])
    return weighted_mean(logits.logsumexp(0) - agreement, weight)


def prototype_contrast(
    features: Tensor,
    labels: Tensor,
    means: Tensor,
    present: Tensor,
    temperature: float,
    *,
    similarity: Similarity = "cosine",
    weight: Tensor | None = None,
    count_missing: bool = False,
) -> Tensor:
    """Return the cross-entropy of the similarities to class prototypes: FedCSPC's node loss L_N, FedProc's l_gpc.

    ``-log( exp(s(f_i, u_{y_i})/T) / sum_c exp(s(f_i, u_c)/T) )`` over the classes that have a prototype.

    Args:
        means: ``[K, d]``, constant, any finite values in rows of missing classes. present: bool ``[K]``.
        similarity: ``cosine``, or the ``inner`` product.
        count_missing: a sample without a prototype counts as 0 in the mean; else it is left out.
    """
    means = means.detach()
    if similarity == "cosine":
        features, means = unit_vectors(features), unit_vectors(means)
    logits = features @ means.mT / temperature
    denominator = logits.masked_fill(~present, torch.finfo(logits.dtype).min).logsumexp(1)
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    used = present[labels]
    losses = torch.where(used, denominator - own, 0.0)
    counted = losses.new_ones(len(labels)) if weight is None else weight
    return weighted_mean(losses, counted if count_missing else counted * used)
