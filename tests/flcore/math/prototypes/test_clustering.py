"""Clusters of features and prototypes (fedcspc.md, sections 4.7 and 8, fact 11; fedmlp.md, section 8, fact 5)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor

from flcore.core.rng import numpy_stream
from flcore.math.prototypes.clustering import (
    Clustering,
    Clusters,
    Partners,
    average_linkage,
    cluster_classes,
    cluster_prototypes,
    clusters_of,
    finch,
    first_neighbours,
    kmeans,
    merge_small,
    one_thread,
    partition_by,
    subsampled_means,
)

SEVEN = torch.tensor(
    [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [0.2, 0.9], [-1.0, -1.0], [-1.0, -0.9]]
)  # fedmlp.md, fact 5


def stream(label: int) -> np.random.Generator:
    return numpy_stream(0, "prototypes", 3, 7, label)


def partition_of(clusters: Clusters) -> set[frozenset[int]]:
    labels = clusters.labels.tolist()
    return {frozenset(i for i, label in enumerate(labels) if label == k) for k in set(labels)}


def blobs(seed: int, sizes: tuple[int, ...], dim: int = 3) -> Tensor:
    """Groups of points around far-away centres on the axes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 100 * torch.eye(dim)[: len(sizes)]
    rows = [centre + torch.rand(size, dim, generator=generator) for centre, size in zip(centres, sizes, strict=True)]
    return torch.cat(rows)


def test_clusters_are_numbered_by_their_first_member_and_never_empty() -> None:
    """Ids 7, 2, 7, 5: numbered 0, 1, 0, 2; centres (1 + 3)/2 = 2, 2... of the members."""
    found = clusters_of(torch.tensor([[1.0], [5.0], [3.0], [9.0]]), torch.tensor([7, 2, 7, 5]))
    assert found.labels.tolist() == [0, 1, 0, 2]
    assert found.centres.tolist() == [[2.0], [5.0], [9.0]]
    assert found.sizes.tolist() == [2, 1, 1]


def test_merging_small_clusters() -> None:
    """Clusters {0, 1} at 0.5, {4} at 4, {10, 11} at 10.5, min 2: {4} joins the first (3.5 against 6.5 away)."""
    points = torch.tensor([[0.0], [1.0], [4.0], [10.0], [11.0]])
    start = clusters_of(points, torch.tensor([0, 0, 1, 2, 2]))
    assert merge_small(points, start, 1) is start
    found = merge_small(points, start, 2)
    assert found.labels.tolist() == [0, 0, 0, 1, 1]
    assert found.centres.flatten().tolist() == pytest.approx([5 / 3, 10.5])
    # min 3: the second (2 members) joins too; one cluster is the end, whatever the minimum.
    assert merge_small(points, start, 3).labels.tolist() == [0] * 5
    assert merge_small(points, start, 99).centres.tolist() == [[pytest.approx(5.2)]]


def test_one_thread_and_then_as_before() -> None:
    """Also for libraries that scikit-learn brings; a second limit inspects nothing again."""
    kmeans(torch.rand(4, 2), 2, stream(0))

    def threads() -> list[int]:
        return [library["num_threads"] for library in threadpool_info()]

    with threadpool_limits(2):
        before = threads()
        for _ in range(2):
            with one_thread():
                assert set(threads()) == {1}
            assert threads() == before
    assert max(before) == 2


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_finds_what_is_apart(seed: int) -> None:
    points = blobs(seed, (5, 3, 4))
    found = kmeans(points, 3, stream(seed))
    assert found.labels.tolist() == [0] * 5 + [1] * 3 + [2] * 4
    assert torch.allclose(found.centres[1], points[5:8].mean(0), atol=1e-4)


@pytest.mark.filterwarnings("error")  # scikit-learn warns when it finds fewer clusters than it was asked for
def test_kmeans_never_makes_more_clusters_than_points_or_distinct_points() -> None:
    """min(K_c, |F|) clusters; coinciding points leave clusters empty: skipped."""
    assert len(kmeans(torch.tensor([[1.0], [2.0]]), 4, stream(0)).centres) == 2
    dead = kmeans(torch.zeros(10, 5), 4, stream(0))
    assert dead.centres.tolist() == [[0.0] * 5]
    assert dead.labels.tolist() == [0] * 10
    twice = kmeans(torch.tensor([[1.0], [2.0], [1.0], [2.0]]), 3, stream(0))
    assert twice.labels.tolist() == [0, 1, 0, 1]


