"""Figures that follow from the records of a run (evaluation.md, sections 2 and 3)."""

from __future__ import annotations

import pytest

from pipelines.runs.derived import DERIVED, derived, rounds_to_convergence


def test_rounds_to_convergence() -> None:
    """With averages of two and three of patience: 0.1, 0.3, 0.5, 0.5, ... average 0.2, 0.4, 0.5, 0.5, ...

    Those of rounds 2 and 3 are still beaten; that of round 4 is the first that the next three do not beat.
    """

    def found(*accuracies: float | None, improvement: float = 0.001) -> int | None:
        return rounds_to_convergence(list(enumerate(accuracies, start=1)), 2, 3, improvement)

    assert found(0.1, 0.3, 0.5, 0.5, 0.5, 0.5, 0.5) == 4
    assert found(0.1, 0.3, 0.5, 0.5, 0.5, 0.5) is None  # the third of those that are waited for is not there
    assert found(0.1, None, 0.3, 0.5, 0.5, 0.5, 0.5, 0.5) == 5  # a round without a score counts for nothing
    # Averages rise by 0.1 a round up to round 6 (0.4 to 0.8), and then stay.
    assert found(0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8) == 6
    # From 0.5 to 0.6 within three rounds is an improvement of exactly 0.1.
    assert found(0.5, 0.5, 0.5, 0.5, 0.7, 0.5, 0.5, 0.5, 0.5, improvement=0.1) == 5
    assert found(0.5, 0.5, 0.5, 0.5, 0.7, 0.5, 0.5, 0.5, 0.5, improvement=0.11) == 2
    assert rounds_to_convergence([(number, 0.5) for number in range(1, 30)]) is None
    assert rounds_to_convergence([(number, 0.5) for number in range(1, 31)]) == 10
    assert rounds_to_convergence([]) is None


def test_every_class_that_was_tested_counts_alike() -> None:
    """(0.9 + 0.5 + 0.1) / 3, however many images each has."""
    found = derived([0.9, None, 0.5, 0.1], [(2, 0.5), (1, 0.4)])
    assert found == {"macro_acc": pytest.approx(0.5), "rounds_to_convergence": None}
    assert tuple(found) == DERIVED
    assert derived(None, [])["macro_acc"] is None
