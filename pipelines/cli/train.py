"""Commands that train: ``protofl run``, ``compare``, ``sweep`` and ``tune``.

Heavy modules are imported where they are needed, after every check that does not need them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from pipelines.cli.options import (
    ONE_RUN,
    SEVERAL_RUNS,
    Count,
    File,
    Flow,
    MethodName,
    Name,
    Names,
    Numbers,
    Out,
    Repeated,
    Restart,
    Results,
    Seed,
    Size,
    Values,
    exclusive,
)
from pipelines.runs.standard_error import print_drawn, tell

_ONE_GRID = exclusive()


def run(
    *,
    values: Values = Values(),
    method: MethodName | None = None,
    seed: Seed | None = None,
    out: Out | None = None,
    flow: Flow = Flow(),
    restart: Restart = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Run one configuration, from data to report; resumes if interrupted.

    Args:
        method: short for --set method.name=NAME
        seed: short for --set seed=N
        out: run directory; {date} becomes today's date (UTC) (default: runs/<method>-s<seed>-<hash>)
        as_json: print metrics.json, and nothing else, on standard output
    """
    from pipelines.orchestration.as_flow import as_flow, uses_prefect
    from pipelines.orchestration.commands import operation, say_run
    from pipelines.plan.params import for_entry, without_tracking

    raw = values.read(
        {"--method": ("method.name", method), "--seed": ("seed", seed)}, without_effect=ONE_RUN, method=method
    )
    _say_assumptions(values, raw, [method])
    raw = for_entry(raw, method, seed)
    with operation(raw, quiet=as_json, wait=not flow.no_wait, restart=restart) as (how, config):
        if uses_prefect(flow.is_wanted, how):
            from pipelines.orchestration.flows import federated_experiment

            given, stored = None if out is None else str(out), without_tracking(config.to_mapping())
            outcome = as_flow(how, federated_experiment, out=given, restart=restart, config=stored)
        else:
            from pipelines.execution.bodies import experiment

            outcome = experiment(config, out, how)
    say_run(outcome, as_json=as_json)
    return 0


def compare(
    *,
    values: Values = Values(),
    methods: Names | None = None,
    variant: Annotated[Repeated, Parameter(metavar="NAME=METHOD,KEY=VALUE,...")] = (),
    seeds: Numbers | None = None,
    partition_seeds: Numbers | None = None,
    claims: File | None = None,
    tuned: Count = 0,
    out: Results = Path("runs/comparison"),
    flow: Flow = Flow(),
    restart: Restart = False,
) -> int:
    """Compare methods over seeds in one table; reuses finished runs.

    Args:
        methods: rows of the table (default: compare.methods)
        variant: another row: a method with other values; repeatable
        seeds: each method runs with each of them (default: compare.seeds)
        partition_seeds: seeds of partitions, each run with every seed (default: compare.partition_seeds)
        claims: YAML file of claims to judge by these runs, such as which row is better (default: compare.claims)
        tuned: tune each method with N trials on validation data, then compare it tuned and as given (default: no
            tuning)
    """
    from pipelines.orchestration.as_flow import as_flow, uses_prefect
    from pipelines.orchestration.commands import operation, say_table
    from pipelines.plan.files import claims_of
    from pipelines.plan.params import compared_rows, variants_of, with_values, with_variants

    judged = None if claims is None else claims_of(claims)
    of_partitions = {"partition.seed": "the seeds of partitions come from --partition-seeds"} if partition_seeds else {}
    raw = values.read(
        {
            "--methods": ("compare.methods", methods),
            "--seeds": ("compare.seeds", seeds),
            "--partition-seeds": ("compare.partition_seeds", partition_seeds),
            "--claims": ("compare.claims", judged),
        },
        without_effect={**SEVERAL_RUNS, "method.name": "use --methods or compare.methods", **of_partitions},
        more=variants_of(variant),
    )
    raw = with_variants(raw, variant)
    _say_assumptions(values, raw, compared_rows(raw, methods))
    if partition_seeds is not None:
        raw = with_values(raw, {"compare.partition_seeds": list(partition_seeds)})
    if judged is not None:
        raw = with_values(raw, {"compare.claims": judged})
    with operation(raw, wait=not flow.no_wait, restart=restart) as (how, _):
        from pipelines.plan.comparison import comparison_plan
        from pipelines.tuning.comparing import check_claims, compare_methods

        plan = comparison_plan(raw, methods, seeds)
        check_claims(plan, tuned=tuned > 0)
        if uses_prefect(flow.is_wanted, how):
            from pipelines.orchestration import flows

            asked: dict[str, Any] = {"methods": list(methods) if methods else None, "seeds": seeds, "out": str(out)}
            asked |= {"tuned": tuned, "restart": restart}
            outcome = as_flow(how, flows.compare, **asked, config=plan.parameters)
        else:
            outcome = compare_methods(plan, out, how, tuned=tuned)
    say_table(outcome, len(plan.runs) * (2 if tuned else 1))
    return 0


