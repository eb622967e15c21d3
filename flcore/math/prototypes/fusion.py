"""Fusion of many clients' prototypes into one per class."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flcore.io.messages import Prototypes


def fuse_prototypes(
    uploads: Mapping[int, Prototypes], previous: Prototypes, counts: Mapping[int, Tensor] | None = None
) -> Prototypes:
    """Average each class over its uploads; a class without upload keeps its ``previous`` value.

    Previous values are needed under partial participation (baselines.md section 15).

    Args:
        uploads: by client id.
        counts: client id to samples per class, int64 [K], as weights. None: equal weights (FedProto's code, FedPG,
            FedMLP).
    """
    if counts is None:
        return average_prototypes(uploads, previous)
    clients = sorted(uploads)
    weights = torch.stack([counts[client] * uploads[client].present for client in clients])
    means, present = weighted_class_means(torch.stack([uploads[client].means for client in clients]).double(), weights)
    return Prototypes(torch.where(present.unsqueeze(1), means.float(), previous.means), previous.present | present)


def weighted_class_means(means: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return φ_c = Σ_k w_kc·φ_kc/Σ_k w_kc, float32 [K, d], and the classes with a weight, bool [K] (fedpa.md 5.1).

    ``means`` [S, K, d]; rows of weight 0 are ignored. ``weights`` [S, K]: sample counts n_kc (FedPA), or 1 for a
    client's classes (FedPG), else 0. Classes without weight have mean 0.
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
