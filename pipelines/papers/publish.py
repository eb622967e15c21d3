"""Choose the finished runs of a table to keep (:mod:`pipelines.papers.published`), and find outdated kept runs.

Runs that cannot be repeated are refused: from uncommitted code, with other values than the table's, or with other
figures than when they were kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flcore.config.schema import Config
from flcore.config.stored import as_decided, without_removed
from flcore.core.errors import ConfigError, RunError
from pipelines.papers.catalogue import PaperTable, table_named
from pipelines.papers.caveats import IMAGE_FILES
from pipelines.papers.overrides import key_of
from pipelines.papers.plan import RunKey, TablePlan, TableSelection, plan_table, run_key
from pipelines.papers.published import PUBLISHED_DIR, PublishedRun, PublishedTable, published_so_far
from pipelines.papers.runs import INTERRUPTED, MeasuredRun, runs_of, table_file
from pipelines.reporting.formats import plural
from pipelines.runs.compared import flatten
from pipelines.runs.layout import write_text
from pipelines.runs.provenance import processor_of
from pipelines.runs.record import pair_name

_PLAIN = {"stack": False, "compile": "none"}
"""Values that ``auto`` in a table means; a kept run that is stacked or compiled records it."""
_ALIKE = 1e-9
"""Tolerance for equal figures; they are stored with twelve decimals."""


def publish(out: Path, into: Path = PUBLISHED_DIR, *, again: bool = False) -> str:
    """Keep the finished runs of a table and the reasons of failed ones; return a summary.

    Runs with outdated settings are replaced; all others stay. ``out`` is the table's folder, ``into`` that of the file;
    ``again`` replaces runs that now have other figures or another engine.

    Raises:
        RunError: there is no finished run; or one is from uncommitted code, has other values than the table's, other
            figures or another engine than before, or other images.
        DataError: a file is damaged.
    """
    file = table_file(out)
    selection, table = file.selection, table_named(file.id)
    measured, failed = runs_of(table, out)
    new = PublishedTable(table, selection.rounds_scale, tuple(_kept(table, selection, run) for run in measured))
    if not new.runs:
        raise RunError(f"{out}: no run of it has finished")
    path, known = new.path(into), published_so_far(table, selection.rounds_scale, into)
    before, of_folder = {run.key: run for run in known.runs}, {run.key for run in new.runs}
    stale = {run.key for run in outdated(known)} if before else set()
    runs_by_key = dict(before)
    for run in new.runs:
        was = before.get(run.key)
        if was is not None and was.settings == run.settings:
            # Rounds to a target, if only an earlier folder had the run that defines it.
            due = _figures_due(table, run) - run.figures.keys()
            run = replace(run, figures={**{key: was.figures[key] for key in due & was.figures.keys()}, **run.figures})
        if was is None or run.key in stale or again:
            runs_by_key[run.key] = run
        else:
            _same(table, path, was, run)
            if not set(run.figures) <= set(was.figures):  # the table has gained a column
                runs_by_key[run.key] = run
    runs = tuple(runs_by_key[key] for key in sorted(runs_by_key))
    _check_divisions(path, [run for run in runs if run != before.get(run.key) or run.key not in stale])
    lost = {one.key: one for one in (*known.failed, *failed) if one.reason != INTERRUPTED}
    failed_runs = tuple(lost[key] for key in sorted(lost.keys() - runs_by_key.keys()))
    write_text(path, replace(new, runs=runs, failed=failed_runs).text())
    changed = sum(before.get(run.key) != run for run in runs)
    suffix = f"; {plural(len(failed_runs), 'other')} failed" if failed_runs else ""
    no_target = [run for run in runs if run.key in of_folder and _figures_due(table, run) - run.figures.keys()]
    if no_target:
        reason = f"{table.row(table.baseline).title} of the same seed and division is not in {out}"
        suffix += f"; {plural(len(no_target), 'run')} without rounds to the target: {reason}"
    return f"{path}: {plural(len(runs), 'run')}, {changed} of them new{suffix}"


def _figures_due(table: PaperTable, run: PublishedRun) -> set[str]:
    """Return the columns with a figure of a run, once the run that defines a target is there."""
    columns = next(columns for columns in table.settings() if columns[0].key == run.setting)
    return {column.key for column in columns if table.why_missing(table.row(run.row), column) is None}


def _check_divisions(path: Path, runs: Sequence[PublishedRun]) -> None:
    """Refuse runs of a setting with other images, or with two partitions for one seed."""
    first: dict[tuple[str, int], PublishedRun] = {}
    images: dict[str, PublishedRun] = {}
    for run in runs:
        shown = images.setdefault(run.setting, run)
        if shown.data != run.data:
            raise RunError(
                f"{path}: {run.row} on {run.setting}, {pair_name(run.pair)}: is of other images (data fingerprint "
                f"{run.data[:12]}) than {shown.row}, {pair_name(shown.pair)} ({shown.data[:12]}); run both on the same"
            )
        other = first.setdefault((run.setting, run.division), run)
        if other.partition != run.partition:
            raise RunError(
                f"{path}: {run.row} on {run.setting}, {pair_name(run.pair)}: its clients do not hold what those of "
                f"{other.row}, {pair_name(other.pair)}, hold; run both on the same images"
            )


def _kept(table: PaperTable, selection: TableSelection, run: MeasuredRun) -> PublishedRun:
    environment, metrics = run.folder.environment, run.folder.metrics
    commit = environment.get("code_version")
    if not commit or commit.endswith("-dirty"):
        raise RunError(
            f"{run.folder.directory.name}: was made by code that is in no commit, and could not be made again; "
            "run the table from a clean checkout"
        )
    alone = replace(selection, rows=(run.row,), seeds=(run.seed,), partition_seeds=(run.division,))
    planned = _planned(table, run.setting, alone)
    settings = _current_settings(run.folder.config, run.folder.identity)
    current = flatten(settings)
    planned_settings = _without_seeds(planned[run.key].identity()) if planned else {}
    usual = flatten(as_decided(planned_settings, {"engine": _PLAIN})) if planned else {}
    values = flatten(run.folder.config)
    differing = sorted(key for key in current.keys() | usual.keys() if current.get(key) != usual.get(key))
    foreign = [key for key in differing if not _may_differ(key, values.get(key))]
    if foreign:
        differences = ", ".join([*(f"{key}={values.get(key)}" for key in foreign[:3]), *["..."] * (len(foreign) > 3)])
        raise RunError(
            f"{run.row} on {run.setting}, {pair_name(run.pair)}: was made with {differences}, which is not the table's "
            "setting; run it without (engine.*, data.root and data.name=imagefolder, images as they are, may be set)"
        )
    return PublishedRun(
        *run.key,
        {key: None if value is None else round(value, 12) for key, value in run.figures.items()},
        settings,
        {key: values[key] for key in differing if key in values},
        metrics["data_fingerprint"],
        metrics["partition_fingerprint"],
        commit,
        (processor_of(environment) or "unknown") if environment["device"] == "cpu" else environment["device"],
        environment["versions"]["torch"],
    )


def _may_differ(key: str, value: object) -> bool:
    """Return whether a run may have this value instead of the table's."""
    return key.startswith("engine.") or (key in IMAGE_FILES and value == IMAGE_FILES[key])


