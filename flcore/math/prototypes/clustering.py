"""Clustering of features and prototypes: k-means (FedCSPC, FedMLP), average linkage, FINCH's first partition (FedMLP).

Runs on the CPU. Sums are float64, scikit-learn runs in one thread, and clusters are numbered by their first member: a
result depends on points, their order and the generator alone. Points are ``[n, d]``, n >= 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor


@dataclass(frozen=True)
class Clusters:
    """A partition of n points: ``centres`` [k, d], the means of the members, and ``labels`` int64 [n] in 0..k-1.

    Clusters are numbered in the order of their first member; none is empty.
    """

    centres: Tensor
    labels: Tensor

    @property
    def sizes(self) -> Tensor:
        return torch.bincount(self.labels, minlength=len(self.centres))


def one_thread() -> AbstractContextManager[object]:
    """Limit scikit-learn and its libraries to one thread: faster for small problems, the same sums on any machine."""
    limit: AbstractContextManager[object] = _native_libraries().limit(limits=1)
    return limit


@cache
def _native_libraries() -> ThreadpoolController:
    # Looked up once: that takes as long as fitting a small mixture, a limit a few microseconds. What is not loaded by
    # now is not found, so scikit-learn, which brings libraries of its own, has to be.
    import sklearn.cluster  # noqa: F401

    return ThreadpoolController()


def clusters_of(points: Tensor, assignment: Tensor) -> Clusters:
    """Return the clusters of ``points`` [n, d] by an assignment to arbitrary ids, int64 [n]."""
    _, first, inverse = np.unique(assignment.numpy(), return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    labels = torch.from_numpy(rank[inverse.reshape(-1)])
    sums = torch.zeros(len(first), points.shape[1], dtype=torch.float64).index_add_(0, labels, points.double())
    sizes = torch.bincount(labels, minlength=len(first))
    return Clusters((sums / sizes.unsqueeze(1)).to(points.dtype), labels)


def kmeans(
    points: Tensor,
    num_clusters: int,
    generator: np.random.Generator,
    *,
    restarts: int = 1,
    min_size: int = 1,
) -> Clusters:
    """Run k-means with k-means++ starts, for at most as many clusters as there are distinct points.

    The best of ``restarts`` starts, which ``generator`` seeds, has the smallest inertia after at most 50 iterations of
    Lloyd's algorithm. Clusters with fewer than ``min_size`` members are merged (:func:`merge_small`). Raises ValueError
    for no point or no cluster.
    """
    from sklearn.cluster import KMeans  # here, because it takes seconds

    if num_clusters < 1 or len(points) < 1:
        raise ValueError(f"k-means needs points and clusters, got {len(points)} points and {num_clusters} clusters")
    # In float64 points that differ in float32 stay apart in scikit-learn's expanded distances.
    array = points.numpy().astype(np.float64)
    count = min(num_clusters, num_distinct(array))
    seed = int(generator.integers(2**31))
    with one_thread():
        model = KMeans(count, init="k-means++", n_init=restarts, max_iter=50, random_state=seed)
        assignment = model.fit(array).labels_
    return merge_small(points, clusters_of(points, torch.from_numpy(assignment.astype(np.int64))), min_size)


def num_distinct(points: NDArray[np.float64]) -> int:
    """Return the number of different rows of ``points`` [n, d], the most clusters with different centres."""
    return len(np.unique(points, axis=0))


def merge_small(points: Tensor, clusters: Clusters, min_size: int) -> Clusters:
    """Merge clusters with fewer than ``min_size`` members, smallest first, each into the one with the nearest centre.

    Stops when all are large enough or one is left. Centres are recomputed after each merge; the first of equals counts.
    """
    while len(clusters.centres) > 1 and int(clusters.sizes.min()) < min_size:
        smallest = int(clusters.sizes.argmin())
        squared = (clusters.centres - clusters.centres[smallest]).double().square().sum(1)
        squared[smallest] = torch.inf
        merged = torch.where(clusters.labels == smallest, squared.argmin(), clusters.labels)
        clusters = clusters_of(points, merged)
    return clusters


def subsampled_means(
    points: Tensor, labels: Tensor, ratio: float, repeats: int, generator: np.random.Generator
) -> Tensor:
    """Return FedCSPC's prototypes ``[k · repeats, d]``: per cluster, means of random subsets without replacement.

    A subset has max(1, floor(ratio · size)) members; with ratio 1 every repetition is the cluster mean. ``labels`` are
    int64 [n] in 0..k-1, every cluster with a member.
    """
    rows = []
    for cluster in range(int(labels.max()) + 1):
        members = (labels == cluster).nonzero().flatten().numpy()
        # The small addend: 0.29 · 100 is 28.999... in binary.
        size = max(1, math.floor(ratio * len(members) + 1e-9))
        for _ in range(repeats):
            # Sorted, so that with ratio 1 all repetitions are the same sum.
            chosen = np.sort(generator.choice(members, size, replace=False))
            rows.append(points[torch.from_numpy(chosen)].double().mean(0))
    return torch.stack(rows).to(points.dtype)


def cluster_prototypes(
    features: Tensor,
    labels: Tensor,
    stream: Callable[[int], np.random.Generator],
    *,
    num_clusters: int,
    ratio: float,
    repeats: int,
    min_size: int = 1,
    few: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return a FedCSPC client's upload (Qi et al., ACM MM 2023): several prototypes for each of its classes.

    Per class: k-means, then :func:`subsampled_means` of each cluster, or its mean alone if it has fewer than ``few``
    samples; without either and without merging, sum over classes of min(num_clusters, distinct features) · repeats
    prototypes. One cluster, ratio 1 and one repetition give the class means (TPG). ``stream`` maps a class to its
    generator: its draws do not depend on the client's other classes. Returns prototypes ``[q, d]`` and their classes
    int64 ``[q]``, ascending.
    """
    found, classes = [], []
    for label in torch.bincount(labels).nonzero().flatten().tolist():
        own, generator = features[labels == label], stream(label)
        if len(own) < few:
            found.append(own.double().mean(0, keepdim=True).to(own.dtype))
        else:
            clusters = kmeans(own, num_clusters, generator, min_size=min_size)
            found.append(subsampled_means(own, clusters.labels, ratio, repeats, generator))
        classes.append(torch.full((len(found[-1]),), label, dtype=torch.int64))
    return torch.cat(found), torch.cat(classes)


