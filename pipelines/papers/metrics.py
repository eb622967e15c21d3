"""A run's figures outside its ``metrics.json``: seconds, joules, rounds, distances of an analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, RunError
from flcore.data.dataset import Dataset
from flcore.methods.gfpl import GFPL
from flcore.models import build_model
from pipelines.reporting.partition_table import load_partition
from pipelines.reporting.statistics import first_round_reaching
from pipelines.runs.analyses import load
from pipelines.runs.folder import RunFolder
from pipelines.runs.record import numbers_in
from pipelines.tuning.metrics import value_of

WARM_UP = 2
"""Rounds that a mean duration skips, if there are more (evaluation.md section 4)."""

TO_TARGET, SHARE = "rounds_to_target.", 0.95
"""Rounds until a metric reaches this fraction of the baseline run's final value (``protofl compare``)."""

HISTORY = "history."

FORMULA, PREDICTED = "formula.mixtures_up", "scalars_up_per_round"
"""A metric that is computed from a run's configuration, and the measured figure that it predicts."""


def figure(run: RunFolder, metric: str, baseline: tuple[RunFolder, str] | None = None) -> float | None:
    """Return a figure of a finished run, in the run's own unit; None if its method has none or nothing measured it.

    In addition to :func:`figures`, ``metric`` may be :data:`FORMULA`, a value of a round's record
    (``history.5.tasks.a_glo``) or its mean over several (``history.6-15.top1_global``), or
    ``rounds_to_target.top1_global``, the first round that reached the target, or one more than the run has.
    ``baseline``, a run with the same seed and partition and its metric, defines the target.
    """
    if metric.startswith(TO_TARGET):
        final = next((value for _, value in reversed(_curve(*baseline))), None) if baseline is not None else None
        curve = _curve(run, metric)
        if final is None or all(value is None for _, value in curve):
            return None
        # A run that is too slow counts as just too slow; without a figure its pair would drop out, to its advantage.
        return first_round_reaching(curve, SHARE * final) or curve[-1][0] + 1
    if metric.startswith(HISTORY):
        which, _, field = metric.removeprefix(HISTORY).partition(".")
        first, _, last = which.partition("-")
        within = range(int(first), int(last or first) + 1)
        values = [value for number, value in _curve(run, f"{HISTORY}{field}") if number in within]
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == len(values) > 0 else None
    if metric == FORMULA:
        with suppress(DataError):  # its partition no longer exists
            return mixtures_up(run)
        return None
    try:
        return value_of(metric, figures(run, metric), run.history)
    except (ConfigError, RunError):
        return None


def figures(run: RunFolder, metric: str) -> dict[str, Any]:
    """Return the figures that a metric may name: ``metrics.json``, and ``timing`` or ``analyses`` if it starts so.

    ``timing`` is ``timing.json`` with means over rounds but the first two: ``seconds_per_round`` as measured without
    evaluation, and ``ideal_seconds_per_round``, the slowest client of every leg plus the server steps.

    ``analyses`` has every table of an analysis, its numbers nested by the texts in their line, such as
    ``analyses.generator_distances.generated.tsne.intra``.
    """
    values, root = dict(run.metrics), metric.partition(".")[0]
    if root == "timing" and run.timing:
        values["timing"] = {
            **run.timing,
            "seconds_per_round": _mean_seconds(run.legs, ideal=False),
            "ideal_seconds_per_round": _mean_seconds(run.legs, ideal=True),
        }
    if root == "analyses" and run.files.analyses.exists():
        values["analyses"] = {one.name: _by_words(one.rows) for one in load(run)}
    return values


def _curve(run: RunFolder, metric: str) -> list[tuple[int, float | None]]:
    """Return the evaluated rounds, oldest first, each with its value of the metric without the first word."""
    field = metric.partition(".")[2]
    return [(record["round"], dict(numbers_in(record)).get(field)) for record in run.history]


def _mean_seconds(legs: Sequence[Mapping[str, Any]], *, ideal: bool) -> float | None:
    """Return the mean seconds of a round without evaluation; ``ideal``: as if its clients trained in parallel."""
    lengths: dict[int, float] = {}
    for leg in legs:
        left_out = ("evaluate", leg["leg"] if ideal else None)
        seconds = sum(value for phase, value in leg["seconds"].items() if phase not in left_out)
        seconds += max(leg["clients"].values(), default=0.0) if ideal else 0.0
        lengths[leg["round"]] = lengths.get(leg["round"], 0.0) + seconds
    in_order = [lengths[number] for number in sorted(lengths)]
    counted = in_order[WARM_UP:] or in_order
    return fmean(counted) if counted else None


def _by_words(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return a table's numbers, nested by the preceding texts of their line."""
    nested: dict[str, Any] = {}
    for row in rows:
        numbers = {key: number for key, text in row.items() if (number := _number(text)) is not None}
        level = nested
        for key, text in row.items():
            if key not in numbers and text:
                level = level.setdefault(text, {})
        level.update(numbers)
    return nested


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def mixtures_up(run: RunFolder) -> float:
    """Return the scalars that all GFPL clients send, mean over rounds (gfpl.md section 3; figure 7).

    n·(2d + 1) for each class that a client holds and each exchange: means, deviations and weights of n Gaussians, if
    the class has enough samples for n. Other values sent, such as the class's number of samples, do not count. Raises a
    DataError if a file of the run is damaged, or its partition no longer exists.
    """
    config = Config.from_mapping(run.config)
    method, rounds, meta = config.method, config.federation.rounds, Dataset.load(run.inputs.prepared).meta
    assert isinstance(method, GFPL)
    length = build_model(config.model_spec, meta.shape, meta.num_classes).feature_dim
    pairs = int((load_partition(run.inputs.partition).counts > 0).sum())
    exchanges = sum(method.exchanges(number) for number in range(1, rounds + 1))
    return method.components * (2 * length + 1) * pairs * exchanges / rounds
