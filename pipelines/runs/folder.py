"""A run's folder as it is at this moment, finished or still training: its files as JSON values, read once.

:func:`pipelines.runs.record.load_run` makes typed figures of a finished run from the same files.
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
    """What a run's folder says.

    Attributes:
        directory: the folder.
        config: the resolved configuration, nested; never with the section ``tracking``, which may hold a password.
        identity: what of it can change a result (:meth:`flcore.config.schema.Config.identity`).
        config_hash: names the run: identity, data and partition.
        code: SHA-256 of the sources that the run uses.
        environment: versions, class of processor, device, hashes of code and lock.
        history: a record per evaluated round, in order of rounds.
        timing: what ``timing.json`` holds; while the run trains, its ``rounds`` alone: a record per leg, in order.
        metrics: what ``metrics.json`` holds; None while the run is not finished.
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
        """Seconds and times of day per leg, in order."""
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
    """Whether a run has finished in a folder, and what it left is what it wrote; damaged results cannot be compared."""
    files = RunFiles(Path(directory))
    if not files.metrics.exists():
        return False
    try:
        check_seal(files.directory)
        if files.config.exists():  # it does not come by DVC
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
    except OSError:  # nothing can be written there
        return False


def _rounds(files: RunFiles) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """History, timing, and whether training has ended; it may end while this reads."""
    if not files.history.exists():  # written when it has ended; until then the one that training works on is with the checkpoint
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
    """History and timing of the complete rounds; what is written behind them belongs to a round that may be repeated.

    Of a run that was given up, its history may be all that was kept.
    """
    state = checkpoint / "state.json"
    complete = read_json(state)["round"] if state.exists() else math.inf
    history, legs = (read_lines(checkpoint / name) for name in ("history.jsonl", "timing.jsonl"))
    return [record for record in history if record["round"] <= complete], {
        "rounds": [record for record in legs if record["round"] <= complete]
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a ``.jsonl`` file, in order, none where there is none; a last line that is being written is left.

    Raises:
        DataError: a line before the last is damaged, or one is no object.
    """
    return files.read_lines(path, kinds.CURE, growing=True) if path.exists() else []
