"""Measured figures kept with the code: one file per table and budget, one line per run.

The runs of a table take gigabytes and hours; the table needs one number per column from each.
:mod:`pipelines.papers.publish` (``protofl paper keep``) stores these, so several machines can complete a table, and the
code alone repeats this project's verdicts. A run is kept with its commit, processor, fingerprints of data and
partition, and all settings: a digest would not be comparable once a key is added.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from pipelines.papers.catalogue import PaperTable, name_at, table_named
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.papers.results import TableResults, assembled
from pipelines.papers.runs import FailedRun, MeasuredRun, TableRun
from pipelines.reporting.formats import plural
from pipelines.runs.layout import read_json

PUBLISHED_DIR = Path(str(files("pipelines.papers"))) / "measured"
"""Figures that this project measured."""


@dataclass(frozen=True)
class PublishedRun(TableRun):
    """The figures of a run, and its origin.

    Attributes:
        figures: by column, in its unit.
        settings: everything that can change a result except data and the two seeds, as written when the run was kept.
        besides: assignments that override the table's values. data, partition: fingerprints. processor: or the device.
    """

    figures: Mapping[str, float | None]
    settings: Mapping[str, Any]
    besides: Mapping[str, str]
    data: str
    partition: str
    commit: str
    processor: str
    torch: str

    @property
    def assignments(self) -> tuple[str, ...]:
        """Assignments that override the table's values, in the form of ``--set``."""
        return tuple(f"{key}={value}" for key, value in self.besides.items())


@dataclass(frozen=True)
class PublishedTable:
    """A file of kept runs of a table at a fraction of its rounds; ``failed`` have no figures."""

    table: PaperTable
    rounds_scale: float
    runs: tuple[PublishedRun, ...]
    failed: tuple[FailedRun, ...] = ()

    def path(self, folder: Path) -> Path:
        """Return the path of its file."""
        return folder / f"{name_at(self.table.id, self.rounds_scale)}.json"

    def selection(self, runs: Sequence[PublishedRun] | None = None) -> TableSelection:
        """Return the request that measures these runs; None: all."""
        chosen = self.runs if runs is None else runs
        draws = sorted({run.division for run in chosen})
        seeds = sorted({run.seed for run in chosen}) or [0]
        return TableSelection(seeds=tuple(seeds), partition_seeds=tuple(draws) or None, rounds_scale=self.rounds_scale)

    def results(self) -> TableResults:
        """Return the table with its kept runs."""
        overrides: dict[str, tuple[str, ...]] = {}
        for run in self.runs:
            overrides[run.setting] = tuple(dict.fromkeys((*overrides.get(run.setting, ()), *run.assignments)))
        table_plan = replace(plan_table(self.table, self.selection(), with_data=False), overrides=overrides)
        measured = (MeasuredRun(*run.key, run.figures, run.partition) for run in self.runs)
        return assembled(table_plan, measured, self.failed)

    def text(self) -> str:
        """Return the content of its file: shared settings once, and a line per run for readable diffs."""
        settings = {_digest(run.settings): run.settings for run in self.runs}
        named = [f"{json.dumps(name)}: {json.dumps(settings[name], sort_keys=True)}" for name in sorted(settings)]
        runs = [{**asdict(run), "settings": _digest(run.settings)} for run in self.runs]
        head = f'"id": {json.dumps(self.table.id)},\n"rounds_scale": {json.dumps(self.rounds_scale)}'
        lists = (_lines("[", map(json.dumps, entries), "]") for entries in (runs, map(asdict, self.failed)))
        parts = zip(("settings", "runs", "failed"), (_lines("{", named, "}"), *lists), strict=True)
        return "{\n" + ",\n".join([head, *(f'"{name}": {part}' for name, part in parts)]) + "\n}\n"


def _lines(opening: str, entries: Iterable[str], closing: str) -> str:
    between = ",\n".join(entries)
    return f"{opening}\n{between}\n{closing}" if between else opening + closing


def published_tables(folder: Path = PUBLISHED_DIR) -> list[PublishedTable]:
    """Return all files of kept runs, by name."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no folder of kept runs; name another one")
    return [read_published(path) for path in sorted(folder.glob("*.json"))]


def published_so_far(table: PaperTable, rounds_scale: float, folder: Path = PUBLISHED_DIR) -> PublishedTable:
    """Return the kept runs of a table at a budget; none without a file."""
    nothing = PublishedTable(table, rounds_scale, ())
    path = nothing.path(folder)
    return read_published(path) if path.exists() else nothing


def read_published(path: Path) -> PublishedTable:
    """Read a file of kept runs; DataError if it is missing or damaged, ConfigError if its table is unknown."""
    document = read_json(path)
    known = {field.name for field in fields(PublishedRun)}
    try:
        id, scale, entries = document["id"], float(document["rounds_scale"]), list(document["runs"])
        settings = dict(document["settings"])
        if wrong := next((n for n, entry in enumerate(entries, 1) if set(entry) != known), None):
            raise DataError(f"{path}: run {wrong}: expected {', '.join(sorted(known))}")
        runs = tuple(PublishedRun(**entry | {"settings": settings[entry["settings"]]}) for entry in entries)
        failed = tuple(FailedRun(**entry) for entry in document.get("failed", ()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not a file of kept runs; name another folder, or delete it and keep the table again"
        ) from error
    if changed := sorted(name for name, values in settings.items() if _digest(values) != name):
        raise DataError(
            f"{path}: settings {changed[0]}: not those that were kept; delete the file and keep the table again"
        )
    return PublishedTable(table_named(id), scale, runs, failed)


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def origins(tables: Iterable[PublishedTable]) -> str:
    """Return a sentence with the number of commits and the processors of kept runs."""
    runs = [run for table in tables for run in table.runs]
    commits, processors = ({getattr(run, name) for run in runs} for name in ("commit", "processor"))
    made = f"{plural(len(runs), 'run')}, made by {plural(len(commits), 'commit')} on {', '.join(sorted(processors))}"
    return f"{made}; each with its own in `pipelines/papers/measured`."
