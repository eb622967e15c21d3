"""Figures that were measured, kept beside the code: one file per table and budget, one line per run.

The runs of a table are gigabytes, take hours, and lie on the machine that made them. What they say of it is a number
per column. ``protofl paper keep`` writes these down, so that a table can be finished on several machines, and so that
what this project says of the papers' claims can be read, and repeated, by whoever has nothing but its code.

Of each run it is kept which commit made it, on what kind of processor, and by their fingerprints on which data and
which division. And a digest of its settings: :func:`outdated` finds runs whose table asks for others by now. Of a run
that failed it is kept why, so that nobody takes the figures of those that did not for all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from flcore.config import Config
from flcore.errors import ConfigError, DataError, RunError
from flcore.run_folder import RunFiles, described
from pipelines.execution.bodies import comparison_runs
from pipelines.papers.catalogue import PaperTable, table_named
from pipelines.papers.plan import Asked, plan
from pipelines.papers.results import TableResults, assembled
from pipelines.papers.runs import INTERRUPTED, FailedRun, MeasuredRun, asked_of, runs_of
from pipelines.reporting.formats import plural
from pipelines.runs.compared import flatten
from pipelines.runs.layout import read_json, write_text
from pipelines.runs.provenance import processor_of
from pipelines.runs.record import pair_name

HERE = Path(str(files("pipelines.papers"))) / "measured"
"""What this project measured itself."""

_MAY_BE_SET = {"data.name": "imagefolder", "data.image_size": None}
"""Beside ``engine.*``, what may differ from a table's values, and as what: its images in another form."""
_ALIKE = 1e-9
"""Figures that differ by less are the same; they are kept with twelve decimals."""


@dataclass(frozen=True)
class KeptRun:
    """What a run says of a table, and which run that was.

    Attributes:
        setting: key of the first column that is read from it. row: its key.
        division: the seed that divided the data, whoever gave it: the table, a command, or the run. seed: of all else.
        figures: by key of the columns, in their units; None where the run has none.
        settings: digest of everything that can change a result but data and division.
        besides: what was set beside the table's own values, as dotted keys with text.
        data, partition: fingerprints.
        commit: of the code. processor: its class, or the device. torch: its version.
    """

    setting: str
    row: str
    division: int
    seed: int
    figures: Mapping[str, float | None]
    settings: str
    besides: Mapping[str, str]
    data: str
    partition: str
    commit: str
    processor: str
    torch: str

    @property
    def pair(self) -> tuple[int, int]:
        """Division and seed."""
        return self.division, self.seed

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Of which there is one run; files are in this order."""
        return self.setting, self.row, self.division, self.seed


@dataclass(frozen=True)
class KeptTable:
    """A file of kept runs: of which table, at which share of its rounds; ``failed`` are those without figures."""

    table: PaperTable
    rounds_scale: float
    runs: tuple[KeptRun, ...]
    failed: tuple[FailedRun, ...] = ()

    @property
    def name(self) -> str:
        """Of the file, without its ending; that of ``runs/papers/<name>`` too."""
        return self.table.id + ("" if self.rounds_scale == 1 else f"-x{self.rounds_scale:g}")

    def asked(self, runs: Sequence[KeptRun] | None = None) -> Asked:
        """What would measure these runs, or all."""
        of = self.runs if runs is None else runs
        draws = sorted({run.division for run in of})
        seeds = sorted({run.seed for run in of}) or [0]
        return Asked(seeds=tuple(seeds), partition_seeds=tuple(draws) or None, rounds_scale=self.rounds_scale)

    def results(self) -> TableResults:
        """The table, as far as it is kept."""
        found = plan(self.table, self.asked(), look_at_data=False)
        measured = (
            MeasuredRun(run.row, run.pair, run.figures, run.setting, Path(), run.partition) for run in self.runs
        )
        return assembled(found, measured, self.failed)


def kept_tables(folder: Path = HERE) -> list[KeptTable]:
    """All files of kept runs, by name.

    Raises:
        DataError: there is no such folder, or a file is damaged. ConfigError: it is of a table that is not known.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no folder of kept runs; name another one")
    return [read_kept(path) for path in sorted(folder.glob("*.json"))]


