"""What a table may print of a run beside its ``metrics.json``: seconds, joules, rounds, distances of an analysis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, RunError
from flcore.data.dataset import Dataset
from flcore.experiment.run_folder import RunFiles, read_run_config
from flcore.methods.gfpl import GFPL
from flcore.models import build_model
from pipelines.reporting.figures.partition import load_partition
from pipelines.runs.analyses import load
from pipelines.runs.folder import read_lines
from pipelines.runs.inputs import inputs_of
from pipelines.runs.layout import read_json
from pipelines.runs.record import numbers_in
from pipelines.tuning.metrics import value_of

WARM_UP = 2
"""Rounds that a duration leaves out, where there are more (evaluation.md section 4)."""

TO_TARGET, SHARE = "rounds_to_target.", 0.95
"""Rounds until a number of the records is this share of what the baseline's run ends with (``protofl compare``)."""

HISTORY = "history."


def figure(run: Path, metric: str, baseline: tuple[Path, str] | None = None) -> float | None:
    """A figure of a finished run, in the run's own unit; None where its method has none, or nothing measured it.

    Or a figure of :data:`FORMULAS`. Or a number of its history: that of a round's
    record, ``history.5.tasks.a_glo``, or the round ``rounds_to_target.top1_global``, None where it was never reached.

    Args:
        run: its folder. metric: dotted name; see :func:`figures`.
        baseline: the run of the same seed and division that a target is taken from, and its metric; None: no target.

    Raises:
        DataError: a file of the run is damaged.
    """
    if metric.startswith(TO_TARGET):
        return None if baseline is None else _rounds_to_target(_curve(run, metric), _curve(*baseline))
    if metric.startswith(HISTORY):
        number = metric.split(".")[1]
        return dict(_curve(run, f"{HISTORY}{metric.removeprefix(f'{HISTORY}{number}.')}")).get(int(number))
    if metric.startswith(PREFIX):
        with suppress(DataError):  # its division is not there any more
            return FORMULAS[metric.removeprefix(PREFIX)][1](run)
        return None
    try:
        return value_of(metric, figures(run, metric), read_lines(RunFiles(run).history))
    except (ConfigError, RunError):
        return None


def figures(run: Path, metric: str) -> dict[str, Any]:
    """What a metric may name: ``metrics.json``, and ``timing`` or ``analyses`` if it begins so.

    ``timing`` is ``timing.json`` with means over rounds, without the first two and without evaluation:
    ``seconds_per_round``, as they went by here, and ``ideal_seconds_per_round``, of every leg its slowest client and
    what the server did, as if a round's clients trained side by side.

    ``analyses`` has every table of an analysis: numbers by the words of their line, such as
    ``analyses.generator_distances.generated.tsne.intra``.
    """
    files = RunFiles(run)
    found = dict(read_json(files.metrics))
    root = metric.partition(".")[0]
    if root == "timing" and files.timing.exists():
        timing = read_json(files.timing)
        found["timing"] = {
            **timing,
            "seconds_per_round": _mean_over_rounds(timing["rounds"], _as_they_went),
            "ideal_seconds_per_round": _mean_over_rounds(timing["rounds"], _side_by_side),
        }
    if root == "analyses" and files.analyses.exists():
        found["analyses"] = {one.name: _by_words(one.rows) for one in load(run)}
    return found


def _curve(run: Path, metric: str) -> list[tuple[int, float | None]]:
    """Evaluated rounds, oldest first, with the number of their record that follows the metric's first word."""
    field = metric.partition(".")[2]
    records = sorted(read_lines(RunFiles(run).history), key=lambda record: record["round"])
    return [(record["round"], dict(numbers_in(record)).get(field)) for record in records]


def _rounds_to_target(
    curve: Sequence[tuple[int, float | None]], baseline: Sequence[tuple[int, float | None]]
) -> float | None:
    final = baseline[-1][1] if baseline else None
    if final is None:
        return None
    # The tolerance keeps 0.95 * 0.8 reachable by 0.76: the product of two fractions is off by a rounding step.
    reached = (n for n, value in curve if n >= 1 and value is not None and value >= SHARE * final - 1e-12)
    return next(reached, None)


def _mean_over_rounds(legs: Sequence[Mapping[str, Any]], seconds: Callable[[Mapping[str, Any]], float]) -> float | None:
    """Mean over rounds of the seconds of all their legs; None of a run without rounds."""
    lengths: dict[int, float] = {}
    for leg in legs:
        lengths[leg["round"]] = lengths.get(leg["round"], 0.0) + seconds(leg)
    in_order = [lengths[number] for number in sorted(lengths)]
    counted = in_order[WARM_UP:] or in_order
    return fmean(counted) if counted else None


def _as_they_went(leg: Mapping[str, Any]) -> float:
    """Training, messages and server steps."""
    return sum(value for phase, value in leg["seconds"].items() if phase != "evaluate")


def _side_by_side(leg: Mapping[str, Any]) -> float:
    """The slowest client, and server steps."""
    stages = sum(value for phase, value in leg["seconds"].items() if phase not in ("evaluate", leg["leg"]))
    return stages + max(leg["clients"].values(), default=0.0)


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


# ---- formulas ----------------------------------------------------------------------------------------------------

PREFIX = "formula."
"""What the metric of such a column begins with, in a table's file."""


def mixtures_up(run: Path) -> float:
    """GFPL's scalars that go up, of all clients, in the mean over rounds (gfpl.md section 3; figure 7).

    n·(2d + 1) for each class that a client holds and each exchange: means, deviations and weights of n Gaussians, where
    the class has samples for so many. What goes beside them, such as the class's number of samples, is not in it.

    Args:
        run: its folder.

    Raises:
        DataError: a file of the run is damaged, or its division is not there any more.
    """
    config, inputs = Config.from_mapping(read_run_config(run)["config"]), inputs_of(run)
    method, rounds, meta = config.method, config.federation.rounds, Dataset.load(inputs.prepared).meta
    assert isinstance(method, GFPL)
    length = build_model(config.model_spec, meta.shape, meta.num_classes).feature_dim
    pairs = int((load_partition(inputs.partition).counts > 0).sum())
    exchanges = sum(method.exchanges(number) for number in range(1, rounds + 1))
    return method.components * (2 * length + 1) * pairs * exchanges / rounds


FORMULAS: dict[str, tuple[str, Callable[[Path], float]]] = {"mixtures_up": ("scalars_up_per_round", mixtures_up)}
"""By name, what a formula speaks of, and the formula."""


def spoken_of(metric: str) -> str | None:
    """The measured figure that a formula speaks of; None where a metric is none."""
    return FORMULAS[metric.removeprefix(PREFIX)][0] if metric.startswith(PREFIX) else None
