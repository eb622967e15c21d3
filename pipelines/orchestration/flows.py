"""The Prefect flows: the bodies of :mod:`pipelines.execution.bodies` with their steps shown, timed and retried.

``federated-experiment`` is everything for one configuration, ``federated-training`` the same on given data;
``protofl-compare``, ``protofl-sweep`` and ``protofl-tune`` are many runs, and end with their tables, figures and MLflow
runs; ``protofl-retrain-on-new-data`` is an experiment that trains only if data, configuration or code changed.
What they share is in :mod:`pipelines.orchestration.flow_runs`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from flcore.core.errors import ConfigError
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import code_fingerprint
from flcore.experiment.run_folder import RunFiles
from flcore.io.files import read_json, remove_stale_temp, write_json
from pipelines.addresses import has_secrets
from pipelines.execution.bodies import comparison, experiment
from pipelines.orchestration import working_folder
from pipelines.orchestration.artifacts import artifact_key
from pipelines.orchestration.flow_runs import (
    CURRENT,
    OPTIONS,
    Configuration,
    Count,
    Hours,
    Seed,
    configuration,
    dated,
    finish_all,
    named_by_folder,
    named_by_method,
    operation,
    parameters,
    publish_result,
    show_run,
    show_table,
)
from pipelines.orchestration.gate import check_gate, pass_comparison, pass_run
from pipelines.plan.comparison import comparison_plan
from pipelines.plan.grid import sweep_plan
from pipelines.reporting.comparison import tuned_name
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs
from pipelines.tuning.comparing import check_claims, compare_methods
from pipelines.tuning.metrics import check_metric
from pipelines.tuning.request import StudyRequest

STORAGE = "PROTOFL_STORAGE"
"""Variable of a worker: Optuna's storage for studies that name none. It may hold a password; a parameter may not."""

working_folder.enter()


@flow(name="federated-experiment", flow_run_name=named_by_method(), **OPTIONS)
def federated_experiment(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    out: str | None = None,
    restart: bool = False,
    config: Configuration | None = None,
    limit_hours: Hours | None = None,
    prepared: str | None = None,
    partition: str | None = None,
) -> str:
    """Everything for one configuration: prepare, divide, train, evaluate, report, log.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments, as for ``--set``.
        out: the run's folder; ``{date}`` becomes the day for which the flow was scheduled. None:
            ``runs/<method>-s<seed>-<hash, 8>``.
        restart: discard unusable checkpoints and damaged results; resume the rest.
        config: a configuration instead of a file and overrides; without the section ``tracking``, which is not stored.
        limit_hours: stop after this many hours; the same parameters resume it. None: no limit.
        prepared: folder of data that are prepared already, with ``partition``; None: prepare and divide them.
        partition: folder of the partition of these data.

    Returns:
        The run's folder.
    """
    checked = configuration(params_file, overrides, config)
    if (prepared is None) != (partition is None):
        raise ConfigError("prepared, partition: both are needed, or neither")
    inputs = Inputs(Path(prepared), Path(partition)) if prepared and partition else None
    tags = [checked.method.name, checked.source.display_name]
    with operation(checked, tags, limit_hours=limit_hours, restart=restart, experiment_of=checked) as how:
        outcome = experiment(checked, None if out is None else Path(dated(out)), how, inputs=inputs)
        show_run(outcome)
    return publish_result(outcome)


federated_training = federated_experiment.with_options(name="federated-training")
"""One run, usually on data that are prepared and divided already, for example by ``dvc repro``."""


