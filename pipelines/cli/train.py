"""Commands that train: ``protofl run``, ``compare``, ``sweep``, ``tune`` and the stages of `dvc.yaml`.

Heavy modules are imported where they are needed, after every check that does not need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from pipelines.cli.options import (
    ONE_RUN,
    SEVERAL_RUNS,
    Assignments,
    Common,
    Count,
    File,
    Flow,
    MethodName,
    Name,
    Names,
    NoCache,
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
from pipelines.runs.standard_error import tell

_PACKAGE = Path(__file__).parents[1]
"""The folder of `pipelines`."""
_ONE_GRID = exclusive()


def run(
    *,
    values: Values = Values(),
    method: MethodName | None = None,
    seed: Seed | None = None,
    out: Out | None = None,
    flow: Flow = Flow(),
    restart: Restart = False,
    no_cache: NoCache = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Run one configuration, from data to report; resumes if interrupted.

    Args:
        method: short for --set method.name=NAME
        seed: short for --set seed=N
        out: run directory; {date} becomes today's date (UTC) (default: runs/<method>-s<seed>-<hash>)
        as_json: print metrics.json, and nothing else, on standard output
    """
    from flcore.io.files import json_text
    from pipelines.orchestration import commands
    from pipelines.plan.params import for_entry

    raw = values.read(
        {"--method": ("method.name", method), "--seed": ("seed", seed)}, without_effect=ONE_RUN, method=method
    )
    _say_models(values, raw, [method])
    raw = for_entry(raw, method, seed)
    metrics = commands.run(raw, out, quiet=as_json, copies=not no_cache, restart=restart, **flow.how())
    if as_json:
        print(json_text(metrics, indent=2))
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
    budget: Literal["rounds", "bytes", "steps"] = "rounds",
    out: Results = Path("runs/comparison"),
    flow: Flow = Flow(),
    restart: Restart = False,
    no_cache: NoCache = False,
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
        budget: what all runs have equally: rounds, or the baseline's bytes or steps
    """
    from pipelines.orchestration import commands
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
    _say_models(values, raw, compared_rows(raw, methods))
    if partition_seeds is not None:
        raw = with_values(raw, {"compare.partition_seeds": list(partition_seeds)})
    if judged is not None:
        raw = with_values(raw, {"compare.claims": judged})
    how = {"budget": budget, "copies": not no_cache, "restart": restart, **flow.how()}
    commands.compare(raw, methods, seeds, out, tuned=tuned, **how)
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
    from pipelines.orchestration import commands
    from pipelines.plan.files import points_of

    points = [] if rows is None else points_of(rows)
    varied = {text.partition("=")[0]: text for text in vary}
    more = [(f"--vary {key}", tuple(key.split(".")), text) for key, text in varied.items()]
    raw = values.read({"--seeds": ("compare.seeds", seeds)}, without_effect=SEVERAL_RUNS, more=more)
    _say_models(values, raw, [None, *baselines])
    commands.sweep(raw, vary, seeds, baselines, metric, out, points=points, restart=restart, **flow.how())
    return 0


def tune(
    *,
    values: Values = Values(),
    method: MethodName,
    trials: Count = 20,
    objective: Annotated[Literal["accuracy", "accuracy,bytes"], Parameter(metavar="NAME")] = "accuracy",
    metric: Name | None = None,
    max_bytes: Size | None = None,
    max_steps: Count | None = None,
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
        max_steps: end each trial's rounds after N mini-batches of its clients (default: federation.rounds)
        at_once: run N trials in parallel, by all commands in the same folder; each is sampled without the results of
            the N - 1 still running (default: tune.parallel)
        storage: Optuna storage, or a journal file (default: .protofl/studies.journal)
        out: the study's folder; {date} becomes today's date (UTC) (default: runs/tune-<method>)
    """
    from pipelines.orchestration import commands
    from pipelines.plan.params import for_entry, with_values
    from pipelines.tuning.request import StudyRequest

    own = {"--method": ("method.name", method), "--at-once": ("tune.parallel", at_once)}
    raw = values.read(own, without_effect=ONE_RUN, method=method)
    _say_models(values, raw, [method])
    raw = for_entry(raw, method, None)
    if at_once:
        raw = with_values(raw, {"tune.parallel": at_once})
    request = StudyRequest(trials, objective, metric, storage, max_bytes, max_steps)
    commands.tune(raw, request, out or Path(f"runs/tune-{method}"), **flow.how())
    return 0