def sweep(
    *,
    values: Values = Values(),
    vary: Annotated[Repeated, Parameter(metavar="KEY=A,B,...", group=_ONE_GRID)] = (),
    rows: Annotated[File | None, Parameter(group=_ONE_GRID)] = None,
    seeds: Numbers | None = None,
    baselines: Names = (),
    metric: Name = "mean_local",
    out: Results = Path("runs/sweep"),
    flow: Flow = Flow(),
    restart: Restart = False,
) -> int:
    """Run one method over a grid of values and seeds: their effect on accuracy and traffic.

    Varies method.name, with its compare.settings. Reuses finished runs, also from protofl compare in the same
    folder; a failed run does not stop the others. Writes sweep.csv (a row per point and seed), sweep.json, sweep.md and
    sweep.png.

      influence of a value    --set method.name=gfpl --vary method.merge_distance=0.1,1,10 --baselines fedavg,local
      ablation table          --set method.name=gfpl --vary method.use_dcs=false,true --vary method.use_pfg=false,true
      a line per value        --set method.name=gfpl --vary method.components=1,4,8 --vary partition.alpha=0.1,1

    A baseline uses the varied values outside the section method: in the last example it runs for each partition.alpha.

    Args:
        vary: a key and its values, as in YAML; repeat it for all combinations
        rows: YAML list of points instead of --vary, such as [{method.mu: 0.1}, {method.mu: 1}]
        seeds: each point runs with each of them (default: compare.seeds)
        baselines: methods to run for comparison (default: none)
        metric: metric of table and figure: any number of metrics.json, dotted if nested
    """
    from pipelines.orchestration.as_flow import as_flow, uses_prefect
    from pipelines.orchestration.commands import operation, say_table
    from pipelines.plan.files import points_of

    points = [] if rows is None else points_of(rows)
    varied = {text.partition("=")[0]: text for text in vary}
    more = [(f"--vary {key}", tuple(key.split(".")), text) for key, text in varied.items()]
    raw = values.read({"--seeds": ("compare.seeds", seeds)}, without_effect=SEVERAL_RUNS, more=more)
    _say_assumptions(values, raw, [None, *baselines])
    with operation(raw, wait=not flow.no_wait, restart=restart) as (how, _):
        from pipelines.execution.bodies import comparison
        from pipelines.plan.grid import sweep_plan
        from pipelines.tuning.metrics import check_metric

        plan = sweep_plan(raw, vary, seeds, baselines, points)
        check_metric(metric, plan.base.method)
        asked: dict[str, Any] = {"vary": list(vary), "seeds": list(plan.seeds), "baselines": list(baselines)}
        asked |= {"metric": metric, "points": list(points)}
        if uses_prefect(flow.is_wanted, how):
            from pipelines.orchestration import flows

            outcome = as_flow(how, flows.sweep, **asked, out=str(out), restart=restart, config=plan.parameters)
        else:
            outcome = comparison(plan, out, how, {**asked, "name": out.name})
    say_table(outcome, len(plan.runs))
    return 0


def tune(
    *,
    values: Values = Values(),
    method: MethodName,
    trials: Count = 20,
    objective: Annotated[Literal["accuracy", "accuracy,bytes"], Parameter(metavar="NAME")] = "accuracy",
    metric: Name | None = None,
    max_bytes: Size | None = None,
    at_once: Count | None = None,
    storage: Annotated[str | None, Parameter(metavar="URL")] = None,
    out: Out | None = None,
    flow: Flow = Flow(),
) -> int:
    """Tune a method's hyper-parameters on validation data; resumes if interrupted.

    Args:
        method: method to tune, see 'protofl list methods'
        trials: total number of trials: finished, pruned or failed
        objective: accuracy: the metric; accuracy,bytes: the Pareto front of metric and bytes sent
        metric: any number of metrics.json, dotted if nested; costs are minimised (default: top1_global, or mean_local
            without a global model)
        max_bytes: exclude trials that send more, such as 50MB, from the results (default: none)
        at_once: run N trials in parallel, by all commands in the same folder; each is sampled without the results of
            the N - 1 still running (default: tune.parallel)
        storage: Optuna storage, or a journal file (default: .protofl/studies.journal)
        out: the study's folder; {date} becomes today's date (UTC) (default: runs/tune-<method>)
    """
    from pipelines.orchestration.as_flow import as_flow, uses_prefect
    from pipelines.orchestration.commands import operation
    from pipelines.plan.params import for_entry, with_values, without_tracking
    from pipelines.tuning.request import StudyRequest

    own = {"--method": ("method.name", method), "--at-once": ("tune.parallel", at_once)}
    raw = values.read(own, without_effect=ONE_RUN, method=method)
    _say_assumptions(values, raw, [method])
    raw = for_entry(raw, method, None)
    if at_once:
        raw = with_values(raw, {"tune.parallel": at_once})
    request = StudyRequest(trials, objective, metric, storage, max_bytes)
    folder = out or Path(f"runs/tune-{method}")
    with operation(raw, wait=not flow.no_wait) as (how, config):
        from pipelines.tuning.search import study

        if uses_prefect(flow.is_wanted, how):
            from pipelines.orchestration import flows

            asked = {key: value for key, value in asdict(request).items() if key != "storage"}
            stored = without_tracking(raw)
            outcome = as_flow(how, flows.tune, **asked, out=str(folder), config=stored, hidden=storage)
        else:
            outcome = study(config, request, folder, how)
    print_drawn(outcome.table)
    if outcome.store is not None:
        print(f"study in MLflow: {outcome.store}")
    return 0


def _say_assumptions(values: Values, raw: Mapping[str, Any], rows: Sequence[str | None]) -> None:
    """Report that there is no parameter file, and which methods bring their own model; refuse another in ``--set``."""
    from pipelines.plan.files import DEFAULT_FILE
    from pipelines.plan.params import brought_models

    if values.params is None and not DEFAULT_FILE.exists() and sys.stderr.isatty():
        tell(f"no {DEFAULT_FILE} here: built-in values hold, such as local.lr=0.01 (docs/reference/parameters.md)")
    for line in brought_models(raw, rows, values.assignments):
        tell(line)