def first_neighbours(points: Tensor, *, centred: bool = False) -> Tensor:
    """Return the index int64 ``[n]`` of each point's nearest other point by cosine, the first of equals, n >= 2.

    A zero vector has cosine 0 with all. ``centred`` subtracts the mean of the points first.
    """
    array = points.numpy().astype(np.float64)
    if centred:
        array = array - array.mean(axis=0)
    norms = np.linalg.norm(array, axis=1, keepdims=True)
    unit = np.divide(array, norms, out=np.zeros_like(array), where=norms > 0)
    # Rounded, so that ties (duplicates) are ties on every machine.
    cosines = (unit @ unit.T).round(12)
    np.fill_diagonal(cosines, -np.inf)
    return torch.from_numpy(cosines.argmax(axis=1))


def finch(points: Tensor, *, centred: bool = False) -> Clusters:
    """Return the first partition of FINCH (Sarfraz et al., CVPR 2019): points join their nearest neighbour by cosine.

    Clusters are the connected components. ``centred`` subtracts the mean of the points for the cosines (FedMLP's
    variant), not for the centres. Without ties a permutation of the points permutes the labels.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(points)
    if count == 1:
        return Clusters(points.clone(), torch.zeros(1, dtype=torch.int64))
    links = (np.ones(count), (np.arange(count), first_neighbours(points, centred=centred).numpy()))
    _, component = connected_components(coo_array(links, shape=(count, count)), directed=False)
    return clusters_of(points, torch.from_numpy(component.astype(np.int64)))


def average_linkage(points: Tensor, num_clusters: int) -> Clusters:
    """Return at most ``num_clusters`` clusters, merged by the mean Euclidean distance of their members."""
    from scipy.cluster.hierarchy import fcluster, linkage  # here, because it takes long

    if len(points) == 1:
        return Clusters(points.clone(), torch.zeros(1, dtype=torch.int64))
    tree = linkage(points.numpy().astype(np.float64), method="average")
    found = fcluster(tree, num_clusters, criterion="maxclust").astype(np.int64)
    return clusters_of(points, torch.from_numpy(found))


ClusterFunction = Callable[[Tensor], Clusters]
"""Clusters points [n, d], n >= 1."""

Clustering = Literal["finch", "centred", "kmeans", "agglomerative", "none"]


def partition_by(name: Clustering, num_clusters: int, generator: np.random.Generator) -> ClusterFunction:
    """Return a clustering by name; ``none`` makes each point its own cluster.

    ``num_clusters`` is for k-means (best of ten starts, drawn by ``generator``) and average linkage.
    """
    ways: dict[Clustering, ClusterFunction] = {
        "finch": finch,
        "centred": partial(finch, centred=True),
        "kmeans": partial(kmeans, num_clusters=num_clusters, generator=generator, restarts=10),
        "agglomerative": partial(average_linkage, num_clusters=num_clusters),
        "none": lambda points: Clusters(points, torch.arange(len(points))),
    }
    return ways[name]


@dataclass(frozen=True)
class ClassClusters:
    """Clusters of class prototypes over fixed shapes, for a loss.

    ``centres`` [K, d], zero rows where absent; ``present`` bool [K], the rows that are centres; ``assignment`` int64
    [K], the row of each class's centre, 0 for classes without prototype; ``count`` of clusters.
    """

    centres: Tensor
    present: Tensor
    assignment: Tensor
    count: int


def cluster_classes(means: Tensor, present: Tensor, partition: ClusterFunction) -> ClassClusters:
    """Return FedMLP's semantic prototypes: clusters of the class prototypes that exist, padded to K rows.

    ``means`` [K, d], ``present`` bool [K]; with no class present there is no cluster.
    """
    centres = torch.zeros_like(means)
    assignment = torch.zeros(len(means), dtype=torch.int64)
    classes = present.nonzero().flatten()
    count = 0
    if len(classes):
        clusters = partition(means[classes])
        count = len(clusters.centres)
        centres[:count] = clusters.centres
        assignment[classes] = clusters.labels
    return ClassClusters(centres, torch.arange(len(means)) < count, assignment, count)


@dataclass(frozen=True)
class Drawn:
    """Partners of n prototypes: ``same`` and ``other`` int64 [n, m], and ``usable`` bool [n, 1].

    ``other`` has another label; where no prototype has one, the row is not usable.
    """

    same: Tensor
    other: Tensor
    usable: Tensor

    def rows(self, rows: Tensor) -> Drawn:
        return Drawn(self.same[rows], self.other[rows], self.usable[rows])


class Partners:
    """Draws for each prototype u_i partners u_j, u_k from its client's whole set.

    j has the label of i and is not i, unless i is alone: then j = i. k has another label; if the client has only one
    class, k comes from all clients.
    """

    def __init__(self, labels: Tensor, sources: Tensor) -> None:
        """Index prototypes by client and label; ``labels`` and ``sources`` (clients) are int64 ``[n]``, n >= 1."""
        self._device = labels.device
        labels, sources = labels.cpu(), sources.cpu()
        self._by_source = _Layout(sources, labels)
        self._by_label = _Layout(torch.zeros_like(labels), labels)
        self._lonely = (self._by_source.outside == 0).unsqueeze(1)
        self._usable = (self._by_label.outside > 0).unsqueeze(1)

    def draw(self, count: int, generator: torch.Generator) -> Drawn:
        """Draw ``count`` partners of each kind for every prototype, on the labels' device."""
        shape = (len(self._usable), count)
        same, other = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        anywhere, own = self._by_label.pick_outside(other), self._by_source.pick_outside(other)
        chosen = self._by_source.pick_inside(same), torch.where(self._lonely, anywhere, own), self._usable
        return Drawn(*(tensor.to(self._device) for tensor in chosen))


