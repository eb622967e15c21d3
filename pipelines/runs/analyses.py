"""Analyses of a finished run: computed by `flcore`, stored in its folder ``analyses``, read back for figures and pages.

``index.json`` names the analyses, the results that they analyse, and the reasons of those that were skipped. Data are
arrays (``.npz`` without pickle) and tables (``.csv``); the same run gives the same bytes. Reading them needs no torch.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from flcore.io import disk
from flcore.core.errors import DataError
from flcore.config.analyses import SUMMARIES, with_snapshots, without_round
from flcore.io.files import replace_file, remove_stale_temp
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import RunFiles, read_json, write_json, write_text
from pipelines.runs.standard_error import tell

if TYPE_CHECKING:
    from flcore.config.schema import Config
    from flcore.analyses.base import FinishedRun, AnalysisResult
    from flcore.experiment.experiment import Experiment


@dataclass(frozen=True)
class StoredAnalysis:
    """An analysis in a run's folder.

    Attributes:
        name: in the registry, with the round if it is of a snapshot.
        skipped: the reason if it was skipped, else None.
        rows: of the table, all values as text, empty for none. notes: what a reader must know.
    """

    name: str
    skipped: str | None
    arrays: Mapping[str, np.ndarray]
    rows: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]


def compute(config: Config, prepared: Path, partition: Path, directory: Path, names: Sequence[str]) -> None:
    """Compute analyses of a finished run; stored ones remain, unless they are named again.

    One that this run does not allow is stored with the reason, which is also reported on standard error.

    Raises:
        DataError: the run is unfinished, is damaged, or ran on other data.
    """
    run = RunFolder(directory)
    files, about, index = run.files, _analysed(run), _index(run)
    if names:
        from flcore.engine.numerics import single_thread
        from flcore.analyses.base import AnalysisResult
        from flcore.analyses.registry import ANALYSES
        from flcore.experiment.experiment import Experiment

        single_thread()
        experiment = Experiment.open(config, prepared, partition)
        if experiment.hash != about["run"]:
            raise DataError(
                f"{directory}: the run has other data, another partition or another configuration than {prepared} and "
                f"{partition}; name its own with --prepared and --partition"
            )
        for name in names:
            base, number = without_round(name)
            run_left = _left(files, experiment, number)
            reason = ANALYSES[base].refusal(run_left)
            result = AnalysisResult() if reason is not None else ANALYSES[base].compute(run_left)
            if reason is not None:
                tell(f"{name}: left out, {reason}")
            if index.pop(name, None) is not None:  # first: an interrupted analysis must not be in the index
                write_json(files.analyses / "index.json", {**about, "analyses": index})
            _store(files, name, result)
            index[name] = {"skipped": reason, "notes": list(result.notes), "chosen": config.evaluation.shown_by(name)}
    write_json(files.analyses / "index.json", {**about, "analyses": index})


def _left(files: RunFiles, experiment: Experiment, number: int | None) -> FinishedRun:
    """Return the finished run, or its snapshot after a round."""
    from flcore.analyses.base import FinishedRun
    from flcore.io.records import Record, load_record

    def memory(client: int) -> Record:
        last = files.client(client)
        path = last if number is None else files.snapshot(number, f"client.{client:04d}")
        return load_record(path)[0] if path.exists() else Record()

    server, _ = load_record(files.server if number is None else files.snapshot(number, "server"))
    return FinishedRun(experiment, server, memory)


def asked(config: Config) -> list[str]:
    """Return all analyses that a run requests: of the finished run, then of its snapshots."""
    return with_snapshots(config.evaluation.analyses, config.evaluation.snapshots)


def left(config: Config, directory: Path) -> list[str]:
    """Return the analyses of :func:`asked` that a folder lacks, or has of other clients, classes or samples.

    A skipped analysis is not missing.
    """
    index = _index(RunFolder(directory))
    return [
        name
        for name in asked(config)
        if name not in index or index[name].get("chosen", {}) != config.evaluation.shown_by(name)
    ]


def load(run: RunFolder) -> list[StoredAnalysis]:
    """Return the analyses in a run's folder, in the order of the registry.

    An analysis of an earlier run, or of results that a later training has replaced, is left out.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder, index = run.files.analyses, _index(run)
    return [
        StoredAnalysis(
            name,
            index[name]["skipped"],
            _read_arrays(folder / f"{name}.npz"),
            _read_rows(folder / f"{name}.csv"),
            tuple(index[name]["notes"]),
        )
        for name in sorted(index, key=_place)
    ]


def _place(name: str) -> tuple[int, float]:
    """Return a sort key: the order of the registry; snapshots in their order, before the finished run."""
    base, number = without_round(name)
    return list(SUMMARIES).index(base), float("inf") if number is None else number


def _analysed(run: RunFolder) -> dict[str, str]:
    """Return the run and a digest of its results, which differ after training by other code."""
    digest = hashlib.sha256()
    # No server state if clients share nothing; their losses are in the history.
    for path in (run.files.history, run.files.server):
        if path.exists():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return {"run": run.config_hash, "results": digest.hexdigest()}


def _index(run: RunFolder) -> dict[str, Any]:
    """Return the index entries of the present results, without entries that lack their data."""
    path = run.files.analyses / "index.json"
    if not path.exists():
        return {}
    stored, about = read_json(path), _analysed(run)
    if any(stored.get(key) != own for key, own in about.items()):
        return {}
    return {name: entry for name, entry in stored["analyses"].items() if entry["skipped"] or _has_data(run.files, name)}


def _has_data(files: RunFiles, name: str) -> bool:
    return any((files.analyses / f"{name}{ending}").exists() for ending in (".npz", ".csv"))


def _store(files: RunFiles, name: str, result: AnalysisResult) -> None:
    """Write arrays and rows, and remove the files of an earlier analysis."""
    remove_stale_temp(files.analyses)
    array_file, table_file = files.analyses / f"{name}.npz", files.analyses / f"{name}.csv"
    disk.remove(array_file, missing_ok=True)
    disk.remove(table_file, missing_ok=True)
    if result.arrays:
        content = io.BytesIO()
        np.savez(content, **dict(sorted(result.arrays.items())))  # type: ignore[arg-type]
        replace_file(array_file, lambda file: file.write(content.getvalue()))
    if result.rows:
        out = io.StringIO()
        writer = csv.DictWriter(out, list(result.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _as_text(value) for key, value in row.items()} for row in result.rows)
        write_text(table_file, out.getvalue())


def _as_text(value: str | int | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, BadZipFile) as error:
        raise DataError(f"{path}: damaged ({error}); analyse the run again") from error


def _read_rows(path: Path) -> tuple[dict[str, str], ...]:
    if not path.exists():
        return ()
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))