@flow(name="protofl-compare", flow_run_name=named_by_folder("compare"), **OPTIONS)
def compare(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    methods: list[str] | None = None,
    seeds: list[Seed] | None = None,
    out: str = "runs/comparison",
    restart: bool = False,
    tuned: Annotated[int, Field(ge=0)] = 0,
    config: Configuration | None = None,
    limit_hours: Hours | None = None,
    gate: dict[str, float] | None = None,
) -> str:
    """Methods × seeds, then their table, figures, page and MLflow runs.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments for all runs.
        methods: default ``compare.methods``.
        seeds: default ``compare.seeds``.
        out: folder of the comparison; ``{date}`` as for ``federated-experiment``.
        restart: discard unusable checkpoints and damaged results.
        tuned: trials with which each method is tuned first; 0: none is.
        config: parameters instead of a file and overrides.
        limit_hours: stop after this many hours; the same parameters resume it. None: no limit.
        gate: limits such as ``{"fedavg.mean_local": 0.9}``; the flow fails where a mean over seeds is worse.

    Returns:
        The comparison's folder.
    """
    raw = parameters(params_file, overrides, config)
    plan, folder = comparison_plan(raw, methods, seeds), Path(dated(out))
    check_claims(plan, tuned=tuned > 0)  # refused before anything is begun
    rows = {run.name: run.config.method for run in plan.runs}
    check_gate(gate or {}, rows | {tuned_name(row): method for row, method in rows.items() if tuned})
    tags = ["comparison", plan.base.source.display_name]
    with operation(plan.base, tags, limit_hours=limit_hours, restart=restart) as how:
        outcome = compare_methods(plan, folder, how, tuned=tuned)
        show_table(outcome)
    directory = finish_all(outcome, len(plan.runs) * (2 if tuned else 1))
    pass_comparison(gate or {}, outcome.directory)
    return directory


@flow(name="protofl-sweep", flow_run_name=named_by_folder("sweep"), **OPTIONS)
def sweep(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    vary: list[str] | None = None,
    seeds: list[Seed] | None = None,
    baselines: list[str] | None = None,
    metric: str = "mean_local",
    out: str = "runs/sweep",
    restart: bool = False,
    points: list[dict[str, Any]] | None = None,
    config: Configuration | None = None,
    limit_hours: Hours | None = None,
) -> str:
    """The points of a grid × seeds, then their table, figure and MLflow runs.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments for all runs.
        vary: ``KEY=VALUE,VALUE,...`` assignments, see :mod:`pipelines.plan.grid`.
        seeds: default ``compare.seeds``.
        baselines: methods to run for comparison.
        metric: of table and figure.
        out: folder of the sweep; ``{date}`` as for ``federated-experiment``.
        restart: discard unusable checkpoints and damaged results.
        points: instead of ``vary``, each dotted keys with values.
        config: parameters instead of a file and overrides.
        limit_hours: stop after this many hours; the same parameters resume it. None: no limit.

    Returns:
        The sweep's folder.
    """
    raw = parameters(params_file, overrides, config)
    plan = sweep_plan(raw, vary or [], seeds, baselines or (), points or ())
    check_metric(metric, plan.base.method)
    folder = Path(dated(out))
    asked = {"vary": list(vary or []), "seeds": list(plan.seeds), "baselines": list(baselines or ())}
    asked |= {"points": list(points or ())}
    tags = ["sweep", plan.base.source.display_name]
    with operation(plan.base, tags, limit_hours=limit_hours, restart=restart) as how:
        facts = {**asked, "metric": metric, "name": folder.name}
        outcome = comparison(plan, folder, how, facts)
        show_table(outcome)
    return finish_all(outcome, len(plan.runs))


@flow(name="protofl-tune", flow_run_name=named_by_folder("tune"), **OPTIONS)
def tune(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    trials: Count = 20,
    objective: Literal["accuracy", "accuracy,bytes"] = "accuracy",
    metric: str | None = None,
    storage: str | None = None,
    out: str = "runs/tune",
    config: Configuration | None = None,
    max_bytes: Count | None = None,
    limit_hours: Hours | None = None,
) -> str:
    """An Optuna study of one method on validation data, then its results and MLflow runs.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments.
        trials: total number of trials: finished, pruned or failed; the same parameters resume the study.
        objective: ``accuracy``, or ``accuracy,bytes`` for the front of it against bytes sent.
        metric: a number of ``metrics.json``; None: the method's own accuracy.
        storage: Optuna's storage as a URL without a password; None takes the worker's variable PROTOFL_STORAGE, else
            the journal of the working folder.
        out: the study's folder; ``{date}`` as for ``federated-experiment``.
        config: parameters instead of a file and overrides.
        max_bytes: the most that a result may send; None: any number.
        limit_hours: stop after this many hours; the same parameters resume it. None: no limit.

    Returns:
        The study's folder.
    """
    if storage is not None and has_secrets(storage):
        raise ConfigError("storage: Prefect would keep the password in it; take a storage that needs none")
    from pipelines.tuning.search import study  # Optuna, which no other flow needs

    checked = configuration(params_file, overrides, config)
    folder, call = Path(dated(out)), CURRENT.get(None)
    place = (storage or os.environ.get(STORAGE)) if call is None else call.storage
    tags = ["tune", checked.method.name, checked.source.display_name]
    with operation(checked, tags, limit_hours=limit_hours) as how:
        outcome = study(checked, StudyRequest(trials, objective, metric, place, max_bytes), folder, how)
        show_table(outcome)
    return publish_result(outcome)


