"""Results of a study: ``study.json``, ``study.md``, ``trials.csv``, ``best.yaml``, MLflow's record, printed lines.

The same trials give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from flcore.core.text import to_yaml
from flcore.io.files import json_text
from pipelines.reporting.formats import MISSING, format_bytes, format_value, plural
from pipelines.reporting.statistics import BEST
from pipelines.reporting.tables import Column, Table, csv_text, markdown_table, print_tables
from pipelines.runs.layout import write_json, write_text
from pipelines.runs.metrics import unit
from pipelines.runs.standard_error import console
from pipelines.tuning.folder import StudyFiles, write_params
from pipelines.tuning.problem import Problem
from pipelines.tuning.study import best_trials, ended_trials, fingerprints_of, front

_PRINTED_TRIALS = 5


def write_results(problem: Problem, study: Study, files: StudyFiles) -> None:
    """Write ``study.json``, ``study.md``, ``trials.csv``, ``best.yaml`` and the record's history and summary."""
    ended, best = ended_trials(study), best_trials(problem, study)
    write_json(files.results, _described(problem, study, ended, best))
    write_text(files.table, markdown(problem, study))
    write_text(files.trials, csv_text([_as_row(problem, trial) for trial in ended]))
    rounds = "".join(json_text(_as_round(trial)) + "\n" for trial in ended)
    write_text(files.record.history, rounds)
    if best:
        write_params(files.best, problem.parameters_with(best[0].params))
        summary = {problem.metric: best[0].values[0], "best_round": best[0].number}
        write_json(files.record.metrics, fingerprints_of(study) | summary)


def printed(problem: Problem, study: Study, files: StudyFiles, dashboard: str, *, width: int, terminal: bool) -> str:
    """Return text with the best trials, the searched values and next commands, for a study with a finished trial."""
    best = best_trials(problem, study)
    tables = [_trials(problem, best[:_PRINTED_TRIALS], best, with_values=False), _searched(problem, best)]
    text = io.StringIO()
    print_tables(tables, console(file=text, width=width, force_terminal=terminal))
    # Text to copy is alone on a line, unbroken.
    lines = [
        f"{problem.name}: {plural(len(best), 'finished trial')}, scored on validation data",
        text.getvalue().rstrip("\n"),
        f"all trials: {files.table}, {files.trials}; plots: {dashboard}",
        f"the best one, on all training data and scored on test data:\n  {files.command}",
    ]
    return "\n".join(lines) + "\n"


def describe(problem: Problem, trial: FrozenTrial) -> str:
    """Return a line on how a trial ended."""
    if trial.state == TrialState.COMPLETE:
        reached, sent = _reached(problem, trial.values[0]), format_bytes(trial.user_attrs["bytes"])
        beyond = "" if problem.within(trial.user_attrs["bytes"]) else f", more than {format_bytes(problem.max_bytes)}"
        return f"trial {trial.number}: {problem.metric} {reached}, {sent}{beyond}"
    if trial.state == TrialState.PRUNED:
        last = max(trial.intermediate_values)
        return f"trial {trial.number}: pruned after round {last}, {_reached(problem, trial.intermediate_values[last])}"
    return f"trial {trial.number} failed: {reason(trial)}"


def reason(trial: FrozenTrial) -> str:
    """Return the reason why a trial has not finished."""
    return str(trial.user_attrs.get("error", "pruned" if trial.state == TrialState.PRUNED else "unknown reason"))


def _reached(problem: Problem, value: float) -> str:
    """Write a value of the metric with its unit."""
    return format_value(value, unit(problem.metric)) + (" %" if unit(problem.metric) == "share" else "")