class _Layout:
    """Items sorted by group and, within it, by label: a label of a group is a range, the rest of the group two."""

    def __init__(self, groups: Tensor, labels: Tensor) -> None:
        cells = groups * (int(labels.max()) + 1) + labels
        self._order = torch.argsort(cells, stable=True)
        self._rank = torch.argsort(self._order)
        self._cell = _bounds(cells[self._order], cells)
        self._group = _bounds(groups[self._order], groups)
        self.outside = (self._group[1] - self._group[0]) - (self._cell[1] - self._cell[0])

    def pick_inside(self, uniform: Tensor) -> Tensor:
        """Return others of each item's group and label by uniform numbers [n, m]; the item itself where it is alone."""
        start, end = (bound.unsqueeze(1) for bound in self._cell)
        place = start + (uniform * (end - start - 1)).long()
        alone = end - start == 1
        return self._order[torch.where(alone, start, place + (place >= self._rank.unsqueeze(1)).long())]

    def pick_outside(self, uniform: Tensor) -> Tensor:
        """Return items of each item's group with other labels by uniform numbers [n, m]; any where there is none."""
        start, end = (bound.unsqueeze(1) for bound in self._cell)
        place = self._group[0].unsqueeze(1) + (uniform * self.outside.unsqueeze(1)).long()
        place = torch.where(place >= start, place + (end - start), place)
        return self._order[place.clamp_max(len(self._order) - 1)]


def _bounds(ordered: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
