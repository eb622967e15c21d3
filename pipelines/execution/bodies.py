"""One experiment, and comparisons of many runs, for commands and flows.

A step may be a plain call or a task (:class:`Operation`); both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flcore.config.schema import Config
from flcore.core.errors import DataError, ProtoflError
from flcore.core.text import printable
from flcore.engine.energy import machine_meter
from flcore.engine.pool.task import StoppedError
from flcore.engine.rounds import Observers
from flcore.experiment.experiment import refuse_missing
from flcore.experiment.run_folder import RunFiles, refuse_other_run
from flcore.io.locks import run_lock
from pipelines.execution.admission import most_at_once
from pipelines.execution.one_run import PlacedRun, carry_out, fetch, placed
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import FailedRunsError, Outcome
from pipelines.execution.run_pool import RunPool
from pipelines.execution.side_by_side import side_by_side
from pipelines.plan.comparison import heard_in_part
from pipelines.plan.spec import ExperimentPlan, RunSpec
from pipelines.runs import analyses
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs
from pipelines.runs.ownership import claim_folder
from pipelines.runs.standard_error import in_commands

RUNS = Path("runs")
"""Default folder of runs."""

_WRITTEN = {"comparison": ("report.html", "comparison.md"), "sweep": ("sweep.png", "sweep.md")}
"""The page, and the table as Markdown, by kind."""


# ---- one run -----------------------------------------------------------------------------------------------------


def experiment(config: Config, out: Path | None, operation: Operation, *, inputs: Inputs | None = None) -> Outcome:
    """Prepare, divide, train, evaluate, report and log one configuration.

    Args:
        out: its folder; None: ``runs/<method>-s<seed>-<hash, 8>``.
        inputs: prepared and divided data; None: prepare and divide them.

    Raises:
        ConfigError: it cannot be run, or the folder has other content. DataError: data are missing or damaged.
        RunError: training failed.
    """
    if out is not None:
        claim_folder("run", out)
        refuse_other_run(config, out, by_places=False)
    cache = Cache.here()
    if inputs is None:
        inputs = _inputs(config, {}, cache, operation)
    run = placed(config, inputs, RUNS, directory=out, alone=True, restart=operation.restart)
    was_here = RunFiles(run.directory).history.exists()
    is_done = fetch(run, cache)
    if is_done and not was_here:  # a test of determinism must not compare a copy
        operation.watcher.say(f"{run.directory}: a copy of this run, which has finished before in another folder")
    if not is_done:
        _train(run, cache, operation)
    elif analyses.left(run.config, run.directory):
        carry_out(run, cache, orchestrator=operation.steps)
    operation.follower.finish(run.directory)
    if not operation.wait:
        return Outcome(run.directory, was_finished=is_done)
    found = operation.steps.call("report", operation.follower.wait)
    return Outcome(run.directory, RunFiles(run.directory).report, found.get("store"), is_done)


def _train(run: PlacedRun, cache: Cache, operation: Operation) -> None:
    watcher = operation.watcher
    operation.follower.follow(run.directory)
    observers = Observers(
        partial(watcher.round, run.label),
        meters={"joules": machine_meter(run.config.engine.device)},
        on_start=partial(watcher.run, run.label, run.config.federation.rounds),
    )
    try:
        carry_out(run, cache, orchestrator=operation.steps, observers=observers)
    except ProtoflError as error:
        operation.follower.stop(run.directory, in_commands(str(error)))
        raise
    finally:
        watcher.run_ended(run.label)


def _inputs(config: Config, prepared: dict[str, Path], cache: Cache, operation: Operation) -> Inputs:
    """Return the inputs of a run; ``prepared`` has the folders of data by their section, and gets this run's."""
    refuse_missing(config)
    data = repr(config.to_mapping()["data"])
    if data not in prepared:
        operation.watcher.step("prepare")
        prepared[data] = operation.steps.call("prepare-data", cache.prepared, config)
    operation.watcher.step(f"partition (seed {config.partition_seed})")
    return Inputs(prepared[data], operation.steps.call("partition-data", cache.partition, config, prepared[data]))


# ---- many runs ---------------------------------------------------------------------------------------------------


