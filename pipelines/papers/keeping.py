"""Choose the finished runs of a table to keep (:mod:`pipelines.papers.kept`), and find outdated kept runs.

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
from flcore.experiment.run_folder import RunFiles, read_run_config
from pipelines.papers.assigned import key_of
from pipelines.papers.catalogue import PaperTable, table_named
from pipelines.papers.kept import HERE, KeptRun, KeptTable, kept_so_far
from pipelines.papers.plan import Asked, Place, TablePlan, place_of, plan
from pipelines.papers.runs import INTERRUPTED, MeasuredRun, runs_of, table_file
from pipelines.plan.comparison import comparison_plan
from pipelines.reporting.formats import plural
from pipelines.runs.compared import flatten
from pipelines.runs.layout import read_json, write_text
from pipelines.runs.provenance import processor_of
from pipelines.runs.record import pair_name

_MAY_BE_SET = {"data.name": "imagefolder", "data.image_size": "null"}
"""Keys that may differ from a table, like ``engine.*``, with the allowed value: its images in another form."""
_PLAIN = {"stack": False, "compile": "none"}
"""Values that ``auto`` in a table means; a kept run that is stacked or compiled records it."""
_ALIKE = 1e-9
"""Tolerance for equal figures; they are stored with twelve decimals."""


def keep(out: Path, into: Path = HERE, *, again: bool = False) -> str:
    """Keep the finished runs of a table and the reasons of failed ones; return a summary.

    Runs with outdated settings are replaced; all others stay.

    Args:
        out: the table's folder. into: folder of the file.
        again: replace runs that now have other figures or another engine.

    Raises:
        RunError: there is no finished run; or one is from uncommitted code, has other values than the table's, other
            figures or another engine than before, or other images.
        DataError: a file is damaged.
    """
    file = table_file(out)
    asked, table = file.asked, table_named(file.id)
    measured, failed = runs_of(table, out)
    new = KeptTable(table, asked.rounds_scale, tuple(_kept(table, asked, run) for run in measured))
    if not new.runs:
        raise RunError(f"{out}: no run of it has finished")
    path, known = new.path(into), kept_so_far(table, asked.rounds_scale, into)
    before = {run.place: run for run in known.runs}
    stale = {run.place for run in outdated(known)} if before else set()
    whole = dict(before)
    for run in new.runs:
        was = before.get(run.place)
        if was is None or run.place in stale or again:
            whole[run.place] = run
        else:
            _same(table, path, was, run)
            if not set(run.figures) <= set(was.figures):  # the table has gained a column
                whole[run.place] = run
    runs = tuple(whole[place] for place in sorted(whole))
    _check_divisions(path, [run for run in runs if run != before.get(run.place) or run.place not in stale])
    lost = {(one.setting, one.row, *one.pair): one for one in (*known.failed, *failed) if one.reason != INTERRUPTED}
    without = tuple(lost[place] for place in sorted(lost.keys() - whole.keys()))
    write_text(path, replace(new, runs=runs, failed=without).text())
    changed = sum(before.get(run.place) != run for run in runs)
    told = f"; {plural(len(without), 'other')} failed" if without else ""
    return f"{path}: {plural(len(runs), 'run')}, {changed} of them new{told}"


def _check_divisions(path: Path, runs: Sequence[KeptRun]) -> None:
    """Refuse runs of a setting with other images, or with two partitions for one seed."""
    first: dict[tuple[str, int], KeptRun] = {}
    images: dict[str, KeptRun] = {}
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


def _kept(table: PaperTable, asked: Asked, run: MeasuredRun) -> KeptRun:
    header = read_run_config(run.folder)
    made, metrics = header["environment"], read_json(RunFiles(run.folder).metrics)
    commit = made.get("code_version")
    if not commit or commit.endswith("-dirty"):
        raise RunError(
            f"{run.folder.name}: was made by code that is in no commit, and could not be made again; "
            "run the table from a clean checkout"
        )
    division, seed = run.pair
    alone = replace(asked, rows=(run.row,), seeds=(seed,), partition_seeds=(division,))
    planned = _planned(table, run.setting, alone)
    settings = _said_now(header["config"], header["identity"])
    own = flatten(settings)
    planned_settings = _without_seeds(planned[run.row, run.pair].identity()) if planned else {}
    usual = flatten(as_decided(planned_settings, {"engine": _PLAIN})) if planned else {}
    values = flatten(header["config"])
    differing = sorted(key for key in own.keys() | usual.keys() if own.get(key) != usual.get(key))
    foreign = [key for key in differing if not _may_differ(key, values.get(key))]
    if foreign:
        said = ", ".join(f"{key}={values.get(key)}" for key in foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise RunError(
            f"{run.row} on {run.setting}, {pair_name(run.pair)}: was made with {said}, which is not the table's "
            "setting; run it without (engine.*, data.root and data.name=imagefolder, images as they are, may be set)"
        )
    return KeptRun(
        run.setting,
        run.row,
        division,
        seed,
        {key: None if value is None else round(value, 12) for key, value in run.figures.items()},
        settings,
        {key: values[key] for key in differing if key in values},
        metrics["data_fingerprint"],
        metrics["partition_fingerprint"],
        commit,
        (processor_of(made) or "unknown") if made["device"] == "cpu" else made["device"],
        made["versions"]["torch"],
    )


def _may_differ(key: str, value: object) -> bool:
    """Return whether a run may have this value instead of the table's."""
    return key.startswith("engine.") or (key in _MAY_BE_SET and value == _MAY_BE_SET[key])


