"""``protofl paper run``: run a table's comparisons in turn and update its page after each."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flcore.core.errors import ConfigError, DataError, RunError
from pipelines.execution.bodies import RUNS, comparison
from pipelines.execution.one_run import placed
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import FailedRunsError, Outcome
from pipelines.papers.catalogue import name_at
from pipelines.papers.plan import Setting, TablePlan, estimated_duration, plan_table, refused_by_reason
from pipelines.papers.results import paper_tables, results, write
from pipelines.papers.runs import table_file
from pipelines.papers.verdicts.judge import verdict_table
from pipelines.plan.spec import ExperimentPlan, RunSpec
from pipelines.reporting.formats import plural
from pipelines.reporting.tables import print_tables
from pipelines.runs.cache import Cache
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs
from pipelines.runs.ownership import claim_folder
from pipelines.runs.standard_error import console


def folder_of(planned: TablePlan) -> Path:
    """Return the default folder of a plan's table."""
    return Path("runs/papers") / name_at(planned.table.id, planned.selection.rounds_scale)


def run_table(planned: TablePlan, out: Path, operation: Operation) -> Outcome:
    """Run the settings of a plan; reuse finished runs, also from earlier commands in the folder ``out``.

    A failed setting does not stop the others.

    Raises:
        ConfigError: nothing can be run as requested, or the folder contains something else, such as another budget.
        DataError: data are missing for all cells, or a file of the folder is damaged.
        RunError: nothing can be run for other or several reasons, or every setting failed.
    """
    if not planned.settings:
        raise planned.nothing_to_run()
    claim_folder("paper table", out, [columns[0].key for columns in planned.table.settings()])
    _refuse_other_table(planned, out)
    finished = {
        setting.name: sum(_has_finished(run, out / setting.name) for run in setting.plan.runs)
        for setting in planned.settings
    }
    operation.watcher.say(f"{planned.table.id}: {estimated_duration(planned, finished)}")
    for reason, where in refused_by_reason(planned).items():
        operation.watcher.say(f"not run here: {where}: {reason}")
    failed: dict[str, str] = {}
    done: list[str] = []
    store = None
    for number, setting in enumerate(planned.settings, 1):
        titles = ", ".join(column.title for column in setting.columns)
        operation.watcher.say(f"{planned.table.id}: {titles} (setting {number} of {len(planned.settings)})")
        whole = replace(operation, wait=True)  # the table is read from what the follower writes
        home = out / setting.name
        try:
            outcome = _compare(planned, setting, home, whole)
        except RunError as error:
            failed[titles] = str(error)
            operation.watcher.say(f"{titles} failed: {error}")
        else:
            store = outcome.store
            done.append(setting.name)
        table_results = results(planned, out, done)
        from pipelines.papers.drawings import sections  # matplotlib, which takes a second to import

        page = write(table_results, out, sections(table_results), verdict_table(table_results))
    if len(failed) == len(planned.settings):
        first = next(iter(failed.values()))
        raise FailedRunsError(f"{planned.table.id}: every setting failed; the first: {first}")
    text, screen = io.StringIO(), operation.console
    judged = verdict_table(table_results)
    # Only what was measured on a terminal; the page has the other printed figures.
    shown = [*paper_tables(table_results, measured=True), *([judged] if judged else [])]
    print_tables(shown, console(file=text, width=screen["width"], force_terminal=screen["terminal"]))
    markdown = (out / "table.md").read_text(encoding="utf-8")
    return Outcome(
        out, page, store, table=text.getvalue(), markdown=markdown, failed={**table_results.failed, **failed}
    )


def _refuse_other_table(planned: TablePlan, out: Path) -> None:
    """Refuse a folder that contains another table, or the same table with other rounds."""
    if not (out / "table.json").exists():
        return
    existing, scale = table_file(out), planned.selection.rounds_scale
    if existing.id != planned.table.id:
        raise ConfigError(f"{out}: holds {existing.id}, not {planned.table.id}; choose another --out")
    if existing.rounds_scale != scale:
        raise ConfigError(
            f"{out}: holds the table at {existing.rounds_scale:g} of its rounds, not {scale:g}; choose another --out"
        )


def _compare(planned: TablePlan, setting: Setting, home: Path, operation: Operation) -> Outcome:
    """Compare a setting's runs, and those that other commands have finished existing.

    Another command may run a part of the table in the same folder, so look again after writing; but not after failed
    runs, which would be retried.
    """
    outcome, compared = None, 0
    while True:
        whole, left_out = _with_finished_runs(planned, setting, home)
        if outcome is not None and (outcome.failed or len(whole.runs) == compared):
            return outcome
        if outcome is None and left_out:
            how = "with" if planned.selection.partition_seeds is None else "without"
            operation.watcher.say(
                f"{setting.name}: {plural(left_out, 'run')} of an earlier command {how} --partition-seeds cannot be "
                "put together with these; its options bring them back to the table"
            )
        compared = len(whole.runs)
        outcome = comparison(whole, home, operation, {"name": setting.name})


def _with_finished_runs(planned: TablePlan, setting: Setting, home: Path) -> tuple[ExperimentPlan, int]:
    """Return a setting's plan with finished runs of other rows, seeds and partitions.

    Also return the number of finished runs that are not comparable with these.
    """
    selection, finished = planned.selection, _finished_pairs(home)
    if not finished:
        return setting.plan, 0
    partition_seeds = selection.partition_seeds
    if partition_seeds is not None:  # None: each run has the partition that the table defines
        partition_seeds = tuple(sorted({*partition_seeds, *(seed for seed, _ in finished if seed is not None)}))
    seeds = tuple(sorted({*selection.seeds, *(seed for _, seed in finished)}))
    columns = [column.key for column in setting.columns]
    wider = replace(selection, rows=None, columns=columns, max_hours=None, seeds=seeds, partition_seeds=partition_seeds)
    requested = {(run.name, run.config.seed, run.draw) for run in setting.plan.runs}
    runs = [
        run
        for whole in plan_table(planned.table, wider, with_data=False).settings
        for run in whole.plan.runs
        if (run.name, run.config.seed, run.draw) in requested or _has_finished(run, home)
    ]
    names = {run.name for run in runs}
    in_order = replace(wider, rows=[row.key for row in planned.table.rows if row.key in names])
    taken = {run.config.to_mapping()["partition"]["seed"] for run in runs}
    whole_plan = plan_table(planned.table, in_order, with_data=False).settings[0].plan
    return whole_plan.with_runs(runs), sum(seed not in taken for seed, _ in finished)


def _finished_pairs(home: Path) -> list[tuple[int | None, int]]:
    """Return the partition seed and seed of each finished run in a setting's folder."""
    pairs = []
    for folder in sorted((home / RUNS).glob("*")):
        run = RunFolder(folder)
        with suppress(DataError):  # a damaged run is reported when it is requested again
            if run.is_finished:
                pairs.append((run.config["partition"]["seed"], run.config["seed"]))
    return pairs


def _has_finished(run: RunSpec, home: Path) -> bool:
    cache = Cache.here()
    if not any((home / RUNS).glob(f"{run.config.method.name}-s{run.config.seed}-*")):
        return False
    prepared = cache.prepared(run.config)
    inputs = Inputs(prepared, cache.partition(run.config, prepared))
    try:
        return placed(run.config, inputs, home / RUNS).is_finished
    except DataError:  # damaged: the comparison reports or retrains it
        return True