def _described(
    problem: Problem, study: Study, ended: Sequence[FrozenTrial], best: Sequence[FrozenTrial]
) -> dict[str, Any]:
    return {
        "study": problem.name,
        "method": problem.config.method.name,
        "seed": problem.config.seed,
        "objective": problem.objective,
        "metric": problem.metric,
        "directions": list(problem.directions),
        "max_bytes": problem.max_bytes,
        "split": problem.config.evaluation.split,
        "tune": problem.config.to_mapping()["tune"],
        "space": problem.space,
        "given": problem.given_values,
        **fingerprints_of(study),
        "best": [trial.number for trial in front(best)],
        "trials": [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "params": trial.params,
                "accuracy": _accuracy(trial),
                "bytes": trial.user_attrs.get("bytes"),
                "error": trial.user_attrs.get("error"),
                "rounds": {str(number): value for number, value in sorted(trial.intermediate_values.items())},
            }
            for trial in ended
        ],
    }


def _accuracy(trial: FrozenTrial) -> float | None:
    return trial.values[0] if trial.state == TrialState.COMPLETE else None


def _as_round(trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial as a record of a history; its number is the round."""
    sent = {"both": trial.user_attrs.get("bytes", 0)}
    return {"round": trial.number, "value": _accuracy(trial), "bytes_up": sent, "bytes_down": {}}


def markdown(problem: Problem, study: Study) -> str:
    """Return ``study.md``: the searched values, and all trials, the best first."""
    ended, best = ended_trials(study), best_trials(problem, study)
    others = [trial for trial in ended if trial not in best]
    count, chosen = plural(len(best), "finished trial"), "best" if problem.objective == "accuracy" else "Pareto front"
    limit = "" if problem.max_bytes is None else f" that send {format_bytes(problem.max_bytes)} at most"
    lines = [
        f"# {problem.name}",
        "",
        f"{count} of {problem.config.method.name}{limit}, scored on validation data; **bold**: the {chosen}.",
        "",
        *markdown_table(_searched(problem, best)),
        *markdown_table(_trials(problem, [*best, *others], best, with_values=True)),
    ]
    if best:
        command = "protofl run --params <this folder>/best.yaml"
        lines += ["The best one on all training data, scored on test data:", "", f"    {command}", ""]
    return "\n".join(lines)


def _searched(problem: Problem, best: Sequence[FrozenTrial]) -> Table:
    keys = [dimension.key for dimension in problem.dimensions]
    columns = [
        Column("searched", keys, is_text=True),
        Column("values", [dimension.words for dimension in problem.dimensions], is_text=True),
        Column("given", [_value(problem.given_values, key) for key in keys]),
    ]
    if best:
        columns.append(Column(f"trial {best[0].number}", [_value(best[0].params, key) for key in keys]))
    return Table("What was searched", tuple(columns))


def _trials(problem: Problem, rows: Sequence[FrozenTrial], best: Sequence[FrozenTrial], *, with_values: bool) -> Table:
    """Return a table of trials; with values, trials of the front are marked."""
    chosen, figure = {trial.number for trial in front(best)}, unit(problem.metric)
    marks = [BEST if trial.number in chosen else "" for trial in rows]
    columns = [
        Column("trial", [trial.number for trial in rows], marks=marks if with_values else ()),
        Column("state", [trial.state.name.lower() for trial in rows], is_text=True),
        Column(
            problem.metric + (" %" if figure == "share" else ""),
            [format_value(_accuracy(trial), figure) for trial in rows],
        ),
        Column("bytes", [format_bytes(trial.user_attrs.get("bytes")) for trial in rows]),
    ]
    if with_values:
        columns += [Column(key, [_value(trial.params, key) for trial in rows]) for key in problem.space]
    return Table("Trials", tuple(columns))


def _as_row(problem: Problem, trial: FrozenTrial) -> dict[str, Any]:
    known = {"trial": trial.number, "state": trial.state.name.lower(), "accuracy": _accuracy(trial)}
    return {**known, "bytes": trial.user_attrs.get("bytes"), **{key: trial.params.get(key) for key in problem.space}}


def _value(values: Mapping[str, Any], key: str) -> str:
    """Return a searched value; a dash marks one that was not searched, since null is a value."""
    if key not in values:
        return MISSING
    return f"{values[key]:.4g}" if isinstance(values[key], float) else to_yaml(values[key])