def read_kept(path: Path) -> KeptTable:
    """A file of kept runs.

    Raises:
        DataError: it is not there, or damaged. ConfigError: it is of a table that is not known.
    """
    document = read_json(path)
    known = {field.name for field in fields(KeptRun)}
    try:
        id, scale, entries = document["id"], float(document["rounds_scale"]), list(document["runs"])
        wrong = next((n for n, entry in enumerate(entries, 1) if set(entry) != known), None)
        runs = () if wrong else tuple(KeptRun(**entry) for entry in entries)
        failed = tuple(
            FailedRun(one["row"], (one["division"], one["seed"]), one["setting"], one["reason"])
            for one in document.get("failed", ())
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a file of kept runs; name another folder, or keep the table again") from error
    if wrong:
        raise DataError(f"{path}: run {wrong}: expected {', '.join(sorted(known))}")
    return KeptTable(table_named(id), scale, runs, failed)


def keep(out: Path, into: Path = HERE, *, again: bool = False) -> str:
    """Keep the finished runs of a table, and why others failed.

    Runs that are kept already stay as they are; those of other settings than the table's by now are replaced.

    Args:
        out: the table's folder. into: folder of the file.
        again: replace runs that now have other figures, or were made with another engine.

    Returns:
        What was done, in a sentence.

    Raises:
        RunError: there is no finished run; or one was made by code that is in no commit, or with other values than the
            table's, or has other figures or another engine than when it was kept, or is of other images.
        DataError: a file is damaged.
    """
    asked = asked_of(out)
    table = table_named(read_json(out / "table.json")["id"])
    measured, failed = runs_of(table, out)
    new = KeptTable(table, asked.rounds_scale, tuple(_kept(table, asked, run) for run in measured))
    if not new.runs:
        raise RunError(f"{out}: no run of it has finished")
    path = into / f"{new.name}.json"
    known = read_kept(path) if path.exists() else replace(new, runs=())
    before = {run.place: run for run in known.runs}
    stale = {run.place for run in outdated(known)} if before else set()
    whole = dict(before)
    for run in new.runs:
        was = before.get(run.place)
        if was is None or run.place in stale or again:
            whole[run.place] = run
        else:
            _same(table, path, was, run)
            if set(run.figures) > set(was.figures):
                whole[run.place] = run
    runs = tuple(whole[place] for place in sorted(whole))
    _check_divisions(path, [run for run in runs if run != before.get(run.place) or run.place not in stale])
    lost = {(one.setting, one.row, *one.pair): one for one in (*known.failed, *failed) if one.reason != INTERRUPTED}
    without = tuple(lost[place] for place in sorted(lost.keys() - whole.keys()))
    write_text(path, _text(replace(new, runs=runs, failed=without)))
    changed = sum(before.get(run.place) != run for run in runs)
    told = f"; {plural(len(without), 'other')} failed" if without else ""
    return f"{path}: {plural(len(runs), 'run')}, {changed} of them new{told}"


def _check_divisions(path: Path, runs: Sequence[KeptRun]) -> None:
    """Refuse runs of a setting that one seed divided in two ways: they are of other images, or of another table."""
    first: dict[tuple[str, int], KeptRun] = {}
    for run in runs:
        other = first.setdefault((run.setting, run.division), run)
        if other.partition != run.partition:
            raise RunError(
                f"{path}: {run.row} on {run.setting}, {pair_name(run.pair)}: its clients do not hold what those of "
                f"{other.row}, {pair_name(other.pair)}, hold; run both on the same images"
            )


def _kept(table: PaperTable, asked: Asked, run: MeasuredRun) -> KeptRun:
    header = described(run.folder)
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
    identity = _with_division(_identity(header), division)
    own = flatten(identity)
    usual = flatten(planned[run.row, run.pair].identity()) if planned else {}
    values = flatten(header["config"])
    differing = sorted(key for key in own.keys() | usual.keys() if own.get(key) != usual.get(key))
    foreign = [key for key in differing if not _may_differ(key, values.get(key))]
    if foreign:
        said = ", ".join(f"{key}={values.get(key)}" for key in foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise RunError(
            f"{run.row} on {run.setting}, {pair_name(run.pair)}: was made with {said}, which is not the table's "
            "setting; run it without (engine.*, data.root and data.name=imagefolder may be set)"
        )
    return KeptRun(
        run.setting,
        run.row,
        division,
        seed,
        {key: None if value is None else round(value, 12) for key, value in run.figures.items()},
        _digest(identity),
        {key: values[key] for key in differing if key in values},
        metrics["data_fingerprint"],
        metrics["partition_fingerprint"],
        commit,
        (processor_of(made) or "unknown") if made["device"] == "cpu" else made["device"],
        made["versions"]["torch"],
    )


def _may_differ(key: str, value: object) -> bool:
    """Whether a run is one of its table's although it has another value than the table says."""
    return key.startswith("engine.") or (key in _MAY_BE_SET and _MAY_BE_SET[key] in (None, value))


def _identity(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's settings as this code says them.

    A key that is younger than the run has its default, which means what was done before there was a choice. Where this
    code knows the settings no more, they are as the run said them.
    """
    try:
        return Config.from_mapping(header["config"]).identity()
    except ConfigError:
        identity: Mapping[str, Any] = header["identity"]
        return identity


def _with_division(identity: Mapping[str, Any], division: int) -> Mapping[str, Any]:
    """Settings with the seed that divided: a run has the same ones whoever gave it that seed."""
    return {**identity, "partition": {**identity["partition"], "seed": division}}


def _same(table: PaperTable, path: Path, before: KeptRun, now: KeptRun) -> None:
    """Refuse a run with another engine or other figures than when it was kept; seconds and joules always differ."""
    if before.settings != now.settings:
        had, has = (", ".join(_assignments(run)) or "the table's own values" for run in (before, now))
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
    """Runs whose table asks for other settings by now, or for no such run any more."""
    groups: dict[tuple[str, tuple[str, ...]], list[KeptRun]] = {}
    for run in kept.runs:
        groups.setdefault((run.setting, _assignments(run)), []).append(run)
    found = []
    for (setting, assignments), runs in groups.items():
        planned = _planned(kept.table, setting, replace(kept.asked(runs), assignments=assignments))
        digests = {place: _digest(config.identity()) for place, config in planned.items()}
        found += [run for run in runs if digests.get((run.row, run.pair)) != run.settings]
    return found


def _assignments(run: KeptRun) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in run.besides.items())


def _planned(table: PaperTable, setting: str, asked: Asked) -> dict[tuple[str, tuple[int, int]], Config]:
    """The configuration of every run of a setting, by row, division and seed; empty where none can be configured.

    ``asked`` names the divisions.
    """
    try:
        settings = plan(table, replace(asked, columns=(setting,)), look_at_data=False).settings
    except ConfigError:  # no such row or column any more
        return {}
    runs = comparison_runs(settings[0].parameters, None, None) if settings else []
    return {(run.name, (run.config.partition_seed, run.config.seed)): run.config for run in runs}


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _text(kept: KeptTable) -> str:
    """A run per line, so that a difference shows runs."""
    failed = (
        {"setting": one.setting, "row": one.row, "division": one.pair[0], "seed": one.pair[1], "reason": one.reason}
        for one in kept.failed
    )
    runs, lost = (",\n".join(map(json.dumps, entries)) for entries in (map(asdict, kept.runs), failed))
    head = f'"id": {json.dumps(kept.table.id)},\n"rounds_scale": {json.dumps(kept.rounds_scale)},\n'
    return f'{{\n{head}"runs": [\n{runs}\n],\n"failed": [' + (f"\n{lost}\n" if lost else "") + "]\n}\n"


def made_by(tables: Iterable[KeptTable]) -> str:
    """Commits and processors of kept runs, in a sentence."""
    runs = [run for kept in tables for run in kept.runs]
    commits, processors = ({getattr(run, name) for run in runs} for name in ("commit", "processor"))
    shown = ", ".join(f"`{commit[:12]}`" for commit in sorted(commits))
    return f"{plural(len(runs), 'run')}, made by commits {shown} on {', '.join(sorted(processors))}."