def _say_models(values: Values, raw: Mapping[str, Any], rows: Sequence[str | None]) -> None:
    """Report which methods bring their own model; refuse another model in ``--set``."""
    from pipelines.plan.params import brought_models

    for line in brought_models(raw, rows, values.assignments):
        tell(line)


# ------------------------------------------------------------------------------------------------------------- stages


def stage_code(*, out: Results = Path("artifacts"), common: Common = Common()) -> int:
    """Write digests of the code that the other stages depend on, without comments."""
    from pipelines.stages.code import write_digests

    write_digests(out / "code")
    return 0


def stage_prepare(*, values: Values = Values(), out: Results = Path("artifacts")) -> int:
    """Convert the dataset's files to tensors."""
    return _stage("prepare", values, out)


def stage_partition(*, values: Values = Values(), out: Results = Path("artifacts"), seed: Seed | None = None) -> int:
    """Divide the data among clients, for each seed.

    Args:
        seed: only this seed of compare.seeds
    """
    return _stage("partition", values, out, seed=seed)


def stage_train(
    *,
    values: Values = Values(),
    out: Results = Path("artifacts"),
    method: MethodName | None = None,
    seed: Seed | None = None,
    restart: Restart = False,
) -> int:
    """Train and evaluate all runs of compare.methods and compare.seeds.

    Args:
        method: only this method of compare.methods
        seed: only this seed of compare.seeds
    """
    return _stage("train", values, out, method, seed, restart=restart)


def stage_compare(*, values: Values = Values(), out: Results = Path("artifacts")) -> int:
    """Write the table, figures and page of these runs."""
    return _stage("compare", values, out)


def stage_paper(
    table: str,
    column: str,
    /,
    *,
    assignments: Assignments = (),
    out: Results = Path("partitions/paper"),
    common: Common = Common(),
) -> int:
    """Divide images among clients as a column of a paper's table says.

    Args:
        table: see 'protofl paper list'
        column: see 'protofl paper show ID'
        assignments: set a value, such as data.root=DIR; repeatable
    """
    from pipelines.stages.paper import paper_partitions
    from pipelines.stages.partition import partition_table

    for seed, partition in paper_partitions(table, column, assignments, out).items():
        print("\n".join([f"seed {seed}", *partition_table(partition)]))
    return 0


def _stage(
    name: str, values: Values, out: Path, method: str | None = None, seed: int | None = None, *, restart: bool = False
) -> int:
    """Run one stage of `dvc.yaml` without Prefect.

    DVC records parameters and code at the end of a stage as the inputs of its results, so neither may change meanwhile.
    """
    from flcore.core.loaded_code import EditedError, read_sources, refuse_edited
    from pipelines.plan.files import DEFAULT_FILE
    from pipelines.stages import commands

    params = values.params or DEFAULT_FILE

    def inputs() -> tuple[bytes | None, Mapping[str, bytes]]:
        return params.read_bytes() if params.is_file() else None, read_sources(_PACKAGE)

    before = inputs()
    raw = values.read({}, without_effect={"seed": "the seeds come from compare.seeds"}, method=method)
    commands.stage(name, raw, out, method, seed, restart=restart)
    refuse_edited()
    if inputs() != before:
        raise EditedError.of(f"{params} or a file of {_PACKAGE.name}")
    return 0