@flow(name="protofl-retrain-on-new-data", flow_run_name=named_by_method("retrain "), **OPTIONS)
def retrain_on_new_data(
    params_file: str | None = None,
    overrides: list[str] | None = None,
    out: str = "runs/retrained",
    restart: bool = False,
    config: Configuration | None = None,
    limit_hours: Hours | None = None,
    gate: dict[str, float] | None = None,
    promote: bool = False,
) -> State[str]:
    """One experiment on the present data, unless the last finished one had the same configuration, data and code.

    Args:
        params_file: parameter file; None takes ``params.yaml`` where there is one.
        overrides: ``KEY=VALUE`` assignments.
        out: folder of the runs, one for each state of configuration, data and code, and of ``last.json``.
        restart: discard unusable checkpoints and damaged results; resume the rest.
        config: a configuration instead of a file and overrides.
        limit_hours: stop after this many hours; the same parameters resume it. None: no limit.
        gate: limits such as ``{"mean_local": 0.9}``; the flow fails where a figure of the run is worse.
        promote: make the model of a run that passes the champion of its registered model.

    Returns:
        A state that says what was done and why; its data is the folder of the last run.
    """
    checked, home = configuration(params_file, overrides, config), Path(out)
    check_gate(gate or {}, {"": checked.method})
    if promote and not checked.tracking.enabled:
        raise ConfigError("promote: models are registered in MLflow; set tracking.enabled = true")
    tags = ["retrain", checked.method.name, checked.source.display_name]
    with operation(checked, tags, limit_hours=limit_hours, restart=restart, experiment_of=checked) as how:
        prepared = how.steps.call("prepare-data", Cache.here().prepared, checked)
        inputs = Inputs(prepared, how.steps.call("partition-data", Cache.here().partition, checked, prepared))
        asked = Experiment.open(checked, inputs.prepared, inputs.partition)
        data, last = asked.dataset.meta.fingerprint, home / "last.json"
        folder = home / hashlib.sha256(f"{asked.hash} {code_fingerprint(checked)}".encode()).hexdigest()[:16]
        before = read_json(last, "delete it; the data then count as new") if last.exists() else None
        if before is not None and before["run"] == folder.name and RunFiles(folder).metrics.exists():
            said = f"nothing to train: configuration, data ({data[:16]}) and code equal those of {folder}"
            create_markdown_artifact(said, key=artifact_key("data"))
            return Completed(name="Unchanged", message=said, data=str(folder))
        was, why = "none has finished before", f"data {data[:16]}"
        if before is not None:
            was = f"the last run was {home / before['run']}"
            why = "changed configuration or code, " * (before["data_fingerprint"] == data) + why
        create_markdown_artifact(f"{why}; {was}", key=artifact_key("data"))
        outcome = experiment(checked, folder, how, inputs=inputs)
        show_run(outcome)
        passed = pass_run(gate or {}, outcome.directory)
        if promote:
            from pipelines.tracking.best import promote_run  # MLflow

            reason = passed or "promoted without a gate"
            model = how.steps.call("promote", promote_run, outcome.directory, checked.tracking.uri, reason)
            why += f", champion {model}"
        remove_stale_temp(home, last.name)
        write_json(last, {"data_fingerprint": data, "run": outcome.directory.name})
    return Completed(message=f"trained ({why}; {was}): {publish_result(outcome)}", data=str(outcome.directory))
