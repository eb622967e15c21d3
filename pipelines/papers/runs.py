"""The runs of a table's comparisons: what each says of the table, on which division, and which failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from flcore.experiment.run_folder import RunFiles, read_run_config
from pipelines.papers.catalogue import Column, PaperTable, Row
from pipelines.papers.figures_of_a_run import figure
from pipelines.papers.plan import Asked
from pipelines.papers.table_file import Told
from pipelines.runs.layout import read_json

INTERRUPTED = "interrupted"
"""Why a run that was stopped from outside has no result: it says nothing of its method, and can be gone on with."""

_LABEL = re.compile(r"(?P<method>\S+) seed (?P<seed>\d+)(?:, (?P<row>.+?))??(?:, division (?P<division>\d+))?")
"""What a comparison calls a run that failed (:func:`pipelines.execution.one_run.placed`)."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a finished run says of a table.

    Attributes:
        row: its key. pair: the seed that divided the data, which may be that of the run, and the run's.
        figures: by key of the columns that are read from it, in their units; None where the run has none.
        setting: key of the first of these columns, which its comparison's folder is called by. folder: of the run.
        partition: fingerprint of its division.
    """

    row: str
    pair: tuple[int, int]
    figures: Mapping[str, float | None]
    setting: str
    folder: Path
    partition: str


@dataclass(frozen=True)
class FailedRun:
    """A run without a result; attributes as of :class:`MeasuredRun`, and ``reason``."""

    row: str
    pair: tuple[int, int]
    setting: str
    reason: str

    @property
    def label(self) -> str:
        return f"{self.setting}: {self.row}, seed {self.pair[1]} on division {self.pair[0]}"


def runs_of(table: PaperTable, out: Path) -> tuple[list[MeasuredRun], list[FailedRun]]:
    """The runs of a table's comparisons: those that finished, with their figures, and those that failed.

    Args:
        table: whose. out: its folder, with one of each setting.

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
                if table.why_missing(row, column) is None:  # else such as a figure that is not what the paper's is
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
            # One that failed has the division of those beside it: a comparison divides for all rows alike.
            draw = seed if fixed is None else fixed
            pair = draw if said["division"] is None else int(said["division"]), seed
            failed.append(FailedRun(said["row"] or said["method"], pair, setting, reason))
    return measured, failed


def _comparisons(table: PaperTable, out: Path) -> Iterator[tuple[Path, Any, tuple[Column, ...]]]:
    """Of every setting that has been carried out: its folder, what is written there, the columns read from it."""
    for columns in table.settings():
        place = out / columns[0].key
        if (place / "comparison.json").exists():
            yield place, read_json(place / "comparison.json"), columns


def asked_of(folder: Path) -> Asked:
    """What a finished table was asked for, as far as its figures depend on it.

    Raises:
        DataError: the folder is none of a table, or its file is damaged.
    """
    said = Told.read(folder)
    return Asked(seeds=said.seeds, partition_seeds=said.partition_seeds, rounds_scale=said.rounds_scale)


# ---- in words ----------------------------------------------------------------------------------------------------


def told_pairs(pairs: frozenset[tuple[int, int]]) -> str:
    """On which divisions, by the seeds that divided, and with which seeds runs were made.

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
