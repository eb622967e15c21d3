"""``protofl paper run``: run a table's comparisons in turn and update its page after each."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flcore.core.errors import ConfigError, DataError, RunError
from flcore.experiment.run_folder import RunFiles, read_run_config
from pipelines.execution.bodies import RUNS, comparison
from pipelines.execution.one_run import placed
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import FailedRunsError, Outcome
from pipelines.papers.catalogue import name_at
from pipelines.papers.plan import Setting, TablePlan, plan, told_length
from pipelines.papers.results import TableResults, paper_tables, results, write
from pipelines.papers.runs import table_file
from pipelines.papers.verdicts.judged import verdicts
from pipelines.plan.comparison import comparison_plan
from pipelines.plan.spec import ExperimentPlan, RunSpec
from pipelines.reporting.formats import plural
from pipelines.reporting.tables import print_tables
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs
from pipelines.runs.ownership import claim_folder
from pipelines.runs.standard_error import console


def default_folder(id: str, rounds_scale: float) -> Path:
    """Return the default folder of a table at a budget."""
    return Path("runs/papers") / name_at(id, rounds_scale)


def folder_of(planned: TablePlan) -> Path:
    """Return the default folder of a plan's table."""
    return default_folder(planned.table.id, planned.asked.rounds_scale)


def run_table(planned: TablePlan, out: Path, operation: Operation, *, restart: bool = False) -> Outcome:
    """Run the settings of a plan; reuse finished runs, also from earlier commands in the folder.

    A failed setting does not stop the others.

    Args:
        planned: the table's plan. out: its folder. operation: how to run.
        restart: discard unusable checkpoints and damaged results.

    Raises:
        ConfigError: nothing can be run as requested, or the folder contains something else, such as another budget.
        DataError: data are missing for all cells, or a file of the folder is damaged.
        RunError: nothing can be run for other or several reasons, or every setting failed.
    """
    if not planned.settings:
        raise planned.nothing_to_run()
    claim_folder("paper table", out, [columns[0].key for columns in planned.table.settings()])
    _refuse_other_table(planned, out)
    there = {
        setting.name: sum(_has_finished(run, out / setting.name) for run in setting.plan.runs)
        for setting in planned.settings
    }
    operation.watcher.say(f"{planned.table.id}: {told_length(planned, there)}")
    failed: dict[str, str] = {}
    carried_out: list[str] = []
    store = None
    for number, setting in enumerate(planned.settings, 1):
        titles = ", ".join(column.title for column in setting.columns)
        operation.watcher.say(f"{planned.table.id}: {titles} (setting {number} of {len(planned.settings)})")
        whole = replace(operation, wait=True)  # the table is read from what the follower writes
        home = out / setting.name
        try:
            outcome = _carry_out(planned, setting, home, whole, restart)
        except RunError as error:
            failed[titles] = str(error)
            operation.watcher.say(f"{titles} failed: {error}")
        else:
            store = outcome.store
            carried_out.append(setting.name)
        _write(results(planned, out, carried_out), out)
    if len(failed) == len(planned.settings):
        first = next(iter(failed.values()))
        raise FailedRunsError(f"{planned.table.id}: every setting failed; the first: {first}")
    found = results(planned, out, carried_out)
    page = _write(found, out)
    text = io.StringIO()
    width, terminal = operation.console["width"], operation.console["terminal"]
    said = verdicts(found)
    # Only what was measured on a terminal; the page has the other printed figures.
    shown = [*paper_tables(found, measured=True), *([said] if said else [])]
    print_tables(shown, console(file=text, width=width, force_terminal=terminal))
    markdown = (out / "table.md").read_text(encoding="utf-8")
    return Outcome(out, page, store, table=text.getvalue(), markdown=markdown, failed={**found.failed, **failed})


def _refuse_other_table(planned: TablePlan, out: Path) -> None:
    """Refuse a folder that contains another table, or the same table with other rounds."""
    if not (out / "table.json").exists():
        return
    there, scale = table_file(out), planned.asked.rounds_scale
    if there.id != planned.table.id:
        raise ConfigError(f"{out}: holds {there.id}, not {planned.table.id}; choose another --out")
    if there.rounds_scale != scale:
        raise ConfigError(
            f"{out}: holds the table at {there.rounds_scale:g} of its rounds, not {scale:g}; choose another --out"
        )


def _carry_out(planned: TablePlan, setting: Setting, home: Path, operation: Operation, restart: bool) -> Outcome:
    """Compare a setting's runs, and those that other commands have finished there.

    Another command may run a part of the table in the same folder, so look again after writing; but not after failed
    runs, which would be retried.
    """
    outcome, compared = None, 0
    while True:
        whole, left_out = _with_finished_runs(planned, setting, home)
        if outcome is not None and (outcome.failed or len(whole.runs) == compared):
            return outcome
        if outcome is None and left_out:
            how = "with" if planned.asked.partition_seeds is None else "without"
            operation.watcher.say(
                f"{setting.name}: {plural(left_out, 'run')} of an earlier command {how} --partition-seeds cannot be "
                "put together with these; its options bring them back to the table"
            )
        compared = len(whole.runs)
        outcome = comparison(whole, home, operation, {"name": setting.name}, restart=restart)


def _with_finished_runs(planned: TablePlan, setting: Setting, home: Path) -> tuple[ExperimentPlan, int]:
    """Return a setting's plan extended by finished runs of other rows, seeds and partitions.

    Also return the number of finished runs that are not comparable with these.
    """
    asked, there = planned.asked, _finished_pairs(home)
    if not there:
        return setting.plan, 0
    draws = asked.partition_seeds
    if draws is not None:  # None: each run has the partition that the table defines
        draws = tuple(sorted({*draws, *(draw for draw, _ in there if draw is not None)}))
    seeds = tuple(sorted({*asked.seeds, *(seed for _, seed in there)}))
    columns = [column.key for column in setting.columns]
    wider = replace(asked, rows=None, columns=columns, max_hours=None, seeds=seeds, partition_seeds=draws)
    known = {(run.name, run.config.seed, run.draw) for run in setting.plan.runs}
    runs = [
        run
        for whole in plan(planned.table, wider, look_at_data=False).settings
        for run in comparison_plan(whole.parameters).runs
        if (run.name, run.config.seed, run.draw) in known or _has_finished(run, home)
    ]
    names = {run.name for run in runs}
    in_order = replace(wider, rows=[row.key for row in planned.table.rows if row.key in names])
    taken = {run.config.to_mapping()["partition"]["seed"] for run in runs}
    whole_table = comparison_plan(plan(planned.table, in_order, look_at_data=False).settings[0].parameters)
    return whole_table.with_runs(runs), sum(draw not in taken for draw, _ in there)


def _finished_pairs(home: Path) -> list[tuple[int | None, int]]:
    """Return the partition seed and seed of each finished run in a setting's folder."""
    pairs = []
    for folder in sorted((home / RUNS).glob("*")):
        if RunFiles(folder).metrics.exists():
            with suppress(DataError):  # a damaged run is reported when it is requested again
                config = read_run_config(folder)["config"]
                pairs.append((config["partition"]["seed"], config["seed"]))
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


def _write(found: TableResults, out: Path) -> Path:
    from pipelines.papers.drawings import sections  # matplotlib, which takes a second to import

    return write(found, out, sections(found), verdicts(found))
