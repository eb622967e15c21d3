"""``protofl compare --tuned N``: tune every method with the same budget, then run it with the values found.

A learning rate alone matters more than the method, so a tuned method always beats one with default values. Here each
method, including FedAvg and Local, has a study of N trials over its own and the shared parameters
(:mod:`pipelines.tuning.space`), on validation data, with the comparison's number of rounds and its own seed. Studies
run in parallel. Then every seed is run on test data with the given values and with the values found; differences are to
the tuned baseline. A method without a finished trial has no tuned row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.config.schema import Config
from flcore.core.errors import RunError
from pipelines.execution.bodies import comparison
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import Outcome
from pipelines.plan.spec import ExperimentPlan, RunSpec
from pipelines.reporting.comparison import Tuned, tuned_name
from pipelines.runs.layout import read_json
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.request import StudyRequest
from pipelines.tuning.search import Search, run_trials
from pipelines.tuning.space import with_values

if TYPE_CHECKING:
    from collections.abc import Iterator


def tuned_comparison(plan: ExperimentPlan, trials: int, out: Path, operation: Operation) -> Outcome:
    """Tune every method in a study of its own, in ``tuning/<method>``, and compare them.

    Raises:
        ConfigError: an entry cannot be run, or its data differ from the others'; or trials is below 1.
        RunError: no run has finished.
    """
    unwaited, request = replace(operation, wait=False), StudyRequest(trials)
    searches = {
        name: Search(plan.of_row(name), request, out / "tuning" / name, unwaited, f"{name}: ") for name in plan.rows
    }
    run_trials([*searches.values()], operation)
    results = [_result(name, search, out) for name, search in searches.items()]
    planned = plan.with_runs(_with_tuned_runs(plan.runs, results))
    return comparison(planned, out, operation, {"name": out.name, "tuning": [asdict(tuned) for tuned in results]})


def _result(method: str, search: Search, out: Path) -> Tuned:
    """Finish a study, log it and return its result."""
    error = None
    try:
        search.outcome()
    except RunError as raised:
        error = str(raised)
    study = read_json(StudyFiles(out / "tuning" / method).results)
    configured, ended = study["given"], {trial["number"]: trial for trial in study["trials"]}
    best = ended[study["best"][0]] if study["best"] else None
    return Tuned(
        method,
        len(ended),
        sum(trial["state"] == "fail" for trial in ended.values()),
        study["metric"],
        ended[0]["accuracy"],  # every study begins with the given values
        None if best is None else best["accuracy"],
        {} if best is None else {key: value for key, value in best["params"].items() if value != configured.get(key)},
        error,
    )


def _with_tuned_runs(as_given: Sequence[RunSpec], results: Sequence[Tuned]) -> Iterator[RunSpec]:
    """Yield the runs with the values found, by method, then those with the given values."""
    for tuned in results:
        for run in as_given:
            if run.name == tuned.method and tuned.error is None:
                config = Config.from_mapping(with_values(run.config.to_mapping(), tuned.values))
                label = f"{run.label}, tuned" if run.label else "tuned"
                yield replace(run, config=config, label=label, row=tuned_name(tuned.method))
    yield from as_given
