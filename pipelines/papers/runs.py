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
from flcore.experiment.run_folder import RunFiles, read_run_config
from pipelines.papers.catalogue import Column, PaperTable, Row
from pipelines.papers.figures_of_a_run import figure
from pipelines.papers.plan import Asked
from pipelines.runs.layout import read_json

INTERRUPTED = "interrupted"
"""Reason of a run that was stopped from outside: it says nothing about its method, and can be resumed."""

_LABEL = re.compile(r"(?P<method>\S+) seed (?P<seed>\d+)(?:, (?P<row>.+?))??(?:, division (?P<division>\d+))?")
"""Label of a failed run in a comparison (:func:`pipelines.execution.one_run.placed`)."""


@dataclass(frozen=True)
class MeasuredRun:
    """The figures of a finished run.

    Attributes:
        pair: partition seed and seed. figures: by column, in its unit.
        setting: its first column, the name of its comparison's folder. partition: fingerprint of the partition.
    """

    row: str
    pair: tuple[int, int]
    figures: Mapping[str, float | None]
    setting: str
    folder: Path
    partition: str


@dataclass(frozen=True)
class FailedRun:
    """A run without a result; attributes as in :class:`MeasuredRun`, and ``reason``."""

    row: str
    pair: tuple[int, int]
    setting: str
    reason: str

    @property
    def label(self) -> str:
        return f"{self.setting}: {self.row}, seed {self.pair[1]} on division {self.pair[0]}"


def runs_of(table: PaperTable, out: Path) -> tuple[list[MeasuredRun], list[FailedRun]]:
    """Return the finished runs and the failed ones of the comparisons in a table's folder.

    Raises:
        DataError: a file there is damaged.
    """
    measured, failed = list[MeasuredRun](), list[FailedRun]()
    reference = table.row(table.baseline)
    for place, document, columns in _comparisons(table, out):
        setting = columns[0].key
        fixed: int | None = None
        runs: list[tuple[Row, tuple[int, int], Path]] = []
        for run in document["runs"]:
            row = table.row(run["method"])
            folder = place / "runs" / f"{row.method}-s{run['seed']}-{run['config_hash'][:8]}"
            divides = read_run_config(folder)["config"]["partition"].get("seed")
            fixed = divides if run.get("division") is None else fixed
            runs.append((row, (run["seed"] if divides is None else divides, run["seed"]), folder))
        baselines = {pair: folder for row, pair, folder in runs if row.key == table.baseline}
        for row, pair, folder in runs:
            found = {}
            for column in columns:
                if table.why_missing(row, column) is None:  # otherwise it is, for example, not the paper's figure
                    metric, usual = (one.metrics.get(column.metric, column.metric) for one in (row, reference))
                    value = figure(folder, metric, (baselines[pair], usual) if pair in baselines else None)
                    found[column.key] = None if value is None else column.scale * value
            fingerprint = read_json(RunFiles(folder).metrics).get("partition_fingerprint")
            measured.append(MeasuredRun(row.key, pair, found, setting, folder, fingerprint or f"seed {pair[0]}"))
        for label, reason in document["failed"].items():
            said = _LABEL.fullmatch(label)
            if said is None:
                raise DataError(f"{place / 'comparison.json'}: failed: {label}: not the name of a run")
            seed = int(said["seed"])
            # A comparison partitions the data alike for all rows, so a failed run has the others' partition.
            draw = seed if fixed is None else fixed
            pair = draw if said["division"] is None else int(said["division"]), seed
            failed.append(FailedRun(said["row"] or said["method"], pair, setting, reason))
    return measured, failed


def _comparisons(table: PaperTable, out: Path) -> Iterator[tuple[Path, Any, tuple[Column, ...]]]:
    """Yield the folder, ``comparison.json`` and columns of every setting that was run."""
    for columns in table.settings():
        place = out / columns[0].key
        if (place / "comparison.json").exists():
            yield place, read_json(place / "comparison.json"), columns


@pydantic_dataclass(frozen=True)
class TableFile:
    """A table's ``table.json``; ``assignments`` are by setting, empty in files older than them."""

    id: str
    seeds: tuple[int, ...]
    partition_seeds: tuple[int, ...] | None
    rounds_scale: float
    assignments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def asked(self) -> Asked:
        """The request, as far as figures depend on it."""
        return Asked(seeds=self.seeds, partition_seeds=self.partition_seeds, rounds_scale=self.rounds_scale)


def table_file(folder: Path) -> TableFile:
    """Read a table's folder.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = folder / "table.json"
    if not path.is_file():
        raise DataError(f"{folder}: no table there (table.json); protofl paper run makes one, below runs/papers")
    try:
        return TableFile(**read_json(path))
    except ValidationError as error:
        raise DataError(f"{path}: damaged; delete it, and paper run writes it again from the finished runs") from error


# ---- in words ----------------------------------------------------------------------------------------------------


def told_pairs(pairs: frozenset[tuple[int, int]]) -> str:
    """Return a text with the seeds and partition seeds of runs.

    >>> told_pairs(frozenset({(42, 0), (42, 1)})), told_pairs(frozenset({(0, 0), (1, 1)}))
    ('n = 2, seeds 0, 1 on one division (42)', 'n = 2, seeds 0, 1, each on a division of its own')
    """
    seeds, divisions = (_listed(pair[place] for pair in pairs) for place in (1, 0))
    many, n = len({pair[1] for pair in pairs}), len({pair[0] for pair in pairs})
    said = f"n = {len(pairs)}, seed{'s' if many > 1 else ''} {seeds}"
    if len(pairs) == 1:
        return f"{said} on division {divisions}"
    if n == 1:
        return f"{said} on one division ({divisions})"
    if many == n == len(pairs) and all(draw == seed for draw, seed in pairs):
        return f"{said}, each on a division of its own"
    if len(pairs) == many * n:
        return f"{said} on each of divisions {divisions}"
    by_division = (
        f"{_listed(seed for own, seed in pairs if own == draw)} on {draw}" for draw in sorted({d for d, _ in pairs})
    )
    return f"n = {len(pairs)}, seeds by division: {'; '.join(by_division)}"


def _listed(numbers: Iterator[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))
