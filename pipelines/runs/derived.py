"""Metrics that follow from a run's records and are in no file: a new one needs no new run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

DERIVED = ("macro_acc", "rounds_to_convergence")
"""Names of these metrics."""


def rounds_to_convergence(
    accuracies: Sequence[tuple[int, float | None]], window: int = 10, patience: int = 20, improvement: float = 0.001
) -> int | None:
    """Return the first round after which the moving average does not improve; None if it improved until the end.

    GFPL reports rounds until convergence without a definition; this is the rule of evaluation.md, section 3: the
    average of the last ten ``mean_local`` gains less than 0.1 point within the next twenty.

    Args:
        accuracies: round and accuracy of every evaluated round, oldest first; None if no client could be scored.
        window: evaluated rounds to average. patience: evaluated rounds to wait. improvement: least gain that counts.
    """
    known = [(number, value) for number, value in accuracies if value is not None]
    values = [value for _, value in known]
    averages = [sum(values[end - window : end]) / window for end in range(window, len(values) + 1)]
    for place in range(len(averages) - patience):
        # The tolerance makes 0.1 point an improvement: sums of fractions are off by rounding.
        if max(averages[place + 1 : place + 1 + patience]) - averages[place] < improvement - 1e-12:
            return known[place + window - 1][0]
    return None


def derived(
    class_acc: Sequence[float | None] | None, mean_local: Sequence[tuple[int, float | None]]
) -> dict[str, float | None]:
    """Return derived metrics by name.

    ``macro_acc`` is the mean over the classes that were tested (evaluation.md, section 2).

    Args:
        class_acc: of the global model by class, None for a class that the test set lacks; None without such a model.
        mean_local: round and ``mean_local`` of every evaluated round.
    """
    known = [value for value in class_acc or () if value is not None]
    return {
        "macro_acc": fmean(known) if known else None,
        "rounds_to_convergence": rounds_to_convergence(sorted(mean_local, key=lambda one: one[0])),
    }
