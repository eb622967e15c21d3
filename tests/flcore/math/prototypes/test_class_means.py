"""Class means of features, on the CPU and as a GPU would take them (baselines.md section 15)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flcore.core.rng import torch_stream
from flcore.io.messages import Prototypes
from flcore.math.prototypes.class_means import (
    average_prototypes,
    class_distances,
    class_means,
    class_sums,
    frame_of_basis,
    fuse,
    nearest_real,
    simplex_etf,
    support_means,
    to_unit_range,
    weighted_class_means,
)


def test_class_means() -> None:
    """Class 0: ((1,2) + (3,4))/2 = (2,3); class 2: (5,6); class 1 has no sample."""
    features = torch.tensor([[1.0, 2.0], [5.0, 6.0], [3.0, 4.0]])
    found = class_means(features, torch.tensor([0, 2, 0]), 4)
    assert found.means.tolist() == [[2, 3], [0, 0], [5, 6], [0, 0]]
    assert found.present.tolist() == [True, False, True, False]


class Listening(TorchDispatchMode):
    """Notes the operations carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_on_a_gpu_nothing_is_added_without_order() -> None:
    """`index_add_` and `bincount` use atomic additions there; fake tensors run what would run."""
    with FakeTensorMode(), Listening() as heard:
        found = class_means(torch.zeros(5, 2, device="cuda"), torch.zeros(5, dtype=torch.int64, device="cuda"), 3)
    assert (found.means.shape, found.means.dtype, found.means.device.type) == ((3, 2), torch.float32, "cuda")
    assert (found.present.shape, found.present.dtype) == ((3,), torch.bool)
    assert "mm" in heard.names
    assert heard.names.isdisjoint({"index_add", "index_add_", "scatter_add", "scatter_add_", "bincount"})


def test_sums_by_class_of_a_stack() -> None:
    """Two clients of three samples, the last of the second is padding: sums (1 + 3, 2) and (10, 20), counts alike."""
    features = torch.tensor([[[1.0], [2.0], [3.0]], [[10.0], [20.0], [40.0]]])
    labels, weight = torch.tensor([[0, 2, 0], [0, 2, 2]]), torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    sums, counts = class_sums(features, labels, 3, weight)
    assert sums[..., 0].tolist() == [[4, 0, 2], [10, 0, 20]]
    assert counts.tolist() == [[2, 0, 1], [1, 0, 1]]
    assert sums.dtype == counts.dtype == torch.float64
    unweighted, all_counts = class_sums(features, labels, 3)
    assert unweighted[1, :, 0].tolist() == [10, 0, 60] and all_counts[1].tolist() == [1, 0, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50)), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_means_of_any_samples(samples: list[tuple[int, int]]) -> None:
    labels = torch.tensor([label for label, _ in samples])
    features = torch.tensor([[float(value)] for _, value in samples])
    found = class_means(features, labels, 4)
    for c in range(4):
        own = [value for label, value in samples if label == c]
        assert bool(found.present[c]) == bool(own)
        expected = sum(own) / len(own) if own else 0.0
        assert abs(found.means[c].item() - expected) < 1e-5


# Prototypes of many clients into one per class, weighted or not (baselines.md section 15).

T = torch.tensor


def test_prototypes_over_those_who_have_the_class() -> None:
    """fedpg.md fact 1; what stands in rows of weight 0 is ignored, even NaN."""
    missing = [float("nan")] * 3
    means = T([[[1.0, 0, 2], missing, missing], [[3.0, 2, 0], [5.0, 6, 7], missing]])
    found, present = weighted_class_means(means, T([[1, 0, 0], [1, 1, 0]]))
    assert found.tolist() == [[2, 1, 1], [5, 6, 7], [0, 0, 0]]
    assert present.tolist() == [True, True, False]


def prototypes(*rows: float | None) -> Prototypes:
    """One dimension; None for a class without prototype."""
    means = torch.tensor([[0.0 if row is None else row] for row in rows])
    return Prototypes(means, torch.tensor([row is not None for row in rows]))


def test_what_stands_in_absent_rows_is_ignored() -> None:
    dirty = Prototypes(torch.tensor([[8.0], [2.0]]), torch.tensor([False, True]))
    assert average_prototypes({0: dirty}, prototypes(None, None)).means.flatten().tolist() == [0.0, 2.0]


def test_order_of_arrival_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    uploads = {
        k: Prototypes(torch.randn(3, 5, generator=generator), torch.rand(3, generator=generator) < 0.7)
        for k in range(4)
    }
    previous = Prototypes.empty(3, 5)
    expected = average_prototypes(uploads, previous).means
    for order in itertools.permutations(uploads):
        found = average_prototypes({client: uploads[client] for client in order}, previous)
        assert torch.equal(found.means, expected)


# Class means of a few samples (fedpg.md section 4, step 5).


