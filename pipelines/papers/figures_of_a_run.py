"""What a table may print of a run beside its ``metrics.json``: seconds, joules, and the distances of an analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flcore.errors import ConfigError, RunError
from flcore.run_folder import RunFiles
from pipelines.runs.analyses import load
from pipelines.runs.folder import read_lines
from pipelines.runs.layout import read_json
from pipelines.tuning.metrics import value_of

WARM_UP = 2
"""Rounds that a duration leaves out, where there are more (evaluation.md section 4)."""


def figure(run: Path, metric: str) -> float | None:
    """A figure of a finished run, in the run's own unit; None where its method has none, or nothing measured it.

    Args:
        run: its folder. metric: dotted name; see :func:`figures`.

    Raises:
        DataError: a file of the run is damaged.
    """
    try:
        return value_of(metric, figures(run, metric), read_lines(RunFiles(run).history))
    except (ConfigError, RunError):
        return None


def figures(run: Path, metric: str) -> dict[str, Any]:
    """What a metric may name: ``metrics.json``, and ``timing`` or ``analyses`` if it begins so.

    ``timing`` is ``timing.json`` with ``seconds_per_round``: the mean over rounds of all phases but the evaluation,
    without the first two. ``analyses`` has every table of an analysis: numbers by the words of their line, such as
    ``analyses.generator_distances.generated.tsne.intra``.
    """
    files = RunFiles(run)
    found = dict(read_json(files.metrics))
    root = metric.partition(".")[0]
    if root == "timing" and files.timing.exists():
        timing = read_json(files.timing)
        found["timing"] = {**timing, "seconds_per_round": _seconds_per_round(timing["rounds"])}
    if root == "analyses" and files.analyses.exists():
        found["analyses"] = {one.name: _by_words(one.rows) for one in load(run)}
    return found


def _seconds_per_round(rounds: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean seconds of training, messages and server stages; None of a run without rounds."""
    lengths = [sum(value for phase, value in one["seconds"].items() if phase != "evaluate") for one in rounds]
    counted = lengths[WARM_UP:] or lengths
    return fmean(counted) if counted else None


def _by_words(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """A table's numbers, nested by the words that stand before them in their line."""
    nested: dict[str, Any] = {}
    for row in rows:
        numbers = {key: number for key, text in row.items() if (number := _number(text)) is not None}
        place = nested
        for key, text in row.items():
            if key not in numbers and text:
                place = place.setdefault(text, {})
        place.update(numbers)
    return nested


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
