"""Losses of feature generators and of their clients (FedGen, baselines.md section 6; FedPA, fedpa.md).

Shapes are fixed: masks replace branches on a tensor's value, and gradients are finite where distances are zero.
Notation: B batch, d feature length, K classes, S sampled clients, z noise length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.math.losses.basic import safe_root, weighted_mean

DivMask = Literal["intra", "inter", "all"]
DivMetric = Literal["code", "norms"]
FidelityForm = Literal["element_wise", "authors_broadcast"]


def qualified_labels(counts: Tensor) -> Tensor:
    """Return the classes, bool ``[K]``, that some client saw, from counts ``[S, K]`` without smoothing."""
    return (counts > 0).any(dim=0)


def label_weights(counts: Tensor, smoothing: float = 1.0) -> Tensor:
    """Return the weight of each client's head for each class: w_kc = (n_kc + s)/Σ_j(n_jc + s), float32 ``[S, K]``.

    ``counts`` [S, K] are without pseudo-counts; the codes of FedGen and FedPA start their counters at 1. Columns sum to
    1, or to 0 for a class without samples and s = 0.
    """
    smoothed = counts.to(torch.float32) + smoothing
    total = smoothed.sum(dim=0)
    return smoothed / torch.where(total > 0, total, 1.0)


def diversity_loss(
    outputs: Tensor, noise: Tensor, labels: Tensor, mask: DivMask = "intra", metric: DivMetric = "code"
) -> Tensor:
    """Return L_div = exp(-(1/B²)·Σ_pq mask_pq·δ_h(p, q)·δ_ε(p, q)): small if different noise gives different outputs.

    Masked pairs count in B² (fedpa.md section 7f). Gradients flow to ``outputs`` [B, d], not to ``noise`` [B, z].

    Args:
        mask: ``intra``: pairs of equal labels (FedPA's paper); ``inter``: different labels (FedPA's code); ``all``
            (FedGen).
        metric: ``code``: δ_h mean absolute and δ_ε mean squared difference (public codes); ``norms`` (the papers).
    """
    apart = outputs.unsqueeze(0) - outputs.unsqueeze(1)
    noise_apart = noise.detach().unsqueeze(0) - noise.detach().unsqueeze(1)
    if metric == "code":
        products = apart.abs().mean(dim=2) * noise_apart.square().mean(dim=2)
    else:
        products = safe_root(apart.square().sum(dim=2)) * safe_root(noise_apart.square().sum(dim=2))
    if mask != "all":
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        products = products * (same if mask == "intra" else ~same)
    return torch.exp(-products.mean())


def frozen_head_logits(features: Tensor, heads: Mapping[str, Tensor]) -> Tensor:
    """Return the logits ``[S, B, K]`` of S clients' heads on features [B, d]; no gradient goes to the heads.

    ``heads`` has ``weight`` [S, K, h] and ``bias`` [S, K]; with a hidden layer (:class:`HiddenHead`) also
    ``hidden.weight`` [S, h, d] and ``hidden.bias`` [S, h], else h is d.
    """
    own = {name: tensor.detach() for name, tensor in heads.items()}
    if "hidden.weight" not in own:
        return torch.einsum("bd,skd->sbk", features, own["weight"]) + own["bias"].unsqueeze(1)
    units = torch.einsum("bd,shd->sbh", features, own["hidden.weight"]) + own["hidden.bias"].unsqueeze(1)
    return torch.einsum("sbh,skh->sbk", F.relu(units), own["weight"]) + own["bias"].unsqueeze(1)


def fidelity_loss(logits: Tensor, labels: Tensor, weights: Tensor, form: FidelityForm = "element_wise") -> Tensor:
    """Return L_fid: cross-entropy of the clients' heads on generated features, weighted by client and class.

    ``logits`` [S, B, K] are from :func:`frozen_head_logits`, ``labels`` int64 [B] the generator's input, ``weights``
    [S, K] from :func:`label_weights`; for ``form`` see :func:`weighted_client_mean`.
    """
    clients, batch, classes = logits.shape
    losses = F.cross_entropy(
        logits.reshape(clients * batch, classes), labels.repeat(clients), reduction="none"
    ).reshape(clients, batch)
    return weighted_client_mean(losses, weights[:, labels], form)


def weighted_client_mean(losses: Tensor, weights: Tensor, form: FidelityForm = "element_wise") -> Tensor:
    """Return (1/B)·Σ_j Σ_k w_kj·l_kj; the weights sum to 1 over k, hence no 1/S (fedpa.md section 5.2).

    ``losses`` and ``weights`` are [S, B]. ``authors_broadcast`` multiplies [B] by [B, 1] as the public codes do: Σ_k
    mean(w_k)·mean(l_k): its weights do not belong to the samples (fedpa.md section 7b).
    """
    if form == "authors_broadcast":
        return (weights.mean(dim=1) * losses.mean(dim=1)).sum()
    return (weights * losses).sum(dim=0).mean()


def teacher_divergence(logits: Tensor, teacher: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return FedGen's client term KL(softmax(teacher) ‖ softmax(logits)), batch mean.

    ``logits`` [B, K] are the model's on real images; ``teacher`` [B, K] the client's head on generated features of the
    same labels, constant; ``weight`` [B] is 0 for padding.
    """
    # Written out: vmap has no rule for F.kl_div and would go through clients one by one.
    target, answer = F.log_softmax(teacher.detach(), dim=1), F.log_softmax(logits, dim=1)
    divergence = target.exp() * (target - answer)
    return weighted_mean(divergence.sum(dim=1), weight)
