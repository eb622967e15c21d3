"""Losses, targets and diagnostics of FedPG's image generator (fedpg.md), and VHL's images of noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.io.messages import Weights
from flcore.math.generators.networks import ImageGenerator, constant_output
from flcore.math.losses.basic import safe_root
from flcore.math.prototypes.class_means import class_distances

GeneratorDistance = Literal["squared", "l2"]
MatchForm = Literal["softmax", "zero_rows", "l2"]

_BLOCK = 256  # images that are generated, or compared with prototypes, at a time


def as_pixels(made: Tensor) -> Tensor:
    """Map an image generator's −1 to 1 to pixels of 0 to 1."""
    return (made + 1) / 2


def generated_pixels(architecture: ImageGenerator, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
    """Return images ``[n, C, H, W]`` on 0 to 1, constants, of a generator in evaluation mode with ``weights``.

    ``weights`` and ``noise`` [n, z] are on one device; ``labels`` int64 [n].
    """
    blocks = zip(torch.split(noise, _BLOCK), torch.split(labels, _BLOCK), strict=True)
    return as_pixels(torch.cat([constant_output(architecture, weights.params, weights.buffers, *b) for b in blocks]))


def squared_distances(features: Tensor, targets: Tensor) -> Tensor:
    """Return ‖z_i − P_c‖², ``[B, K]``, of features ``[B, d]`` and targets ``[K, d]``.

    From differences (B·K·d values): expanding the square would cancel where features and targets are close.
    """
    return (features.unsqueeze(1) - targets.unsqueeze(0)).square().sum(dim=2)


def dce_loss(
    features: Tensor,
    labels: Tensor,
    targets: Tensor,
    *,
    scale: float = 2.0,
    distance: GeneratorDistance = "squared",
    denominator: Literal["all", "negatives"] = "all",
) -> Tensor:
    """Return ℓ_dce: cross-entropy over logits −s·D, D the distances of features to all classes' targets (Eq. 7 and 8).

    Args:
        features: of generated images, not normalised, ``[B, d]``. labels: int64 ``[B]``. targets: P', ``[K, d]``.
        scale: s; the paper's temperature τ is 1/s (fedpg.md section 7b).
        distance: ``squared`` (the code) or ``l2``.
        denominator: ``all`` classes (the code); ``negatives``: without the label's class, as Eq. 8 is printed: no lower
            bound (fedpg.md section 7a), for comparison only, K ≥ 2.
    """
    logits = squared_distances(features, targets)
    logits = -scale * (logits if distance == "squared" else safe_root(logits))
    if denominator == "all":
        return F.cross_entropy(logits, labels)
    own = labels.unsqueeze(1) == torch.arange(targets.shape[0], device=labels.device)
    positive = torch.where(own, logits, 0.0).sum(dim=1)
    return (logits.masked_fill(own, -math.inf).logsumexp(dim=1) - positive).mean()


def prototype_loss(features: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """Return ℓ_p = (1/B)·Σ_i ‖z_i − P'_{y_i}‖²; features ``[B, d]``, labels ``[B]``, targets ``[K, d]``."""
    return (features - targets[labels]).square().sum(dim=1).mean()


def prototype_match(
    targets: Tensor,
    prototypes: Tensor,
    present: Tensor,
    *,
    scale: float = 2.0,
    reduction: Literal["mean", "sum"] = "mean",
    form: MatchForm = "softmax",
) -> Tensor:
    """Return d(P', P): the distance of trainable targets to the global prototypes, over the classes that have one.

    Args:
        targets: P', ``[K, d]``. prototypes: P, ``[K, d]``, constant. present: bool ``[K]``; 0 with none present.
        scale: s of the softmax over −s·‖P'_c − P_i‖².
        reduction: ``mean`` over the present classes (the code) or their ``sum`` (the paper).
        form: ``softmax`` over the present classes; ``zero_rows``, the code's, with a zero vector for a missing class in
            the
            denominator (fedpg.md section 7e); ``l2``: ‖P'_c − P_c‖², which does not saturate at large distances (7c).
    """
    rows = torch.where(present.unsqueeze(1), prototypes.detach(), 0.0)
    if form == "l2":
        values = (targets - rows).square().sum(dim=1)
    else:
        logits = -scale * squared_distances(targets, rows)
        if form == "softmax":
            # The most negative number instead of -inf: with no class present -inf - -inf would be NaN.
            logits = logits.masked_fill(~present, torch.finfo(logits.dtype).min)
        values = -F.log_softmax(logits, dim=1).diagonal()
    total = torch.where(present, values, 0.0).sum()
    return total if reduction == "sum" else total / present.sum().clamp_min(1)


def guided_targets(prototypes: Tensor, present: Tensor, previous: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return FedPG's P' with ``proto_init = global``, the targets of a round (fedpg.md section 7c).

    P_c if the class has a prototype, bit for bit; else the ``previous`` round's target [K, d]; else, in the first
    training (None), a draw from N(0, I) rescaled to the mean norm of the present prototypes, if any. ``generator``
    always makes the same draws. ``prototypes`` P are [K, d], ``present`` bool [K].
    """
    num_classes, feature_dim = prototypes.shape
    fallback = random_targets(num_classes, feature_dim, generator).to(prototypes.device)
    norms = torch.where(present, torch.linalg.vector_norm(prototypes, dim=1), 0.0)
    mean_norm = norms.sum() / present.sum().clamp_min(1)
    rescaled = fallback * (mean_norm / torch.linalg.vector_norm(fallback, dim=1, keepdim=True))
    fallback = torch.where(present.any(), rescaled, fallback) if previous is None else previous
    return torch.where(present.unsqueeze(1), prototypes, fallback)


def random_targets(num_classes: int, feature_dim: int, generator: torch.Generator) -> Tensor:
    """Return FedPG's P' with ``proto_init = random`` (the code): N(0, 1), float32 ``[K, d]``."""
    return torch.randn(num_classes, feature_dim, generator=generator)


def nearest_prototype_accuracy(features: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor) -> Tensor:
    """Return the share of features of present classes with their label's as the nearest present prototype; 0 with none.

    Low values cost accuracy (fedpg.md sections 5.3 and 11). ``features`` [B, d] of virtual images, the global
    ``prototypes`` P [K, d], not the targets P'.
    """
    rows = torch.where(present.unsqueeze(1), prototypes, 0.0)
    # In blocks: differences of 6,400 images to 100 prototypes of 2,048 values would be 5 GiB at once.
    blocks = [squared_distances(block, rows) for block in torch.split(features, _BLOCK)]
    nearest = torch.cat(blocks).masked_fill(~present, math.inf).argmin(dim=1)
    known = present[labels]
    return (known & (nearest == labels)).sum() / known.sum().clamp_min(1)


def target_facts(targets: Tensor, prototypes: Tensor, present: Tensor) -> dict[str, float]:
    """Return ``target_shift`` ‖P' − P‖/‖P‖ and ``prototype_spread``, the mean squared distance of two P, where defined.

    ``targets`` P' and ``prototypes`` P are [K, d], ``present`` bool [K].
    """
    facts, means = {}, prototypes[present]
    length = torch.linalg.vector_norm(means)
    if length > 0:
        facts["target_shift"] = (torch.linalg.vector_norm(targets[present] - means) / length).item()
    if len(means) > 1:
        pairs = len(means) * (len(means) - 1)
        facts["prototype_spread"] = squared_distances(means, means).sum().item() / pairs
    return facts


def image_facts(
    features: Tensor, logits: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor, most: int = 16
) -> dict[str, float]:
    """Return diagnostics of virtual images: distances of features, accuracy of the head (fedpg.md section 5.3).

    Args:
        features: ``[B, d]``, grouped by class, equally many of each. logits: ``[B, K]``. labels: int64 ``[B]``.
        prototypes: the global P, ``[K, d]``. present: bool ``[K]``.
        most: images per class for the distances between images: pairs grow with the square.

    Returns:
        ``nearest_prototype_accuracy``, ``head_accuracy``, ``prototype_distance`` (squared, mean; with a class present),
        ``virtual_intra``, ``virtual_inter``, ``virtual_centroid_inter``.
    """
    facts = {
        "nearest_prototype_accuracy": nearest_prototype_accuracy(features, labels, prototypes, present).item(),
        "head_accuracy": (logits.argmax(dim=1) == labels).float().mean().item(),
    }
    known = present[labels]
    if known.any():
        facts["prototype_distance"] = prototype_loss(features[known], labels[known], prototypes).item()
    some = torch.arange(len(labels), device=labels.device) % (len(labels) // len(present)) < most
    distances = class_distances(features[some], labels[some])
    return facts | {f"virtual_{name}": value for name, value in distances.items()}


def gaussian_virtual_images(
    num_classes: int,
    per_class: int,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    map_size: int = 8,
    std: float = 0.5,
) -> Tensor:
    """Return VHL's virtual set (Tang et al., ICML 2022), uint8 ``[K·n, C, H, W]``, class-major: noise with a class.

    A mean map ``[C, map_size, map_size]`` per class from N(0, 1), n samples each from N(mean, std²), enlarged
    bilinearly to ``shape`` (C, H, W), scaled with the minimum and maximum of the *whole set* to 0..255 and rounded
    (baselines.md section 8). Everything is on the CPU.
    """
    channels, height, width = shape
    means = torch.randn(num_classes, 1, channels, map_size, map_size, generator=generator)
    maps = means + std * torch.randn(num_classes, per_class, channels, map_size, map_size, generator=generator)

    def enlarge(block: Tensor) -> Tensor:
        return F.interpolate(block, size=(height, width), mode="bilinear", align_corners=False)

    return scaled_to_bytes(enlarge, maps)


def scaled_to_bytes(make: Callable[[Tensor], Tensor], classes: Tensor) -> Tensor:
    """Return images ``[K·n, C, H, W]``, made of each class's ``[n, ...]``, with the set's extremes as 0 and 255."""
    # Two passes class by class: the whole set as float32 would need four times the memory of the result.
    low = min(float(make(block).min()) for block in classes)
    high = max(float(make(block).max()) for block in classes)
    scale = 255 / max(high - low, 1e-12)
    return torch.cat([((make(block) - low) * scale).round().clamp(0, 255).to(torch.uint8) for block in classes])
