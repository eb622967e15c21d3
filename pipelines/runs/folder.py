"""A run's folder now, finished or training: its files as JSON values, read once.

:func:`pipelines.runs.record.load_run` makes a typed record of a finished run from the same files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.io import files
from flcore.core.errors import DataError, RunError
from flcore.experiment.run_folder import RunFiles, check_seal, read_run_config
from flcore.io.locks import run_lock
from pipelines.runs import kinds
from pipelines.runs.layout import read_json


@dataclass(frozen=True)
class RunFolder:
    """The content of a run's folder.

    Attributes:
        directory: the folder.
        config: the resolved configuration, nested; never with the section ``tracking``, which may hold a password.
        identity: its part that can change a result (:meth:`flcore.config.schema.Config.identity`).
        config_hash: names the run: identity, data and partition.
        code: SHA-256 of the sources that the run uses.
        environment: versions, class of processor, device, hashes of code and lock.
        history: a record per evaluated round, in order of rounds.
        timing: ``timing.json``; while the run trains, only its ``rounds``: a record per leg, in order.
        metrics: ``metrics.json``; None while the run is not finished.
        study: name of the study that this is the record of (`pipelines/tuning`): its rounds are trials; None for a run.
    """

    directory: Path
    config: Mapping[str, Any]
    identity: Mapping[str, Any]
    config_hash: str
    code: str | None
    environment: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    timing: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    study: str | None = None

    @property
    def legs(self) -> Sequence[Mapping[str, Any]]:
        """Return seconds and times of day per leg, in order."""
        return self.timing.get("rounds") or ()


def read_folder(directory: Path) -> RunFolder:
    """Read a run's folder, finished or not.

    Raises:
        DataError: ``config.json`` is missing, or a file is damaged.
    """
    files = RunFiles(Path(directory))
    header = read_json(files.config)
    history, timing, is_trained = _rounds(files)
    if is_trained:
        check_seal(files.directory)
    metrics = read_json(files.metrics) if is_trained and files.metrics.exists() else None
    for name, value, kind in (("history", history, [kinds.HISTORY]), ("timing", timing, kinds.TIMING)):
        kinds.check(value, kind, f"{files.directory}: {name}")
    kinds.check(metrics, kinds.METRICS, str(files.metrics))
    if not isinstance(header, dict) or not all(isinstance(header.get(name), dict) for name in ("config", "identity")):
        raise DataError(f"{files.config}: no config or identity; this is not a run, or it is damaged")
    try:
        return RunFolder(
            directory=files.directory,
            config={section: values for section, values in header["config"].items() if section != "tracking"},
            identity=header["identity"],
            config_hash=header["config_hash"],
            code=header.get("code"),
            environment=header.get("environment") or {},
            history=sorted(history, key=lambda record: record["round"]),
            timing=timing,
            metrics=metrics,
            study=header.get("study"),
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"{files.config}: no {error}; this is not a run, or one of a version of long ago") from error


def has_whole_results(directory: Path) -> bool:
    """Return whether a run has finished in a folder and its results are undamaged, so that they can be compared."""
    files = RunFiles(Path(directory))
    if not files.metrics.exists():
        return False
    try:
        check_seal(files.directory)
        if files.config.exists():  # DVC does not fetch it
            read_run_config(files.directory)
    except DataError:
        return False
    return True


def is_in_use(directory: Path) -> bool:
    """Return whether a process trains in a folder."""
    try:
        with run_lock(directory):
            return False
    except RunError:
        return True
    except OSError:  # the folder is read-only
        return False


def _rounds(files: RunFiles) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """Return history, timing, and whether training has ended, which may happen during the call."""
    if not files.history.exists():  # written at the end of training; before it, the history is in the checkpoint
        try:
            history, timing = _under_way(files.checkpoint)
        except DataError:
            if not files.history.exists():
                raise
        else:
            if not files.history.exists():
                return history, timing, False
    return read_lines(files.history), read_json(files.timing) if files.timing.exists() else {}, True


def _under_way(checkpoint: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return history and timing of the complete rounds; later lines belong to a round that may be repeated.

    A run that was given up may have kept its history only.
    """
    state = checkpoint / "state.json"
    complete = read_json(state)["round"] if state.exists() else math.inf
    history, legs = (read_lines(checkpoint / name) for name in ("history.jsonl", "timing.jsonl"))
    return [record for record in history if record["round"] <= complete], {
        "rounds": [record for record in legs if record["round"] <= complete]
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a ``.jsonl`` file, in order; none without a file. An incomplete last line is ignored.

    Raises:
        DataError: a line before the last is damaged, or one is no object.
    """
    return files.read_lines(path, kinds.CURE, growing=True) if path.exists() else []
