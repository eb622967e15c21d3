"""Class prototypes of many clients into one per class: the method's mean, a robust rule, and clipped ones.

A prototype has no predecessor that all clients share, so that what is clipped is the vector itself, class by class.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from flcore.aggregation.rules import robust
from flcore.aggregation.settings import Aggregation
from flcore.io.messages import Prototypes
from flcore.math.prototypes.class_means import fuse_prototypes
from flcore.math.prototypes.release import clip_to_norm

FEWEST = 3
"""Clients that a class needs before a median or a trimmed mean leaves anybody out."""


def fold_prototypes(
    uploads: Mapping[int, Prototypes],
    previous: Prototypes,
    counts: Mapping[int, torch.Tensor] | None,
    how: Aggregation,
) -> tuple[Prototypes, dict[str, float]]:
    """One prototype per class of those that clients send; a class that nobody sends keeps its previous value.

    Args:
        uploads: client id to prototypes ``[K, d]``.
        previous: what stood before.
        counts: client id to samples per class, int64 ``[K]``, as weights of ``rule: mean``; None: every client weighs
            the same. The other rules do not look at them.
        how: the section ``aggregation``; at its defaults this is :func:`fuse_prototypes`, to the bit.

    Returns:
        The prototypes; and the facts ``clipped_prototypes`` (with ``prototype_clip``: how many were longer) and
        ``unguarded_classes`` (with a robust rule: classes that only one or two clients sent, of which their mean is
        taken, since nobody can say which of two is wrong).
    """
    facts: dict[str, float] = {}
    if how.leaves_prototypes:
        return fuse_prototypes(uploads, previous, counts), facts
    senders = torch.stack([uploads[client].present for client in sorted(uploads)])
    vectors = torch.stack([uploads[client].means for client in sorted(uploads)])
    if how.prototype_clip is not None:
        clipped = clip_by_class(vectors, senders, how)
        facts["clipped_prototypes"] = float(((clipped != vectors).any(dim=2) & senders).sum())
        vectors = clipped
    if how.rule == "mean":
        kept = {c: Prototypes(vectors[i], senders[i]) for i, c in enumerate(sorted(uploads))}
        return fuse_prototypes(kept, previous, counts), facts
    means, sent = previous.means.clone(), senders.any(dim=0)
    for label in sent.nonzero().flatten().tolist():
        means[label] = robust(vectors[senders[:, label], label], how).to(means.dtype)
    facts["unguarded_classes"] = float((sent & (senders.sum(dim=0) < FEWEST)).sum())
    return Prototypes(means, previous.present | sent), facts


def clip_by_class(vectors: torch.Tensor, senders: torch.Tensor, how: Aggregation) -> torch.Tensor:
    """Vectors ``[m, K, d]`` scaled down to the bound where they are longer; those nobody sent stay zero.

    Args:
        vectors: a row per client and class.
        senders: bool ``[m, K]``, which of them were sent.
        how: with ``prototype_clip``, a number or ``median``: of the norms of the class's senders; it may be 0.
    """
    clipped = vectors.clone()
    for label in senders.any(dim=0).nonzero().flatten().tolist():
        own = vectors[senders[:, label], label]
        bound = how.prototype_clip
        limit = float(np.median(own.double().norm(dim=1))) if bound == "median" else float(bound or 0)
        # A median of 0 leaves nothing of anybody, as for weights.
        clipped[senders[:, label], label] = clip_to_norm(own, limit) if limit > 0 else torch.zeros_like(own)
    return clipped
