"""FisherMix (GH-OFL, Turazza et al., ICLR 2026): a cosine head with a margin, trained on features drawn from sums.

Features are drawn where the classes differ, in the span of the whitened class means (Fisher's subspace, of at most C
dimensions). There the covariance within a class is the unit matrix, the same for all classes: ours sends one second
moment, as :mod:`~flcore.math.prototypes.discriminant` does. No code of the authors is at hand; scale, margin and steps
are ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.core.optim import Sgd
from flcore.core.portable import square_root
from flcore.math.losses.basic import cross_entropy, unit_vectors
from flcore.math.prototypes.discriminant import ClassSums, LinearMap, solutions, unfolded_head

SCALE, MARGIN = 16.0, 0.2  # s and m of the loss, cross-entropy of s·(cos − m·[own class])
PER_CLASS, STEPS, RATE = 1000, 100, 0.5  # features drawn of a class, gradient steps on all of them
LEAST = 1e-9  # relative to the largest: directions of that size are rounding


def fisher_mix(totals: ClassSums, shrinkage: float, generator: torch.Generator, *, noisy: bool = False) -> LinearMap:
    """Return a linear head trained on features that are drawn from Gaussians around the class means.

    Args:
        totals: sums of one sample or more.
        shrinkage: λ > 0 of the standardised covariance within classes.
        generator: draws the features.
        noisy: negative eigenvalues of the covariance count as 0.

    Returns:
        Weight [C, D] of unit length in Fisher's subspace and bias [C]; classes without samples never win.
    """
    margins = totals.margins
    present = margins.held.nonzero().flatten()
    means, directions = margins.class_means[present], solutions(totals, shrinkage, noisy=noisy)[:, present]
    sizes, axes = torch.linalg.eigh(means @ directions)  # products of whitened class means
    kept = sizes > LEAST * sizes.max()
    lengths = square_root(sizes[kept])
    centres = (axes[:, kept] * lengths).float()
    drawn = torch.randn(len(present), PER_CLASS, len(lengths), generator=generator)
    rows = unit_vectors((centres.unsqueeze(1) + drawn).flatten(0, 1))
    weight = _trained(rows, torch.arange(len(present)).repeat_interleave(PER_CLASS), centres)
    head = torch.zeros_like(margins.class_means)
    head[present] = weight.double() @ (directions @ (axes[:, kept] / lengths)).mT
    return unfolded_head(head, torch.zeros_like(margins.counts), margins)


def _trained(rows: Tensor, labels: Tensor, start: Tensor) -> Tensor:
    """Return unit vectors by class [C, r], trained from ``start`` on unit ``rows`` [n, r]."""
    weight, optimizer = start.clone().requires_grad_(), Sgd(RATE, momentum=0.9)
    own = MARGIN * torch.nn.functional.one_hot(labels, len(start))
    for _ in range(STEPS):
        loss = cross_entropy(SCALE * (rows @ unit_vectors(weight).mT - own), labels)
        optimizer.step([weight], list(torch.autograd.grad(loss, [weight])))
    return unit_vectors(weight.detach())
