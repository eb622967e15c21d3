"""Aggregation of class prototypes: the method's mean, a robust rule, and clipping.

Clients share no earlier prototype, so the vector itself is clipped, class by class.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from flcore.aggregation.mean import robust
from flcore.aggregation.settings import Aggregation
from flcore.io.messages import Prototypes
from flcore.math.prototypes.class_means import fuse_prototypes
from flcore.math.prototypes.release import clip_to_norm

FEWEST = 3
"""Smallest number of clients for which a median or a trimmed mean leaves a value out."""


def fold_prototypes(
    uploads: Mapping[int, Prototypes],
    previous: Prototypes,
    counts: Mapping[int, torch.Tensor] | None,
    how: Aggregation,
) -> tuple[Prototypes, dict[str, float]]:
    """Fold clients' prototypes by class; a class without upload keeps its previous value.

    Args:
        uploads: client id to prototypes [K, d].
        previous: of the last round.
        counts: client id to samples per class, int64 [K], as weights of ``rule: mean``; None: equal weights.
        how: the section ``aggregation``; at its defaults this is :func:`fuse_prototypes`, to the bit.

    Returns:
        The prototypes, and metrics: ``clipped_prototypes``, the number of longer ones (with ``prototype_clip``);
        ``unguarded_classes``, classes of only one or two clients, which a robust rule can only average.
    """
    metrics: dict[str, float] = {}
    if how.leaves_prototypes:
        return fuse_prototypes(uploads, previous, counts), metrics
    senders = torch.stack([uploads[client].present for client in sorted(uploads)])
    vectors = torch.stack([uploads[client].means for client in sorted(uploads)])
    if how.prototype_clip is not None:
        clipped = clip_by_class(vectors, senders, how)
        metrics["clipped_prototypes"] = float(((clipped != vectors).any(dim=2) & senders).sum())
        vectors = clipped
    if how.rule == "mean":
        shortened = {c: Prototypes(vectors[i], senders[i]) for i, c in enumerate(sorted(uploads))}
        return fuse_prototypes(shortened, previous, counts), metrics
    means, sent = previous.means.clone(), senders.any(dim=0)
    for label in sent.nonzero().flatten().tolist():
        means[label] = robust(vectors[senders[:, label], label], how).to(means.dtype)
    metrics["unguarded_classes"] = float((sent & (senders.sum(dim=0) < FEWEST)).sum())
    return Prototypes(means, previous.present | sent), metrics


def clip_by_class(vectors: torch.Tensor, senders: torch.Tensor, how: Aggregation) -> torch.Tensor:
    """Scale down vectors that are longer than the bound; vectors that were not sent stay zero.

    Args:
        vectors: by client and class, [m, K, d]. senders: those that were sent, bool [m, K].
        how: ``prototype_clip`` is a number, or ``median``, of the norms in a class; it may be 0.
    """
    clipped = vectors.clone()
    for label in senders.any(dim=0).nonzero().flatten().tolist():
        sent = vectors[senders[:, label], label]
        bound = how.prototype_clip
        limit = float(np.median(sent.double().norm(dim=1))) if bound == "median" else float(bound or 0)
        clipped[senders[:, label], label] = clip_to_norm(sent, limit) if limit > 0 else torch.zeros_like(sent)
    return clipped
