"""The runs of a table's comparisons: their figures, partitions and failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from flcore.core.errors import DataError
from pipelines.papers.catalogue import Column, PaperTable, Row
from pipelines.papers.metrics import TO_TARGET, figure
from pipelines.papers.plan import RunKey, TableSelection
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import read_json

INTERRUPTED = "interrupted"
"""Reason of a run that was stopped from outside: it says nothing about its method, and can be resumed."""

_LABEL = re.compile(r"(?P<method>\S+) seed (?P<seed>\d+)(?:, (?P<row>.+?))??(?:, division (?P<division>\d+))?")
"""Label of a failed run in a comparison (:func:`pipelines.execution.one_run.placed`)."""


@dataclass(frozen=True)
class TableRun:
    """A run of a table; ``setting`` is the key of the first column that it serves, ``division`` its partition seed."""

    setting: str
    row: str
    division: int
    seed: int

    @property
    def pair(self) -> tuple[int, int]:
        """Partition seed and seed."""
        return self.division, self.seed

    @property
    def key(self) -> RunKey:
        return self.setting, self.row, self.division, self.seed


@dataclass(frozen=True)
class MeasuredRun(TableRun):
    """A finished run: its figures by column, in the column's unit, and the fingerprint of its partition."""

    figures: Mapping[str, float | None]
    partition: str
    folder: RunFolder = field(default=RunFolder(Path()), compare=False, repr=False)


@dataclass(frozen=True)
class FailedRun(TableRun):
    """A run without a result."""

    reason: str

    @property
    def label(self) -> str:
        return f"{self.setting}: {self.row}, seed {self.seed} on division {self.division}"


def runs_of(table: PaperTable, out: Path) -> tuple[list[MeasuredRun], list[FailedRun]]:
    """Return the finished runs and the failed ones of the comparisons in a table's folder."""
    measured, failed = list[MeasuredRun](), list[FailedRun]()
    reference = table.row(table.baseline)
    for home, document, columns in _comparisons(table, out):
        setting = columns[0].key
        fixed: int | None = None
        runs: list[tuple[Row, tuple[int, int], RunFolder]] = []
        for run in document["runs"]:
            row = table.row(run["method"])
            folder = RunFolder(home / "runs" / f"{row.method}-s{run['seed']}-{run['config_hash'][:8]}")
            divides = folder.config["partition"].get("seed")
            fixed = divides if run.get("division") is None else fixed
            runs.append((row, (run["seed"] if divides is None else divides, run["seed"]), folder))
        baselines = {pair: folder for row, pair, folder in runs if row.key == table.baseline}
        for row, pair, folder in runs:
            figures = {}
            for column in columns:
                if table.why_missing(row, column) is None:  # otherwise it is, for example, not the paper's figure
                    metric, usual = (one.metrics.get(column.metric, column.metric) for one in (row, reference))
                    if metric.startswith(TO_TARGET) and pair not in baselines:
                        continue  # another machine's part of the table may have the run that defines the target
                    value = figure(folder, metric, (baselines[pair], usual) if pair in baselines else None)
                    figures[column.key] = None if value is None else column.scale * value
            fingerprint = folder.metrics.get("partition_fingerprint")
            measured.append(MeasuredRun(setting, row.key, *pair, figures, fingerprint or f"seed {pair[0]}", folder))
        for label, reason in document["failed"].items():
            match = _LABEL.fullmatch(label)
            if match is None:
                raise DataError(f"{home / 'comparison.json'}: failed: {label}: not the name of a run")
            seed = int(match["seed"])
            # A comparison partitions the data alike for all rows, so a failed run has the others' partition.
            draw = seed if fixed is None else fixed
            pair = draw if match["division"] is None else int(match["division"]), seed
            failed.append(FailedRun(setting, match["row"] or match["method"], *pair, reason))
    return measured, failed


def _comparisons(table: PaperTable, out: Path) -> Iterator[tuple[Path, Any, tuple[Column, ...]]]:
    """Yield the folder, ``comparison.json`` and columns of every setting that was run."""
    for columns in table.settings():
        home = out / columns[0].key
        if (home / "comparison.json").exists():
            yield home, read_json(home / "comparison.json"), columns


@pydantic_dataclass(frozen=True)
class TableFile:
    """A table's ``table.json``; ``assignments`` are by setting, empty in files older than them."""

    id: str
    seeds: tuple[int, ...]
    partition_seeds: tuple[int, ...] | None
    rounds_scale: float
    assignments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def selection(self) -> TableSelection:
        """The request, as far as figures depend on it."""
        return TableSelection(seeds=self.seeds, partition_seeds=self.partition_seeds, rounds_scale=self.rounds_scale)


def table_file(folder: Path) -> TableFile:
    """Read a table's folder; DataError if its file is missing or damaged."""
    path = folder / "table.json"
    if not path.is_file():
        raise DataError(f"{folder}: no table there (table.json); protofl paper run makes one, below runs/papers")
    try:
        return TableFile(**read_json(path))
    except ValidationError as error:
        raise DataError(f"{path}: damaged; delete it, and paper run writes it again from the finished runs") from error


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_pairs(pairs: frozenset[tuple[int, int]]) -> str:
    """Return a text with the seeds and partition seeds of runs.

    >>> describe_pairs(frozenset({(42, 0), (42, 1)})), describe_pairs(frozenset({(0, 0), (1, 1)}))
    ('n = 2, seeds 0, 1 on one division (42)', 'n = 2, seeds 0, 1, each on a division of its own')
    """
    seeds, divisions = (_listed(pair[position] for pair in pairs) for position in (1, 0))
    many, n = len({pair[1] for pair in pairs}), len({pair[0] for pair in pairs})
    text = f"n = {len(pairs)}, seed{'s' if many > 1 else ''} {seeds}"
    if len(pairs) == 1:
        return f"{text} on division {divisions}"
    if n == 1:
        return f"{text} on one division ({divisions})"
    if many == n == len(pairs) and all(draw == seed for draw, seed in pairs):
        return f"{text}, each on a division of its own"
    if len(pairs) == many * n:
        return f"{text} on each of divisions {divisions}"
    by_division = (
        f"{_listed(seed for division, seed in pairs if division == draw)} on {draw}"
        for draw in sorted({d for d, _ in pairs})
    )
    return f"n = {len(pairs)}, seeds by division: {'; '.join(by_division)}"


def _listed(numbers: Iterator[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))
