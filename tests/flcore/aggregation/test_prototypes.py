"""Class prototypes of four clients into one per class, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flcore.aggregation.prototypes import fold_prototypes
from flcore.aggregation.settings import Aggregation
from flcore.io.messages import Prototypes
from flcore.math.prototypes.class_means import fuse_prototypes

T = torch.tensor


def rows(*vectors: tuple[float, float] | None) -> Prototypes:
    means = T([[0.0, 0.0] if vector is None else list(vector) for vector in vectors])
    return Prototypes(means, T([vector is not None for vector in vectors]))


PREVIOUS = rows((9, 9), (9, 9), (9, 9), None)
# Class 0 of four clients, class 1 of two, class 2 of nobody, class 3 of one.
UPLOADS = {
    5: rows((-60, 80), None, None, None),
    0: rows((3, 4), (1, 0), None, (2, 2)),
    1: rows((0, 1), (3, 0), None, None),
    2: rows((0, 5), None, None, None),
}
COUNTS = {client: T([count, count, 0, count]) for client, count in {0: 1, 1: 1, 2: 1, 5: 97}.items()}


def fold(counts: Any = None, **how: Any) -> tuple[list[list[float]], dict[str, float]]:
    fused, facts = fold_prototypes(UPLOADS, PREVIOUS, counts, Aggregation(**how))
    assert fused.present.tolist() == [True, True, True, True]
    return fused.means.tolist(), facts


def test_at_its_defaults_it_is_the_methods_own_mean_to_the_bit() -> None:
    for counts in (None, COUNTS):
        means, facts = fold(counts)
        assert (means, facts) == (fuse_prototypes(UPLOADS, PREVIOUS, counts).means.tolist(), {})


@pytest.mark.parametrize("counts", [None, COUNTS])
def test_robust_rules_per_class(counts: Any) -> None:
    """Class 0: of -60 0 0 3 and 1 4 5 80 the middle two: (0, 4.5), whatever client 5 says that it counts; the same
    where one is left out at either end. Class 1: the mean of two. Class 2 keeps 9. Two classes have no majority.
    """
    for how in ({"rule": "median"}, {"rule": "trimmed_mean"}):
        means, facts = fold(counts, **how)
        assert means == [[0, 4.5], [2, 0], [9, 9], [2, 2]]
        assert facts == {"unguarded_classes": 2}


def test_clipped_to_a_number() -> None:
    """To 5: only (-60, 80), of norm 100, shrinks, to (-3, 4): the mean is (0, 14/4)."""
    means, facts = fold(prototype_clip=5.0)
    assert means[0] == pytest.approx([0, 3.5], abs=1e-6)
    assert means[1:] == [[2, 0], [9, 9], [2, 2]]
    assert facts == {"clipped_prototypes": 1}


def test_clipped_to_the_median_norm_of_the_class() -> None:
    """Class 0 has the norms 5 1 5 100: 5. Class 1 has 1 and 3, bound 2: (1, 0) and (2, 0). Class 3 has its own."""
    means, facts = fold(prototype_clip="median")
    assert [value for row in means for value in row] == pytest.approx([0, 3.5, 1.5, 0, 9, 9, 2, 2], abs=1e-6)
    assert facts == {"clipped_prototypes": 2}


def test_clipped_to_a_median_norm_of_nothing() -> None:
    """Norms 0, 0 and 500: the median is 0, and nothing of the third is left. Two of 0 and 500 have a median of 250."""
    uploads = {0: rows((0.0, 0.0), (0.0, 0.0)), 1: rows((0.0, 0.0), (300.0, 400.0)), 2: rows((300.0, 400.0), None)}
    fused, facts = fold_prototypes(uploads, rows((9.0, 9.0), (9.0, 9.0)), None, Aggregation(prototype_clip="median"))
    assert fused.means.flatten().tolist() == pytest.approx([0, 0, 75, 100])
    assert facts == {"clipped_prototypes": 2}


def test_the_mean_of_clipped_ones_weighs_as_the_method_does() -> None:
    """(3 + 0 + 0 - 97·3)/100 and (4 + 1 + 5 + 97·4)/100."""
    assert fold(COUNTS, prototype_clip=5.0)[0][0] == pytest.approx([-2.88, 3.98])


def test_clipped_first_then_the_rule() -> None:
    """To 1: (0.6, 0.8), (0, 1), (0, 1), (-0.6, 0.8): the medians are 0 and 0.9."""
    assert fold(rule="median", prototype_clip=1.0)[0][0] == pytest.approx([0, 0.9])
