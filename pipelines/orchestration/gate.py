"""Gate of a scheduled flow: limits for figures of its results. A flow that misses one fails and promotes nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from flcore.core.errors import ConfigError, RunError
from flcore.methods import Method
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import read_json
from pipelines.runs.metrics import lower_is_better
from pipelines.runs.record import COMMUNICATION, SCORES
from pipelines.tuning.metrics import check_metric, value_of

Gate = dict[str, float]
"""Figure → the worst value that passes; of a comparison the figure is ``ROW.FIGURE``, a mean over its runs."""


def check_gate(gate: Gate, methods: Mapping[str, Method]) -> None:
    """Refuse figures that the results will not have.

    Args:
        gate: the limits. methods: method of each row of a comparison; of a single run, its method by an empty name.

    Raises:
        ConfigError: an unknown row or figure.
    """
    for name in gate:
        rows = [row for row in methods if not row or name.startswith(f"{row}.")]
        if not rows:
            raise ConfigError(f"gate.{name}: expected ROW.FIGURE, where ROW is one of {', '.join(methods)}")
        row = max(rows, key=len)
        figure = name.removeprefix(f"{row}.") if row else name
        if row and figure not in (*SCORES, *COMMUNICATION):
            raise ConfigError(f"gate.{name}: the figure must be one of {', '.join((*SCORES, *COMMUNICATION))}")
        try:
            check_metric(figure, methods[row])
        except ConfigError as error:
            raise ConfigError(str(error).replace("--metric ", "gate.", 1)) from error


def pass_run(gate: Gate, directory: Path) -> str:
    """Return what a finished run reached; RunError if a figure is missing or worse than its limit."""
    run = RunFolder(directory)
    return _passed(gate, lambda name: value_of(name, run.metrics, run.history), directory)


def pass_comparison(gate: Gate, directory: Path) -> str:
    """Compare the means of a comparison's rows with the limits; as :func:`pass_run`."""
    runs = read_json(directory / "comparison.json")["runs"] if gate else []

    def mean(name: str) -> float | None:
        values = [run.get(figure) for run in runs for figure in run if name == f"{run['method']}.{figure}"]
        return None if not values or None in values else statistics.fmean(values)

    return _passed(gate, mean, directory)


def _passed(gate: Gate, value_at: Callable[[str], float | None], directory: Path) -> str:
    passed, missed = list[str](), list[str]()
    for name, limit in gate.items():
        value, is_cost = value_at(name), lower_is_better(name)
        reached = value is not None and (value <= limit if is_cost else value >= limit)
        known = "unknown" if value is None else f"{value:.6g}"
        (passed if reached else missed).append(f"{name} = {known}, {'at most' if is_cost else 'at least'} {limit:g}")
    if missed:
        raise RunError(f"gate missed: {'; '.join(missed)}; results are in {directory}, nothing is promoted")
    return "; ".join(passed)