def _said_now(settings: Mapping[str, Any], identity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return settings in the form of the current code, without the seeds of run and partition, stored separately.

    A key added since has its default, which means the earlier behaviour. If the current code cannot read the settings,
    use the run's own ``identity``, or else the stored settings.
    """
    try:
        return _without_seeds(Config.from_mapping(without_removed(settings)).identity())
    except ConfigError:
        return _without_seeds(settings if identity is None else identity)


def _without_seeds(identity: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in identity.items() if key != "seed"}
    return settings | {"partition": {key: value for key, value in identity["partition"].items() if key != "seed"}}


def _same(table: PaperTable, path: Path, before: KeptRun, now: KeptRun) -> None:
    """Refuse another engine or other figures than when the run was kept; seconds and joules always differ."""
    if _said_now(before.settings) != now.settings:
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


def outdated(kept: KeptTable) -> list[KeptRun]:
    """Return the runs that the table no longer defines, or defines with other settings."""
    groups: dict[tuple[str, tuple[str, ...]], list[KeptRun]] = {}
    for run in kept.runs:
        groups.setdefault((run.setting, run.assignments), []).append(run)
    found = []
    for (setting, assignments), runs in groups.items():
        planned = _planned(kept.table, setting, replace(kept.asked(runs), assignments=assignments))
        wanted = {place: _without_seeds(config.identity()) for place, config in planned.items()}
        for run in runs:
            settings, place = _said_now(run.settings), (run.row, run.pair)
            if place not in wanted or as_decided(wanted[place], settings) != settings:
                found.append(run)
    return found


def kept_places(found: TablePlan, kept: KeptTable) -> set[Place]:
    """Return the runs of a plan that are kept with its settings, or have failed before."""
    settings = {run.place: _said_now(run.settings) for run in kept.runs}
    failed = {(one.setting, one.row, *one.pair) for one in kept.failed}
    places = set[Place]()
    for setting in found.settings:
        besides = {key_of(assignment) for assignment in setting.besides}
        for run in setting.plan.runs:
            place = place_of(setting, run)
            own = flatten(as_decided(_without_seeds(run.config.identity()), settings.get(place, {})))
            if place in failed and all(_may_differ(key, own.get(key)) for key in besides):
                places.add(place)
            if place in settings:
                was = flatten(settings[place])
                images = {key for key in _MAY_BE_SET if key not in besides}
                differing = {key for key in own.keys() | was.keys() if own.get(key) != was.get(key)} - images
                if all(_may_differ(key, own.get(key)) for key in differing):
                    places.add(place)
    return places


def _planned(table: PaperTable, setting: str, asked: Asked) -> dict[tuple[str, tuple[int, int]], Config]:
    """Return the configuration of a setting's runs by row, partition seed and seed; empty if it cannot be configured.

    ``asked`` names the partition seeds.
    """
    try:
        settings = plan(table, replace(asked, columns=(setting,)), look_at_data=False).settings
    except ConfigError:  # the table no longer has such a row or column
        return {}
    runs = comparison_plan(settings[0].parameters).runs if settings else ()
    return {(run.name, (run.config.partition_seed, run.config.seed)): run.config for run in runs}