def test_supports() -> None:
    """Classes of 3, 4 and 9 samples, m = 4: all of the first two; of the third 4 draws with replacement.

    Features are one-hot, so that a mean shows who was drawn: multiples of 1/4 that sum to 1.
    """
    labels = torch.tensor([0] * 3 + [1] * 4 + [2] * 9)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    found = support_means(torch.eye(16)[order], labels[order], 4, 4, torch.Generator().manual_seed(1))
    assert found.present.tolist() == [True, True, True, False]
    assert found.means[0].tolist() == pytest.approx([1 / 3] * 3 + [0] * 13)
    assert found.means[1].tolist() == [0] * 3 + [1 / 4] * 4 + [0] * 9
    drawn = found.means[2] * 4
    assert drawn[7:].sum().item() == 4
    assert torch.equal(drawn, drawn.round())
    assert 1 < int((drawn > 0).sum()) <= 4


def test_supports_are_drawn_with_replacement() -> None:
    """Among 40 draws of 4 out of 9 one without any repetition every time has a chance of 10^-12."""
    draws = [
        support_means(torch.eye(9), torch.zeros(9, dtype=torch.int64), 1, 4, torch.Generator().manual_seed(seed)).means
        for seed in range(40)
    ]
    assert max(float(draw.max()) for draw in draws) > 1 / 4


# Distances of classes by hand (evaluation.md section 5.1).


def test_two_classes_of_two_points() -> None:
    """Class 0 at (0,0), (0,2); class 1 at (3,0), (3,2): within 2; between 3, √13, √13, 3; means 3 apart."""
    points = torch.tensor([[0.0, 0], [0, 2], [3, 0], [3, 2]])
    found = class_distances(points, torch.tensor([0, 0, 1, 1]))
    assert found == pytest.approx({"intra": 2.0, "inter": (6 + 2 * math.sqrt(13)) / 4, "centroid_inter": 3.0})
    assert found["inter"] == pytest.approx(3.302776, abs=5e-7)


def test_classes_count_alike_whatever_their_size() -> None:
    """On a line. Class 5: 0, 1, 3: pairs 1, 3, 2, mean 2. Class 7: 10, 14: 4. Class 9: 20 alone: no pair.

    Within: (2 + 4)/2 = 3; over all four pairs it would be 2.5. Between 5 and 7: 10 + 14 + 9 + 13 + 7 + 11 = 64, /6;
    5 and 9: (20 + 19 + 17)/3 = 56/3; 7 and 9: (10 + 6)/2 = 8. Means 4/3, 12, 20: 32/3, 56/3, 8.
    """
    points = torch.tensor([[10.0], [0], [20], [1], [14], [3]])
    found = class_distances(points, torch.tensor([7, 5, 9, 5, 7, 5]))
    assert found["intra"] == pytest.approx(3.0)
    assert found["inter"] == pytest.approx((64 / 6 + 56 / 3 + 8) / 3)
    assert found["centroid_inter"] == pytest.approx((32 / 3 + 56 / 3 + 8) / 3)


def test_what_does_not_exist_is_left_out() -> None:
    points = torch.tensor([[0.0, 0], [3, 4]])
    assert class_distances(points, torch.tensor([2, 2])) == pytest.approx({"intra": 5.0})
    assert class_distances(points, torch.tensor([0, 1])) == pytest.approx({"inter": 5.0, "centroid_inter": 5.0})


def test_points_that_coincide_are_no_distance_apart() -> None:
    """Far from the origin, where distances by matrix products are not 0."""
    points = torch.full((6, 8), 1000.1)
    found = class_distances(points, torch.tensor([0, 0, 0, 1, 1, 1]))
    assert found == {"intra": 0.0, "inter": 0.0, "centroid_inter": 0.0}


def test_distances_scale_and_do_not_depend_on_order() -> None:
    points, labels = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 4
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    found = class_distances(points, labels)
    assert class_distances(points[order], labels[order]) == pytest.approx(found, rel=1e-12)
    assert class_distances(3 * points + 7, labels) == pytest.approx({k: 3 * v for k, v in found.items()}, rel=1e-5)


def test_nearest_real_feature_of_the_own_class() -> None:
    """(1,0) of class 0: nearest of class 0 is (1,1), distance 1, cosine 1/√2; (1,0) of class 1 is no candidate.

    (0,2) of class 1: (0,4) at distance 2, cosine 1. Class 2 has no real feature. Means: 1.5 and (1/√2 + 1)/2.
    """
    generated, labels = torch.tensor([[1.0, 0], [0, 2], [9, 9]]), torch.tensor([0, 1, 2])
    real, real_labels = torch.tensor([[1.0, 0], [1, 1], [-5, 0], [0, 4]]), torch.tensor([1, 0, 0, 1])
    found = nearest_real(generated, labels, real, real_labels)
    assert found == pytest.approx({"nearest_distance": 1.5, "nearest_cosine": (1 / math.sqrt(2) + 1) / 2})
    assert nearest_real(generated[2:], labels[2:], real, real_labels) == {}


# The simplex equiangular tight frame (gfpl.md, section 8, fact 1).


