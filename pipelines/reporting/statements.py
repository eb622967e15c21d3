"""A comparison in sentences: which methods differ from the baseline, by how much, and for which none was shown."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.reporting.comparison import Comparison, MethodSummary
from pipelines.reporting.formats import format_difference, plural
from pipelines.reporting.statistics import CONFIDENCE, Verdict, verdict
from pipelines.runs.metrics import heading


def statements(comparison: Comparison) -> tuple[str, ...]:
    """Return a sentence per accuracy that methods share with the baseline over two seeds or divisions.

    Without those there is no interval, and nothing to be said.
    """
    return tuple(sentence for key in comparison.methods[0].differences for sentence in _of(comparison, key))


def after_correction(comparison: Comparison) -> tuple[str, ...]:
    """Say which differences are significant among all of the table; nothing where no interval excludes 0."""
    tested = [
        (row.method, key, difference)
        for row in comparison.methods
        for key, difference in row.differences.items()
        if difference.p_holm is not None
    ]
    alone = sum(verdict(difference) != "open" for *_, difference in tested)
    if len(tested) < 2 or not alone:
        return ()
    firm = [f"{method} ({heading(key)})" for method, key, one in tested if (one.p_holm or 0) < 1 - CONFIDENCE]
    return (
        f"One by one, {alone} of {plural(len(tested), 'interval')} exclude 0. Adjusted for all of them (Holm, 5 %), "
        f"{'none is' if not firm else 'this is' if len(firm) == 1 else 'these are'} significant"
        f"{': ' + ', '.join(firm) if firm else ''}.",
    )


def _of(comparison: Comparison, key: str) -> Iterator[str]:
    rows = [row for row in comparison.methods if row.differences[key].low is not None]
    if not rows:
        return
    groups: dict[Verdict, list[MethodSummary]] = {"above": [], "below": [], "open": []}
    for row in rows:
        groups[verdict(row.differences[key])].append(row)
    parts = []
    for side in ("above", "below"):
        texts = [f"{row.method} {format_difference(row.differences[key])}" for row in groups[side]]
        if texts:
            parts.append(f"{side} {comparison.baseline}: {', '.join(texts)}")
    if groups["open"]:
        texts = [row.method for row in groups["open"]]
        parts.append(f"no difference to {comparison.baseline} shown: {', '.join(texts)}")
    most = max(row.differences[key].n for row in rows)
    name = heading(key)[0].upper() + heading(key)[1:]
    seeds, divisions = plural(most, "seed"), len(comparison.draws)
    over = f"{divisions} divisions" if divisions > 1 else f"{seeds} of one division" if divisions else seeds
    yield f"{name}, percentage points with 95 % interval, {over}. {_joined(parts)}."


def _joined(parts: list[str]) -> str:
    text = "; ".join(parts)
    return text[0].upper() + text[1:]
