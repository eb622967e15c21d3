"""Measured figures kept with the code: one file per table and budget, one line per run.

The runs of a table take gigabytes and hours; the table needs one number per column from each.
:mod:`pipelines.papers.keeping` (``protofl paper keep``) stores these, so several machines can complete a table, and the
code alone shows and repeats this project's verdicts on the papers' claims. A run is kept with its commit, processor,
fingerprints of data and partition, and all settings: a digest would not be comparable once a key is added. For a
failed run the reason is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from pipelines.papers.catalogue import PaperTable, name_at, table_named
from pipelines.papers.plan import Asked, plan
from pipelines.papers.results import TableResults, assembled
from pipelines.papers.runs import FailedRun, MeasuredRun
from pipelines.reporting.formats import plural
from pipelines.runs.layout import read_json

HERE = Path(str(files("pipelines.papers"))) / "measured"
"""Figures that this project measured."""


@dataclass(frozen=True)
class KeptRun:
    """The figures of a run, and its origin.

    Attributes:
        setting: key of the first column that the run serves. division: the partition seed.
        figures: by column, in its unit.
        settings: everything that can change a result except data and the two seeds, as written when the run was kept.
        besides: assignments that override the table's values. data, partition: fingerprints. processor: or the device.
    """

    setting: str
    row: str
    division: int
    seed: int
    figures: Mapping[str, float | None]
    settings: Mapping[str, Any]
    besides: Mapping[str, str]
    data: str
    partition: str
    commit: str
    processor: str
    torch: str

    @property
    def pair(self) -> tuple[int, int]:
        return self.division, self.seed

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Key of a run; files are sorted by it."""
        return self.setting, self.row, self.division, self.seed

    @property
    def assignments(self) -> tuple[str, ...]:
        """Assignments that override the table's values, in the form of ``--set``."""
        return tuple(f"{key}={value}" for key, value in self.besides.items())


@dataclass(frozen=True)
class KeptTable:
    """A file of kept runs of a table at a fraction of its rounds; ``failed`` have no figures."""

    table: PaperTable
    rounds_scale: float
    runs: tuple[KeptRun, ...]
    failed: tuple[FailedRun, ...] = ()

    def path(self, folder: Path) -> Path:
        """Return the path of its file."""
        return folder / f"{name_at(self.table.id, self.rounds_scale)}.json"

    def asked(self, runs: Sequence[KeptRun] | None = None) -> Asked:
        """Return the request that measures these runs; None: all."""
        of = self.runs if runs is None else runs
        draws = sorted({run.division for run in of})
        seeds = sorted({run.seed for run in of}) or [0]
        return Asked(seeds=tuple(seeds), partition_seeds=tuple(draws) or None, rounds_scale=self.rounds_scale)

    def results(self) -> TableResults:
        """Return the table with its kept runs."""
        found = plan(self.table, self.asked(), look_at_data=False)
        measured = (
            MeasuredRun(run.row, run.pair, run.figures, run.setting, Path(), run.partition) for run in self.runs
        )
        return assembled(found, measured, self.failed)

    def text(self) -> str:
        """Return the content of its file: shared settings once, and a line per run for readable diffs."""
        settings = {_digest(run.settings): run.settings for run in self.runs}
        named = [f"{json.dumps(name)}: {json.dumps(settings[name], sort_keys=True)}" for name in sorted(settings)]
        runs = [{**asdict(run), "settings": _digest(run.settings)} for run in self.runs]
        failed = [
            {"setting": one.setting, "row": one.row, "division": one.pair[0], "seed": one.pair[1], "reason": one.reason}
            for one in self.failed
        ]
        head = f'"id": {json.dumps(self.table.id)},\n"rounds_scale": {json.dumps(self.rounds_scale)}'
        lists = (_lines("[", map(json.dumps, entries), "]") for entries in (runs, failed))
        parts = zip(("settings", "runs", "failed"), (_lines("{", named, "}"), *lists), strict=True)
        return "{\n" + ",\n".join([head, *(f'"{name}": {part}' for name, part in parts)]) + "\n}\n"


def _lines(opening: str, entries: Iterable[str], closing: str) -> str:
    between = ",\n".join(entries)
    return f"{opening}\n{between}\n{closing}" if between else opening + closing


def kept_tables(folder: Path = HERE) -> list[KeptTable]:
    """Return all files of kept runs, by name.

    Raises:
        DataError: the folder is missing, or a file is damaged. ConfigError: a table is unknown.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no folder of kept runs; name another one")
    return [read_kept(path) for path in sorted(folder.glob("*.json"))]


def kept_so_far(table: PaperTable, rounds_scale: float, folder: Path = HERE) -> KeptTable:
    """Return the kept runs of a table at a budget; none without a file.

    Raises:
        DataError: the file is damaged.
    """
    nothing = KeptTable(table, rounds_scale, ())
    path = nothing.path(folder)
    return read_kept(path) if path.exists() else nothing


def read_kept(path: Path) -> KeptTable:
    """Read a file of kept runs.

    Raises:
        DataError: it is missing or damaged. ConfigError: its table is unknown.
    """
    document = read_json(path)
    known = {field.name for field in fields(KeptRun)}
    try:
        id, scale, entries = document["id"], float(document["rounds_scale"]), list(document["runs"])
        settings = dict(document["settings"])
        wrong = next((n for n, entry in enumerate(entries, 1) if set(entry) != known), None)
        runs = () if wrong else tuple(KeptRun(**entry | {"settings": settings[entry["settings"]]}) for entry in entries)
        failed = tuple(
            FailedRun(one["row"], (one["division"], one["seed"]), one["setting"], one["reason"])
            for one in document.get("failed", ())
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not a file of kept runs; name another folder, or delete it and keep the table again"
        ) from error
    if wrong:
        raise DataError(f"{path}: run {wrong}: expected {', '.join(sorted(known))}")
    if changed := sorted(name for name, own in settings.items() if _digest(own) != name):
        raise DataError(
            f"{path}: settings {changed[0]}: not those that were kept; delete the file and keep the table again"
        )
    return KeptTable(table_named(id), scale, runs, failed)


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def made_by(tables: Iterable[KeptTable]) -> str:
    """Return a sentence with the commits and processors of kept runs."""
    runs = [run for kept in tables for run in kept.runs]
    commits, processors = ({getattr(run, name) for run in runs} for name in ("commit", "processor"))
    shown = ", ".join(f"`{commit[:12]}`" for commit in sorted(commits))
    return f"{plural(len(runs), 'run')}, made by commits {shown} on {', '.join(sorted(processors))}."