def _current_settings(settings: Mapping[str, Any], identity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return settings in the form of the current code, without the seeds of run and partition, stored separately.

    A key added since has its default, also where a preset would set it today. If the current code cannot read the
    settings, use the run's own ``identity``, or else the stored settings.
    """
    known = without_removed(settings)
    preset = {"preset": known["method"]["preset"]} if "preset" in known["method"] else {}
    by_value = {**known, "method": {**known["method"], **dict.fromkeys(preset, "default")}}
    try:
        current = Config.from_mapping(by_value).identity()
    except ConfigError:
        return _without_seeds(settings if identity is None else identity)
    return _without_seeds({**current, "method": {**current["method"], **preset}})


def _without_seeds(identity: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in identity.items() if key != "seed"}
    return settings | {"partition": {key: value for key, value in identity["partition"].items() if key != "seed"}}


def _same(table: PaperTable, path: Path, before: PublishedRun, now: PublishedRun) -> None:
    """Refuse another engine or other figures than when the run was kept; seconds and joules always differ."""
    if _current_settings(before.settings) != now.settings:
        had, has = (", ".join(run.assignments) or "the table's own values" for run in (before, now))
        raise RunError(
            f"{path}: {now.row} on {now.setting}, {pair_name(now.pair)}: was kept with {had}, and was found now with "
            f"{has}; --again keeps what was found now"
        )
    for key, value in now.figures.items():
        was = before.figures.get(key, value)
        alike = was == value or (was is not None and value is not None and abs(was - value) < _ALIKE)
        if not alike and not table.column(key).metric.startswith("timing."):
            raise RunError(
                f"{path}: {now.row} on {key}, {pair_name(now.pair)}: {was} was kept (commit {before.commit[:12]}, "
                f"{before.processor}), {value} was found now ({now.commit[:12]}, {now.processor}); "
                "--again keeps what was found now"
            )


def outdated(published: PublishedTable) -> list[PublishedRun]:
    """Return the runs that the table no longer defines, or defines with other settings."""
    groups: dict[tuple[str, tuple[str, ...]], list[PublishedRun]] = {}
    for run in published.runs:
        groups.setdefault((run.setting, run.assignments), []).append(run)
    outdated_runs = []
    for (setting, assignments), runs in groups.items():
        planned = _planned(published.table, setting, replace(published.selection(runs), assignments=assignments))
        wanted = {key: _without_seeds(config.identity()) for key, config in planned.items()}
        for run in runs:
            settings = _current_settings(run.settings)
            if run.key not in wanted or as_decided(wanted[run.key], settings) != settings:
                outdated_runs.append(run)
    return outdated_runs


def published_keys(plan: TablePlan, published: PublishedTable) -> set[RunKey]:
    """Return the runs of a plan that are kept with its settings, or have failed before."""
    settings = {run.key: _current_settings(run.settings) for run in published.runs}
    failed = {one.key for one in published.failed}
    keys = set[RunKey]()
    for setting in plan.settings:
        overrides = {key_of(assignment) for assignment in setting.overrides}
        for run in setting.plan.runs:
            key = run_key(setting, run)
            values = flatten(as_decided(_without_seeds(run.config.identity()), settings.get(key, {})))
            if key in failed and all(_may_differ(name, values.get(name)) for name in overrides):
                keys.add(key)
            if key in settings:
                was = flatten(settings[key])
                images = {name for name in IMAGE_FILES if name not in overrides}
                differing = {name for name in values.keys() | was.keys() if values.get(name) != was.get(name)} - images
                if all(_may_differ(name, values.get(name)) for name in differing):
                    keys.add(key)
    return keys


def _planned(table: PaperTable, setting: str, selection: TableSelection) -> dict[RunKey, Config]:
    """Return the configuration of each run of a setting, by key; empty if it cannot be configured."""
    try:
        settings = plan_table(table, replace(selection, columns=(setting,)), with_data=False).settings
    except ConfigError:  # the table no longer has such a row or column
        return {}
    return {run_key(each, run): run.config for each in settings for run in each.plan.runs}
