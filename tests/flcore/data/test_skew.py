"""Skew measures against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from flcore.data.summary import skew


def test_equal_and_disjoint_clients_are_the_two_ends() -> None:
    """Equal distributions have distance 0; disjoint ones divergence of 1 bit, distance 1."""
    equal = skew(np.array([[5, 5], [50, 50]]))
    assert equal.js_distance == pytest.approx(0, abs=1e-7) and equal.missing_class_share == 0
    disjoint = skew(np.array([[5, 0, 0], [0, 7, 0], [0, 0, 1]]))
    assert disjoint.js_distance == pytest.approx(1) and disjoint.missing_class_share == pytest.approx(2 / 3)


def test_by_hand() -> None:
    """(1, 0) and (1/2, 1/2): the mixture (3/4, 1/4) has entropy 2 - 0.75 log2(3) = 0.811278 bits.

    Divergence 0.811278 - (0 + 1)/2 = 0.311278, distance 0.557923. One of four entries is zero.
    """
    measured = skew(np.array([[4, 0], [3, 3]]))
    assert measured.js_distance == pytest.approx(0.557923, abs=1e-6)
    assert measured.missing_class_share == 0.25


def test_empty_clients_are_left_out_and_one_client_has_no_distance() -> None:
    assert skew(np.array([[4, 0], [0, 0]])).js_distance == 0
    with pytest.raises(ValueError, match="no client"):
        skew(np.zeros((2, 3), dtype=np.int64))