def test_kmeans_is_a_function_of_its_generator() -> None:
    points = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    runs = [kmeans(points, 4, stream(label)).labels for label in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])  # no structure: other starts, other clusters


@pytest.mark.parametrize(("points", "clusters"), [(0, 3), (3, 0)])
def test_kmeans_of_nothing(points: int, clusters: int) -> None:
    with pytest.raises(ValueError, match=f"{points} points and {clusters} clusters"):
        kmeans(torch.zeros(points, 2), clusters, stream(0))


def test_ratio_one_repeats_the_cluster_mean() -> None:
    """Fact 11: with r = 1 all n_repeat copies equal the cluster mean."""
    points = blobs(0, (5, 3))
    labels = torch.tensor([0] * 5 + [1] * 3)
    found = subsampled_means(points, labels, 1.0, 4, stream(0))
    assert found.shape == (8, 3)
    for row in range(8):
        assert torch.equal(found[row], found[4 * (row // 4)])
    assert torch.allclose(found[0], points[:5].mean(0), atol=1e-4)
    assert torch.allclose(found[4], points[5:].mean(0), atol=1e-4)


@pytest.mark.parametrize(
    ("members", "ratio", "size"), [(5, 0.5, 2), (1, 0.5, 1), (3, 0.2, 1), (10, 0.8, 8), (100, 0.29, 29)]
)
def test_size_of_a_subset(members: int, ratio: float, size: int) -> None:
    """max(1, floor(r·n)) members without replacement: of powers of two a mean shows who was in it."""
    powers = 2.0 ** torch.arange(members, dtype=torch.float64).unsqueeze(1) if members < 40 else None
    points = torch.arange(members, dtype=torch.float64).unsqueeze(1) if powers is None else powers
    found = subsampled_means(points, torch.zeros(members, dtype=torch.int64), ratio, 20, stream(0)).flatten()
    sums = found * size
    assert torch.allclose(sums, sums.round())  # a sum of `size` whole numbers
    if powers is not None:
        assert {int(value).bit_count() for value in sums.round().tolist()} == {size}  # all different
    if size < members:
        assert len(set(found.tolist())) > 1


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    num_clusters=st.integers(1, 4),
    repeats=st.integers(1, 3),
    ratio=st.sampled_from([0.2, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_number_and_place_of_prototypes(
    sizes: list[int], num_clusters: int, repeats: int, ratio: float, seed: int
) -> None:
    """Fact 11: sum over classes of min(K_c, n)·n_repeat, each inside the hull of its class (here: in 1-D)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    # Distinct points: a class's own numbers, shuffled.
    features = torch.rand(len(labels), 1, generator=generator) + 10 * labels.unsqueeze(1)
    order = torch.randperm(len(labels), generator=generator)
    features, labels = features[order], labels[order]
    found, classes = cluster_prototypes(
        features, labels, stream, num_clusters=num_clusters, ratio=ratio, repeats=repeats
    )
    expected = [c for c, size in enumerate(sizes) for _ in range(min(num_clusters, size) * repeats)]
    assert classes.tolist() == expected
    for row, label in zip(found, classes.tolist(), strict=True):
        own = features[labels == label]
        assert own.min() - 1e-5 <= row.item() <= own.max() + 1e-5


def test_one_cluster_without_sampling_is_the_class_mean() -> None:
    """Fact 11, TPG: K_c = 1, r = 1, n_repeat = 1. Class 0: (1, 2) and (3, 4): (2, 3); class 5: (7, 7)."""
    features = torch.tensor([[1.0, 2.0], [7.0, 7.0], [3.0, 4.0]])
    found, classes = cluster_prototypes(features, torch.tensor([0, 5, 0]), stream, num_clusters=1, ratio=1.0, repeats=1)
    assert found.tolist() == [[2.0, 3.0], [7.0, 7.0]]
    assert classes.tolist() == [0, 5]


def test_a_class_of_few_samples_sends_its_mean_alone() -> None:
    """Fewer than three: class 0 has (1) and (3), so 2; class 1 has three samples and sends two prototypes."""
    features, labels = torch.tensor([[1.0], [3.0], [5.0], [6.0], [7.0]]), torch.tensor([0, 0, 1, 1, 1])
    found, classes = cluster_prototypes(features, labels, stream, num_clusters=1, ratio=1.0, repeats=2, few=3)
    assert found.flatten().tolist() == [2.0, 6.0, 6.0]
    assert classes.tolist() == [0, 1, 1]


def test_a_class_does_not_depend_on_the_others() -> None:
    features = torch.rand(30, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30) % 3
    options = {"num_clusters": 3, "ratio": 0.5, "repeats": 2}
    everything, classes = cluster_prototypes(features, labels, stream, **options)  # type: ignore[arg-type]
    alone, _ = cluster_prototypes(features[labels == 1], labels[labels == 1], stream, **options)  # type: ignore[arg-type]
    assert torch.equal(everything[classes == 1], alone)


def test_small_clusters_are_merged() -> None:
    """Blobs of 6, 1 and 5 points, K_c = 3: three clusters, or two of them with min_size = 2."""
    features, labels = blobs(0, (6, 1, 5)), torch.zeros(12, dtype=torch.int64)
    for min_size, clusters in ((1, 3), (2, 2)):
        found, _ = cluster_prototypes(features, labels, stream, num_clusters=3, ratio=1.0, repeats=1, min_size=min_size)
        assert len(found) == clusters


def test_first_partition() -> None:
    """fedmlp.md, fact 5: neighbours 1, 0, 3, 4, 3, 6, 5; centres (0.95, 0.05), (0.1, 0.933333), (-1, -0.95)."""
    assert first_neighbours(SEVEN).tolist() == [1, 0, 3, 4, 3, 6, 5]
    found = finch(SEVEN)
    assert found.labels.tolist() == [0, 0, 1, 1, 1, 2, 2]
    expected = torch.tensor([[0.95, 0.05], [0.1, 0.933333], [-1.0, -0.95]])
    assert torch.allclose(found.centres, expected, atol=1e-6)


@given(st.permutations(range(7)))
@settings(max_examples=30, deadline=None)
def test_permuting_the_points_permutes_the_labels(order: list[int]) -> None:
    found = finch(SEVEN[torch.tensor(order)])
    original = {frozenset(order[i] for i in group) for group in partition_of(found)}
    assert original == {frozenset({0, 1}), frozenset({2, 3, 4}), frozenset({5, 6})}


@given(count=st.integers(2, 12), seed=st.integers(0, 99), centred=st.booleans())
@settings(max_examples=40, deadline=None)
def test_properties_of_the_first_partition(count: int, seed: int, centred: bool) -> None:
    """At least two members each, nearest neighbours together, centres the means, the scale of all points irrelevant."""
    points = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = finch(points, centred=centred)
    assert int(found.sizes.min()) >= 2
    neighbours = first_neighbours(points, centred=centred)
    assert torch.equal(found.labels[neighbours], found.labels)
    for k in range(len(found.centres)):
        assert torch.allclose(found.centres[k], points[found.labels == k].mean(0))
    assert torch.equal(finch(4 * points, centred=centred).labels, found.labels)


def test_centring_undoes_a_common_shift() -> None:
    """Seen from far away all directions are alike; relative to their mean they are not, wherever that is."""
    pairs = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, -0.1]], dtype=torch.float64)
    two = {frozenset({0, 1}), frozenset({2, 3})}
    shifted = pairs + torch.tensor([50.0, 0.0])
    assert partition_of(finch(pairs, centred=True)) == two
    assert partition_of(finch(shifted, centred=True)) == two
    # Uncentred, (51, 0.1) has cosine nearer to (49, 0.1) than to (51, -0.1).
    assert partition_of(finch(shifted)) == {frozenset({0, 2}), frozenset({1, 3})}


def test_one_point_and_dead_points() -> None:
    assert finch(torch.tensor([[3.0, 4.0]])).centres.tolist() == [[3.0, 4.0]]
    # Zero vectors have cosine 0 with everybody: the first other point is their neighbour.
    assert first_neighbours(torch.zeros(3, 2)).tolist() == [1, 0, 0]
    assert len(finch(torch.zeros(3, 2)).centres) == 1
    # Two points centred are opposite, and still each other's nearest.
    assert finch(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), centred=True).labels.tolist() == [0, 0]


def test_average_linkage() -> None:
    """On a line 0, 1, 5, 7: merges {0, 1} at 1, {5, 7} at 2; two clusters with centres 0.5 and 6."""
    points = torch.tensor([[5.0], [0.0], [7.0], [1.0]])
    found = average_linkage(points, 2)
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert found.centres.flatten().tolist() == [6.0, 0.5]
    assert average_linkage(points[:1], 3).labels.tolist() == [0]
    assert len(average_linkage(points, 9).centres) == 4


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("finch", [0, 0, 1, 1, 1, 2, 2]),  # fact 5, however many are asked for
        ("kmeans", [0, 0, 0, 0, 0, 1, 1]),
        ("agglomerative", [0, 0, 0, 0, 0, 1, 1]),
        ("none", [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_clusterings_by_name(name: Clustering, labels: list[int]) -> None:
    assert partition_by(name, 2, stream(0))(SEVEN).labels.tolist() == labels


def test_semantic_prototypes() -> None:
    """Fact 5 with two missing classes in between: they get no cluster and do not disturb the others."""
    means = torch.full((9, 2), 77.0)
    present = torch.tensor([True, True, False, True, True, True, True, False, True])
    means[present] = SEVEN
    found = cluster_classes(means, present, finch)
    assert found.count == 3
    assert found.present.tolist() == [True] * 3 + [False] * 6
    assert found.assignment[present].tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert torch.allclose(found.centres[1], torch.tensor([0.1, 0.933333]), atol=1e-6)
    assert torch.equal(found.centres[3:], torch.zeros(6, 2))


def test_no_class_no_cluster() -> None:
    found = cluster_classes(torch.ones(4, 2), torch.zeros(4, dtype=torch.bool), finch)
    assert found.count == 0
    assert not found.present.any()
    assert torch.equal(found.centres, torch.zeros(4, 2))


# Partners of prototypes: of the same client and class, and of another class (fedcspc.md, section 5, 3).


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20), st.integers(0, 10**6))
def test_partners(cells: list[tuple[int, int]], seed: int) -> None:
    """Section 5, 3: of the same client where there is one, the same label and not itself, and another label."""
    labels, sources = [label for label, _ in cells], [source for _, source in cells]
    drawn = Partners(torch.tensor(labels), torch.tensor(sources)).draw(4, torch.Generator().manual_seed(seed))
    for item, (label, source) in enumerate(cells):
        alike = [j for j, cell in enumerate(cells) if cell == (label, source) and j != item] or [item]
        unlike = [k for k, cell in enumerate(cells) if cell[0] != label and cell[1] == source]
        anywhere = [k for k, cell in enumerate(cells) if cell[0] != label]
        assert set(drawn.same[item].tolist()) <= set(alike)
        assert bool(drawn.usable[item]) == bool(anywhere)
        if anywhere:
            assert set(drawn.other[item].tolist()) <= set(unlike or anywhere)


def test_every_partner_is_drawn_equally_often() -> None:
    """Item 0 of client 5 (labels 1, 1, 1, 2, 3, 3): partners 1 and 2 of its label, 3, 4, 5 of others.

    2,000 draws: shares 1/2 and 1/3 with standard deviations of 0.011.
    """
    labels, sources = torch.tensor([1, 1, 1, 2, 3, 3, 2]), torch.tensor([5, 5, 5, 5, 5, 5, 6])
    drawn = Partners(labels, sources).draw(2000, torch.Generator().manual_seed(0))
    same_shares = torch.bincount(drawn.same[0], minlength=7) / 2000
    other_shares = torch.bincount(drawn.other[0], minlength=7) / 2000
    assert torch.allclose(same_shares, torch.tensor([0, 1 / 2, 1 / 2, 0, 0, 0, 0]), atol=0.05)
    assert torch.allclose(other_shares, torch.tensor([0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0]), atol=0.05)


def test_the_partners_of_some() -> None:
    drawn = Partners(torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])).draw(2, torch.Generator().manual_seed(0))
    rows = torch.tensor([2, 0])
    assert torch.equal(drawn.rows(rows).same, drawn.same[rows])
    assert drawn.rows(rows).other.tolist()[1] == [2, 2]
    assert drawn.rows(rows).usable.tolist() == [[True], [True]]
