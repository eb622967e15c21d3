"""Long-tailed class sizes, made before the division among clients (data.md, section 2.7; Cao et al., CReFF, FedMLP)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flcore.core.errors import DataError
from flcore.data.partitioners.base import Indices, indices_by_class, merge_indices

Profile = Literal["exp", "step"]


@dataclass(frozen=True)
class Imbalance:
    """The number of samples of each class that stay in the training set.

    ``gamma`` is the size of the smallest class over the largest, above 0 and at most 1, which equalises the classes; an
    "imbalance factor of 100" in other papers is 0.01. With ``exp`` the class of rank r has n_max · gamma^(r / (C - 1))
    samples; with ``step`` C // 2 classes have gamma · n_max and the others n_max. Ranks are drawn with
    ``permute_classes``, else they are the classes' numbers. n_max is the size of the smallest class, so that the
    profile is exact; Cao's code takes N/C, more than some classes of an unbalanced dataset have.
    """

    gamma: float
    profile: Profile = "exp"
    permute_classes: bool = False

    def sizes(self, available: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the samples to keep of each class; ``available`` int64 [C], ``rng`` draws the ranks.

        For example 100 samples in each of 3 classes and gamma 0.25 give 100 · 0.25^(0, 1/2, 1) = 100, 50, 25. Raises
        DataError if a class has no samples, or none would be left.
        """
        num_classes = len(available)
        largest = int(available.min())
        ranks = np.arange(num_classes)
        if self.profile == "exp":
            exact = largest * self.gamma ** (ranks / max(num_classes - 1, 1))
        else:
            exact = np.where(ranks < num_classes - num_classes // 2, largest, self.gamma * largest)
        by_rank = np.floor(exact + 1e-9).astype(np.int64)  # 0.1 · 30 is a little less than 3 in binary
        if by_rank.min() < 1:
            raise DataError(
                f"partition.imbalance_gamma = {self.gamma:g}: the smallest class has {largest} samples and "
                f"gamma · {largest} is below 1; raise partition.imbalance_gamma or data.limit_per_class"
            )
        sizes = np.empty(num_classes, dtype=np.int64)
        sizes[rng.permutation(num_classes) if self.permute_classes else ranks] = by_rank
        return sizes

    def keep(self, labels: np.ndarray, num_classes: int, rng: np.random.Generator) -> Indices:
        """Return random samples of each class as ascending indices; ``labels`` int64 [N]. Raises as :meth:`sizes`."""
        by_class = indices_by_class(labels, num_classes)
        sizes = self.sizes(np.array([len(indices) for indices in by_class]), rng)
        return merge_indices([rng.permutation(indices)[:size] for indices, size in zip(by_class, sizes, strict=True)])


def minority_classes(counts: np.ndarray, fraction: float = 0.5) -> tuple[int, ...]:
    """Return the ⌊fraction·C⌋ classes with the fewest samples, ascending (FedMLP); none if all have equally many.

    Among classes of equal size in ``counts`` [C] the larger number is in the minority.
    """
    if len(counts) == 0 or counts.min() == counts.max():
        return ()
    order = sorted(range(len(counts)), key=lambda c: (counts[c], -c))
    return tuple(sorted(order[: math.floor(fraction * len(counts) + 1e-9)]))  # 0.29 · 100 is 28.999... in binary