def test_three_classes_on_unit_vectors() -> None:
    """Q = the first three unit vectors of R⁴: sqrt(3/2)·(1 - 1/3) = 0.816497, sqrt(3/2)·(-1/3) = -0.408248."""
    assert (math.sqrt(1.5) * 2 / 3, -math.sqrt(1.5) / 3) == pytest.approx((0.816497, -0.408248), abs=1e-6)
    a, b = 0.816497, -0.408248
    expected = torch.tensor([[a, b, b], [b, a, b], [b, b, a], [0, 0, 0]])
    assert torch.allclose(frame_of_basis(torch.eye(4)[:, :3]), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "dim", "cosine"),
    [(2, 2, -1.0), (3, 4, -0.5), (4, 4, -0.333333), (10, 50, -0.111111), (62, 80, -0.016393), (100, 128, -0.010101)],
)
def test_gram_matrix(classes: int, dim: int, cosine: float) -> None:
    """Diagonal 1, off it -1/(K-1); columns sum to 0; rank K - 1."""
    frame = simplex_etf(dim, classes, torch_stream(0, "frame"))
    assert frame.dtype == torch.float32
    assert frame.shape == (dim, classes)
    expected = torch.full((classes, classes), cosine).fill_diagonal_(1.0)
    assert torch.allclose(frame.T @ frame, expected, atol=2e-6)
    assert torch.allclose(frame.sum(1), torch.zeros(dim), atol=1e-5)
    assert torch.linalg.matrix_rank(frame, atol=1e-4).item() == classes - 1


def test_the_frame_is_a_function_of_the_seed() -> None:
    frames = [simplex_etf(8, 4, torch_stream(seed, "frame")) for seed in (0, 0, 1)]
    assert torch.equal(frames[0], frames[1])
    assert not torch.allclose(frames[0], frames[2], atol=0.01)


def test_the_basis_spans_the_random_directions_in_order() -> None:
    """Q'A is upper triangular with a positive diagonal: the QR that does not depend on the library's signs.

    The frame spans Q without its mean direction; its first column has a positive product with the first direction,
    z_0·a_0 = sqrt(K/(K-1)) (1 - 1/K) |a_0| > 0.
    """
    for seed in range(20):
        first = torch.randn(6, 3, generator=torch_stream(seed, "frame"), dtype=torch.float64)[:, 0]
        frame = simplex_etf(6, 3, torch_stream(seed, "frame")).double()
        expected = math.sqrt(1.5) * (2 / 3) * first.norm()
        assert float(frame[:, 0] @ first) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("dim", "classes"), [(80, 100), (5, 1), (3, 0)])
def test_impossible_frames(dim: int, classes: int) -> None:
    """gfpl.md, section 2: 80 dimensions hold no 100 orthonormal columns."""
    with pytest.raises(ValueError, match=f"{classes} classes in {dim}"):
        simplex_etf(dim, classes, torch_stream(0, "frame"))


# Exemplars, and answers of head and exemplars together (fedcspc.md, sections 5.5, 6 and 8, fact 9).


def close(values: Tensor, *expected: float) -> bool:
    return bool(torch.allclose(values.flatten(), torch.tensor(expected, dtype=torch.float32), atol=2e-6))


LOGITS, COSINES = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.2, 0.9, 0.1]])


@pytest.mark.parametrize(
    ("share", "expected", "winner"),
    [
        (0.0, (0.665241, 0.244728, 0.090031), 0),
        (0.1, (0.615741, 0.289293, 0.094966), 0),
        (0.3, (0.516742, 0.378422, 0.104837), 0),
        (0.5, (0.417742, 0.467550, 0.114707), 1),
        (1.0, (0.170244, 0.690372, 0.139384), 1),
    ],
)
def test_fusion_of_probabilities(share: float, expected: tuple[float, ...], winner: int) -> None:
    """Section 8, 9."""
    fused = fuse(LOGITS, COSINES, share, 0.5, "softmax")
    assert close(fused, *expected)
    assert fused.argmax().item() == winner


def test_other_fusions() -> None:
    """Authors: section 8, 9, whose network has weight 0.1. Min-max: (1, 1/2, 0) and (1/8, 1, 0), half of each."""
    assert close(fuse(LOGITS, COSINES, 0.9, 0.5, "authors"), 1.542642, 5.544683, 1.099262)
    assert close(fuse(LOGITS, COSINES, 0.5, 0.5, "minmax"), 0.5625, 0.75, 0)


def test_a_class_without_exemplar() -> None:
    """Its knowledge probability is 0: softmax over the others, 1/(1 + e^1.6) = 0.167982 for cosines 0.9 and 0.1."""
    missing = torch.tensor([[-torch.inf, 0.9, 0.1]])
    assert close(fuse(LOGITS, missing, 1.0, 0.5, "softmax"), 0, 1 - 0.167982, 0.167982)
    assert close(fuse(LOGITS, missing, 0.9, 0.5, "authors"), 0.2, 0.1 + 0.9 * math.exp(1.8), 0.9 * math.exp(0.2))
    assert close(fuse(LOGITS, missing, 0.5, 0.5, "minmax"), 0.5, 0.75, 0)
    assert close(to_unit_range(torch.tensor([[-torch.inf, 3.0, -torch.inf]])), 0, 0, 0)
