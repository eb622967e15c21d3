"""Distances between the features of classes (evaluation.md section 5.1; FedPA's table V does not say how it measured).

For generated features, in a run or afterwards. Distances in a t-SNE embedding cannot be compared across runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.math.losses.basic import distances


def class_distances(features: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the Euclidean spread within classes and distance between them; ``features`` [n, d], ``labels`` int64 [n].

    Returns:
        ``intra``: mean over classes of the mean distance of two samples of the class; ``inter``: mean over pairs of
            classes
        of the mean distance of two samples, one of each; ``centroid_inter``: mean distance of two class means.
            Undefined
        values are left out.
    """
    points = features.detach().to("cpu", torch.float64)
    classes, position = torch.unique(labels.cpu(), return_inverse=True)
    sizes = torch.bincount(position, minlength=len(classes)).double()
    # A block of rows at a time: all pairs at once would be gigabytes for a hundred classes.
    sums = torch.zeros(len(classes), len(classes), dtype=torch.float64)
    for row in range(len(classes)):
        between = distances(points[position == row], points).sum(0)
        sums[row].index_add_(0, position, between)
    means = torch.stack([points[position == row].mean(0) for row in range(len(classes))])
    values: dict[str, float] = {}
    several = sizes > 1
    if several.any():
        pairs = sizes * (sizes - 1)  # ordered, without a sample and itself, whose distance is 0
        values["intra"] = float((sums.diagonal()[several] / pairs[several]).mean())
    if len(classes) > 1:
        upper = torch.triu(torch.ones_like(sums, dtype=torch.bool), diagonal=1)
        values["inter"] = float((sums / torch.outer(sizes, sizes))[upper].mean())
        values["centroid_inter"] = float(distances(means, means)[upper].mean())
    return values


def nearest_real(generated: Tensor, labels: Tensor, real: Tensor, real_labels: Tensor) -> dict[str, float]:
    """Return the distance of generated features to real ones of their class (evaluation.md section 5.3, GFPL's check).

    ``generated`` [n, d] and ``real`` [m, d] have ``labels`` [n] and ``real_labels`` [m].

    Returns:
        ``nearest_distance``: mean Euclidean distance to the nearest real feature of the class; ``nearest_cosine``: mean
        cosine of the same pairs (0 where a feature is zero). Empty if no class has both.
    """
    lengths, cosines = [], []
    for label in torch.unique(labels).tolist():
        own = generated[labels == label].detach().to("cpu", torch.float64)
        others = real[real_labels == label].detach().to("cpu", torch.float64)
        if len(others) == 0:
            continue
        nearest = distances(own, others).min(1)
        lengths.append(nearest.values)
        cosines.append(torch.cosine_similarity(own, others[nearest.indices]))
    if not lengths:
        return {}
    return {"nearest_distance": float(torch.cat(lengths).mean()), "nearest_cosine": float(torch.cat(cosines).mean())}
