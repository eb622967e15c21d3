"""Differential privacy of uploaded class means: clipping, Gaussian noise, suppression of rare classes, accounting.

The guarantees cover *one message*: class means, or other vectors in feature space. Model weights, label counts, the
list of a client's classes, second moments, losses and metrics are sent unprotected, and most depend on the same images:
a run that also sends weights has **no** differential privacy, however strong the noise on its prototypes. See
:func:`noisy_means` and :func:`noisy_vectors` for each guarantee and its assumptions. Three more limits:

* Noise comes from a seeded generator, so that runs can be repeated; the seed allows to subtract it. This simulates a
  guarantee to measure its cost; a deployment must draw the noise from a secret source.
* Noise is float32; attacks on floating-point noise (Mironov, CCS 2012) are not countered.
* Suppression of rare classes without noise is no guarantee: a mean over two samples is nearly a single feature, and
  features of single images can be inverted (fedpg.md section 7l, fedpa.md section 7n).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from flcore.core.errors import require_accounting
from flcore.core.portable import square_root

Unit = Literal["sample", "client"]


def clip_to_norm(vectors: Tensor, max_norm: float) -> Tensor:
    """Scale every vector longer than ``max_norm`` > 0 (L2) to that length; leave the others bit for bit.

    Clipping alone protects nothing: it bounds the influence of one vector, which scales the noise. Rounding may exceed
    ``max_norm`` by a few parts in 10⁷.
    """
    if not max_norm > 0:
        raise ValueError(f"the norm to clip to must be positive, got {max_norm}")
    squares = vectors.square().sum(dim=-1, keepdim=True)
    too_long = squares > max_norm**2
    # The root only where it is used: its gradient at 0 is infinite.
    return torch.where(too_long, vectors * (max_norm / square_root(torch.where(too_long, squares, 1.0))), vectors)


def frequent_classes(present: Tensor, counts: Tensor, min_count: int) -> Tensor:
    """Return the class means that may leave a client, bool ``[K]``: present, from at least ``min_count`` samples.

    This has no (ε, δ): means still depend on each sample, and the *set* of missing classes reveals something.
    """
    return present & (counts >= min_count)


def mean_sensitivity(counts: Tensor, released: Tensor, max_norm: float, unit: Unit) -> Tensor:
    """Return the largest L2 change of released class means if one protected unit is replaced, float32 ``[K]``.

    ``sample``: replacing one sample by another *of the same class* moves that class's mean alone, by at most 2·C/n_c.
    ``client``: replacing all of a client's samples, and with them the model they trained, moves every one of the k
    released means from anywhere to anywhere in the ball of radius C: 2·C·√k for all rows together. Other rows have 0.
    ``counts`` n_c are at least 1 where ``released`` (bool [K]); features (``sample``) or means (``client``) are clipped
    to ``max_norm`` C.
    """
    if unit == "sample":
        bound = 2 * max_norm / counts.clamp_min(1).to(torch.float32)
    else:
        bound = 2 * max_norm * square_root(released.sum().to(torch.float32)).expand(len(released))
    return torch.where(released, bound, 0.0)


def noisy_means(
    means: Tensor,
    counts: Tensor,
    released: Tensor,
    generator: torch.Generator,
    *,
    max_norm: float,
    noise_multiplier: float,
    unit: Unit,
) -> Tensor:
    """Return class means for upload: clipped, with Gaussian noise, zero where not released.

    Every coordinate of row c gets noise N(0, (noise_multiplier·Δ_c)²) with Δ from :func:`mean_sensitivity`;
    :func:`privacy_spent` gives the cost of one or several uploads.

    ``unit = "sample"`` protects one image of a client, given its class means. Assumptions: (1) ``means`` are averages
    of features that were *each* clipped to ``max_norm`` before averaging; clipping the mean afterwards is not enough.
    (2) The feature extractor does not depend on the protected image: the guarantee does **not** hold for an extractor
    that was trained on it, which moves all features at once, unless it is differentially private. (3) The image's
    label, the client's label counts and the list of its classes are public: neighbours differ in one image, not in its
    label. The classes of a client share no image, so releasing many classes costs no more than releasing one.

    ``unit = "client"`` protects all images of a client and any model trained on them, given its class means (local
    differential privacy). Means are clipped here, however they were made. The list of released classes is public. Needs
    noise of the order of the means themselves.

    Neither protects label counts, the list of classes, weights, or anything else a client sends.

    Args:
        means: float32 ``[K, d]``. counts: samples of each mean, ``[K]``. released: bool ``[K]``
            (:func:`frequent_classes`).
        generator: a CPU generator; always draws K·d normal numbers.
        noise_multiplier: z ≥ 0, the standard deviation in units of the sensitivity; 0 clips only.

    Raises:
        ValueError: ``max_norm`` is not positive or ``noise_multiplier`` is negative.
    """
    if not noise_multiplier >= 0:
        raise ValueError(f"the noise multiplier cannot be negative, got {noise_multiplier}")
    noise = torch.randn(means.shape, generator=generator).to(means.device)
    deviation = noise_multiplier * mean_sensitivity(counts, released, max_norm, unit)
    clipped = torch.where(released.unsqueeze(1), clip_to_norm(means, max_norm), 0.0)
    return clipped + deviation.unsqueeze(1) * noise


def noisy_vectors(vectors: Tensor, generator: torch.Generator, *, max_norm: float, noise_multiplier: float) -> Tensor:
    """Return vectors [q, d] for upload, clipped and with Gaussian noise: centres of clusters, components of mixtures.

    Protects all of a client's samples at once (``unit = "client"`` of :func:`noisy_means`): replacing them moves each
    vector from anywhere to anywhere in the ball of radius C, all together by at most Δ = 2·C·√q. Every coordinate gets
    noise N(0, (noise_multiplier·Δ)²). A single sample has no smaller bound: clustering lets it move every centre. q,
    and the class, weight and count of each vector, are public.
    """
    every = torch.ones(len(vectors), dtype=torch.bool, device=vectors.device)
    return noisy_means(
        vectors, every, every, generator, max_norm=max_norm, noise_multiplier=noise_multiplier, unit="client"
    )


def privacy_spent(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return the ε ≥ 0 of (ε, δ)-differential privacy after ``releases`` uploads of :func:`noisy_means` by one client.

    Gaussian mechanisms composed by Rényi differential privacy (Mironov, CSF 2017), converted with Google's
    ``dp-accounting``. Neighbours differ by the replacement of one unit. This covers the noisy class means alone: it is
    **not** the ε of a run that also sends weights or counts. No amplification by sampling is claimed: the server knows
    the participants, and means are over a class's samples without secret subsampling.

    ``noise_multiplier`` z ≥ 0 is the standard deviation in units of the sensitivity: ε is infinite for 0. ``delta`` δ
    in (0, 1) is customarily less than one over the number of protected units.

    Raises:
        ValueError: an argument is out of range. ConfigError: with noise, the package for it is not installed.
    """
    if not noise_multiplier >= 0 or releases < 0 or not 0 < delta < 1:
        raise ValueError(
            "an account needs noise_multiplier >= 0, releases >= 0 and 0 < delta < 1, "
            f"got {noise_multiplier}, {releases}, {delta}"
        )
    if noise_multiplier:
        require_accounting()
    if releases == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    import dp_accounting  # not one of the packages that flcore itself needs
    from dp_accounting import rdp

    # The library takes the multiplier in units of the sensitivity, which here is already the one of a replacement.
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier), releases)
    return float(accountant.get_epsilon(delta))
