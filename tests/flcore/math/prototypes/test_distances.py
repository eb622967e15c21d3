"""Distances of classes by hand (evaluation.md section 5.1)."""

from __future__ import annotations

import math

import pytest
import torch

from flcore.math.prototypes.class_means import class_distances, nearest_real


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
