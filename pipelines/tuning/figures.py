"""The figures of a study: Optuna's own, drawn from ``study.json`` alone.

So they need neither the storage, which may be a server's, nor torch, and the same trials give the same bytes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import optuna
from matplotlib import pyplot
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna.visualization import matplotlib as drawn

from flcore.io import disk
from flcore.io.files import remove_stale_temp, replace_file
from pipelines.runs.layout import read_json
from pipelines.tuning.folder import StudyFiles

_TRIALS_FOR_IMPORTANCE = 10  # with fewer, importances say more about chance than about the problem
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "fail": TrialState.FAIL}
_WIDTH, _HEIGHT = 6.4, 4.8  # inches; at least
_WIDTH_OF_A_KEY = 1.7
_SLICES = 4  # in one figure
_METADATA = {"Date": None, "Creator": None}


def write(directory: Path) -> tuple[Path, ...]:
    """Draw a study with at least one finished trial.

    ``figures/`` then has, as ``.svg``, ``history``, ``slice-1`` and so on (accuracy against keys), ``parallel`` (all
    keys of a trial in one line), for one objective ``rounds``, for two ``front``, from ten finished trials on
    ``importances``.

    Args:
        directory: the study's folder, with ``study.json``.

    Returns:
        The files.

    Raises:
        DataError: ``study.json`` is missing or damaged.
    """
    files = StudyFiles(directory)
    described = read_json(files.results)
    disk.make_folder(files.figures)
    remove_stale_temp(files.figures)
    written: list[Path] = []
    for old in files.figures.glob("*.svg"):
        disk.remove(old)
    for name, draw in _drawings(study_of(described), described).items():
        with _clean_pyplot(), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.simplefilter("ignore", UserWarning)  # axes of a single trial have a single value
            draw()
            figure = pyplot.gcf()
            if name.startswith("parallel"):
                figure.set_figwidth(max(_WIDTH, _WIDTH_OF_A_KEY * len(described["space"])))
            if name.startswith("slice"):  # so that names of choices stand apart
                figure.set_figwidth(1.2 * figure.get_figwidth())
            path = files.figures / f"{name}.svg"
            content = io.BytesIO()
            figure.savefig(content, format="svg", bbox_inches="tight", metadata=_METADATA)
            replace_file(path, lambda file, content=content: file.write(content.getvalue()))  # type: ignore[misc]
        written.append(path)
    return tuple(written)


def study_of(described: Mapping[str, Any]) -> Study:
    """The study that ``study.json`` tells of, in memory."""
    metric, directions = described["metric"], described["directions"]
    has_two, most = len(directions) > 1, described["max_bytes"]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=directions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([metric, "bytes"] if has_two else [metric])
    space = {key: _distribution(values) for key, values in described["space"].items()}
    numbers = [-1, *(trial["number"] for trial in described["trials"])]
    for (before, number), trial in zip(pairwise(numbers), described["trials"], strict=True):
        for _ in range(before + 1, number):  # under way elsewhere, or left behind; a number is a place in the list
            study.add_trial(create_trial(state=TrialState.FAIL))
        study.add_trial(_trial(trial, space, has_two, most))
    return study


def _trial(
    described: Mapping[str, Any], space: Mapping[str, BaseDistribution], has_two: bool, most: int | None
) -> FrozenTrial:
    state = _STATES[described["state"]]
    rounds = {int(number): value for number, value in described["rounds"].items()}
    values = {
        TrialState.COMPLETE: [described["accuracy"], described["bytes"]][: 1 + has_two],
        TrialState.PRUNED: [rounds[max(rounds)]] if rounds else None,
    }.get(state)
    known = {key: space[key] for key in described["params"]}
    is_limited = most is not None and described["bytes"] is not None
    return create_trial(
        state=state,
        values=values,
        params=described["params"],
        distributions=known,
        intermediate_values=rounds,
        constraints={"bytes": described["bytes"] - most} if is_limited else None,
    )


def _distribution(values: Mapping[str, Any]) -> BaseDistribution:
    if "choices" in values:
        return CategoricalDistribution(values["choices"])
    kind = IntDistribution if values["whole"] else FloatDistribution
    return kind(values["low"], values["high"], log=values["log"])


def _drawings(study: Study, described: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """What can be drawn of a study, by name."""
    metric = described["metric"]
    finished = [trial for trial in described["trials"] if trial["state"] == "complete"]
    has_two = len(study.directions) > 1
    accuracy: dict[str, Any] = {"target": lambda trial: trial.values[0]} if has_two else {}
    accuracy["target_name"] = metric
    found: dict[str, Callable[[], Any]] = {
        "history": lambda: drawn.plot_optimization_history(study, **accuracy),
        "parallel": lambda: drawn.plot_parallel_coordinate(study, target_name=metric),
    }
    # Optuna draws trials without a key beside those with one, but no key that no trial has.
    keys = [key for key in described["space"] if any(key in trial["params"] for trial in finished)]
    for place in range(0, len(keys), _SLICES):
        some = keys[place : place + _SLICES]
        found[f"slice-{1 + place // _SLICES}"] = partial(drawn.plot_slice, study, some, **accuracy)
    if has_two:
        found["front"] = lambda: drawn.plot_pareto_front(study, target_names=[metric, "bytes"])
    else:
        found["rounds"] = lambda: drawn.plot_intermediate_values(study)
    differ = len({(trial["accuracy"], trial["bytes"]) for trial in finished}) > 1
    if len(finished) >= _TRIALS_FOR_IMPORTANCE and differ:
        found["importances"] = lambda: drawn.plot_param_importances(study, **accuracy)
    return found


@contextmanager
def _clean_pyplot() -> Iterator[None]:
    """Draw with pyplot, as Optuna does, with matplotlib's own defaults, and leave nothing of it behind."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        pyplot.switch_backend("agg")  # no window, whatever the machine has
        matplotlib.rcParams.update(
            {"svg.hashsalt": "protofl", "svg.fonttype": "path", "figure.figsize": [_WIDTH, _HEIGHT]}
        )
        try:
            yield
        finally:
            pyplot.close("all")