def comparison(plan: ExperimentPlan, out: Path, operation: Operation, facts: Mapping[str, Any]) -> Outcome:
    """Train runs, as many at once as the machine allows, and compare them.

    Finished runs are reused, from here or elsewhere; failed ones are reported and do not stop the others.

    Args:
        out: folder of tables, figures, a page and ``runs/<method>-s<seed>-<hash, 8>/``.
        facts: further JSON values that the follower needs for this kind.

    Raises:
        ConfigError: the folder has other content.
        RunError: no run has finished, or another command is using the sweep's folder.
    """
    warning = heard_in_part(plan.runs)
    if warning is not None:
        operation.watcher.say(warning)
    kind = plan.kind
    claim_folder(kind, out)
    # Commands for parts of a paper's table share a comparison's folder; compare_methods locks its own.
    with run_lock(out) if kind == "sweep" else nullcontext():
        runs, failed = carry_out_all(plan.runs, out / "runs", operation)
        facts = {**facts, "rows": [run.row for run in plan.runs], "draws": [run.draw for run in plan.runs]}
        finished = [run.directory for run in runs if run.label not in failed]
        if not finished:
            first = Outcome(out, failed=failed).first_failure
            raise FailedRunsError(f"all {len(failed)} runs failed; the first of them, {first}")
        facts |= {**operation.console, "command": operation.command, "failed": dict(failed)}
        operation.follower.compare(kind, plan.parameters, [run.directory for run in runs], out, **facts)
        if not operation.wait:
            return Outcome(out, failed=failed)
        found = operation.steps.call("compare", operation.follower.wait)
        page, table = (out / name for name in _WRITTEN[kind])
        markdown = table.read_text(encoding="utf-8") if table.exists() else ""
        return Outcome(out, page, found.get("store"), table=found.get("table", ""), markdown=markdown, failed=failed)


def carry_out_all(
    planned: Sequence[RunSpec], home: Path, operation: Operation
) -> tuple[list[PlacedRun], dict[str, str]]:
    """Train runs in parallel; return them in the given order, and the reasons of failures by label."""
    inputs = inputs_of_runs(planned, operation)
    runs = [
        placed(run.config, own, home, label=run.label, restart=operation.restart)
        for run, own in zip(planned, inputs, strict=True)
    ]
    return runs, carry_out_placed(runs, operation)


def carry_out_placed(runs: Sequence[PlacedRun], operation: Operation) -> dict[str, str]:
    """Train runs with existing data in parallel; return the reasons of failures by label."""
    cache, watcher, follower = Cache.here(), operation.watcher, operation.follower
    shared = runs  # two rows may share a run: tuning may have found the given values
    runs = list({run.directory: run for run in reversed(runs)}.values())[::-1]
    failed: dict[str, str] = {}

    def is_there(run: PlacedRun) -> bool:
        try:
            return fetch(run, cache)
        except DataError as error:  # damaged: the others need not wait; the store has the undamaged results
            failed[run.label] = printable(in_commands(str(error)))
            watcher.say(f"{run.label} failed: {error}")
            return False

    there = [run for run in runs if is_there(run)]
    waiting = [run for run in runs if run not in there and run.label not in failed]
    watcher.runs(len(runs), len(runs) - len(waiting))

    def begun(run: PlacedRun) -> None:
        follower.follow(run.directory)

    def ended(run: PlacedRun, error: ProtoflError | None) -> None:
        if error is None:
            follower.finish(run.directory)
        elif isinstance(error, StoppedError):  # the follower marks unfinished runs
            failed[run.label] = "interrupted"
        else:
            failed[run.label] = printable(in_commands(str(error)))
            watcher.say(f"{run.label} failed: {error}")
            follower.stop(run.directory, in_commands(str(error)))

    for run in there:
        if not RunFiles(run.directory).report.exists():
            follower.finish(run.directory)
    if waiting:
        at_once = most_at_once([run.config for run in waiting])
        with RunPool(at_once, watcher) as pool:
            side_by_side(pool, at_once, operation, begun, ended, runs=waiting)
    reasons = {run.directory: failed[run.label] for run in runs if run.label in failed}
    return {run.label: reasons[run.directory] for run in shared if run.directory in reasons}


def inputs_of_runs(planned: Sequence[RunSpec], operation: Operation) -> list[Inputs]:
    """Return the inputs of runs, in their order; prepare each data set and make each partition once."""
    cache, prepared, known = Cache.here(), dict[str, Path](), dict[str, Inputs]()
    keys = []
    for run in planned:
        mapping = run.config.to_mapping()
        keys.append(repr((mapping["data"], mapping["partition"], run.config.partition_seed)))
        if keys[-1] not in known:
            known[keys[-1]] = _inputs(run.config, prepared, cache, operation)
    return [known[key] for key in keys]
