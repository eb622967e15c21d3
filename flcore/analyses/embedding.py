"""t-SNE as all analyses use it (evaluation.md V2): PCA to 50 dimensions, perplexity 30, started from a PCA, seed 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PERPLEXITY = 30
COMPONENTS = 50
ITERATIONS = 1000
FEWEST_POINTS = 4


def embed(features: Tensor) -> NDArray[np.float64]:
    """Two coordinates per feature, a function of the features alone.

    Args:
        features: ``[n, d]``, n >= 4, floating. Not standardised.

    Returns:
        float64 ``[n, 2]``; all zero where all features are equal. Below 91 features the perplexity is (n - 1)/3.

    Raises:
        ValueError: fewer than four features, or values that are not finite.
    """
    # Here, because they take seconds to import.
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    points = features.detach().cpu().numpy().astype(np.float64)
    if len(points) < FEWEST_POINTS:
        raise ValueError(f"t-SNE needs at least {FEWEST_POINTS} features, got {len(points)}")
    if not np.isfinite(points).all():
        raise ValueError("t-SNE needs finite features")
    if (points == points[0]).all():
        return np.zeros((len(points), 2))
    with threadpool_limits(1):
        if points.shape[1] > COMPONENTS and len(points) > COMPONENTS:
            points = PCA(COMPONENTS, svd_solver="full").fit_transform(points)
        model = TSNE(
            perplexity=min(PERPLEXITY, (len(points) - 1) / 3),
            init="pca" if points.shape[1] > 1 else "random",
            max_iter=ITERATIONS,
            random_state=0,
            n_jobs=1,
        )
        return np.asarray(model.fit_transform(points), dtype=np.float64)
