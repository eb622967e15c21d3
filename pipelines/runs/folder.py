"""A run's folder, finished or training: the one place that reads its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError, RunError
from flcore.experiment.run_folder import RunFiles, check_seal, read_run_config
from flcore.io.files import read_json, read_lines
from flcore.io.locks import run_lock
from pipelines.runs import kinds
from pipelines.runs.inputs import Inputs, inputs_of


class RunFolder:
    """The content of a run's folder now; later rounds need a new object.

    A file is read when it is first needed, and once. Every reading raises a DataError that names a missing or damaged
    file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.files = RunFiles(self.directory)

    # ---- config.json ---------------------------------------------------------------------------------------------

    @cached_property
    def header(self) -> Mapping[str, Any]:
        return read_run_config(self.directory)

    @property
    def is_described(self) -> bool:
        """Return whether there is a ``config.json``, which DVC does not fetch."""
        return self.files.config.is_file()

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the resolved configuration, nested."""
        return dict(self.header["config"])

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return the part of the configuration that can change a result."""
        return dict(self.header["identity"])

    @property
    def config_hash(self) -> str:
        """Return the name of the run: the hash of identity, data and partition."""
        return str(self.header["config_hash"])

    @property
    def code(self) -> str | None:
        """Return the SHA-256 of the sources that the run uses."""
        code: str | None = self.header.get("code")
        return code

    @property
    def environment(self) -> Mapping[str, Any]:
        """Return versions, class of processor, device, hashes of code and lock."""
        return self.header.get("environment") or {}

    @property
    def study(self) -> str | None:
        """Return the name of the study that this is the record of (`pipelines/tuning`); its rounds are trials."""
        study: str | None = self.header.get("study")
        return study

    # ---- rounds and results --------------------------------------------------------------------------------------

    @cached_property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """Return a record per evaluated round, in order; of a run that trains, of the complete rounds."""
        return _records(self.files.history, kinds.HISTORY) if self._under_way is None else self._under_way[0]

    @cached_property
    def timing(self) -> Mapping[str, Any]:
        """Return ``timing.json``, empty without one; of a run that trains, only its ``rounds``."""
        if self._under_way is not None:
            return {"rounds": self._under_way[1]}
        timing = read_json(self.files.timing, kinds.CURE) if self.files.timing.exists() else {}
        kinds.check(timing, kinds.TIMING, str(self.files.timing))
        return timing

    @property
    def legs(self) -> Sequence[Mapping[str, Any]]:
        """Return seconds and times of day per leg, in order."""
        return self.timing.get("rounds") or ()

    @property
    def is_finished(self) -> bool:
        """Return whether the run has been trained and scored."""
        return self._under_way is None and self.files.metrics.exists()

    @property
    def is_whole(self) -> bool:
        """Return whether the run has finished and is undamaged, so that it can be compared."""
        try:
            return self.is_finished and (not self.is_described or bool(self.header))
        except DataError:
            return False

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        if not self.is_finished:
            missing = next(path for path in (self.files.metrics, self.files.history) if not path.exists())
            raise DataError(f"{missing}: not found, so the run has not finished; {kinds.CURE}")
        metrics = read_json(self.files.metrics, kinds.CURE)
        kinds.check(metrics, kinds.METRICS, str(self.files.metrics))
        return metrics

    @cached_property
    def inputs(self) -> Inputs:
        return inputs_of(self.directory, self.metrics if self.is_finished else {})

    @cached_property
    def _under_way(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
        """Return history and legs of the complete rounds; None if training has ended, which may happen meanwhile."""
        if not self.files.history.exists():  # written at the end of training; before it, the checkpoint has it
            try:
                rounds = _complete(self.files.checkpoint)
            except DataError:
                if not self.files.history.exists():
                    raise
            else:
                if not self.files.history.exists():
                    return rounds
        check_seal(self.directory)
        return None


def is_in_use(directory: Path) -> bool:
    """Return whether a process trains in a folder."""
    try:
        with run_lock(directory):
            return False
    except RunError:
        return True
    except OSError:  # the folder is read-only
        return False


def _complete(checkpoint: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return history and legs of the complete rounds; later lines belong to a round that may be repeated.

    A run that was given up may have kept its history only.
    """
    state = checkpoint / "state.json"
    last = read_json(state, kinds.CURE)["round"] if state.exists() else math.inf
    history = _records(checkpoint / "history.jsonl", kinds.HISTORY, growing=True)
    legs = _records(checkpoint / "timing.jsonl", kinds.LEG, growing=True)
    return [record for record in history if record["round"] <= last], [leg for leg in legs if leg["round"] <= last]


def _records(path: Path, kind: Mapping[str, Any], *, growing: bool = False) -> list[dict[str, Any]]:
    """Return the records of a ``.jsonl`` file by round; none without a file.

    An incomplete last line of a ``growing`` file is ignored.
    """
    records = read_lines(path, kinds.CURE, growing=growing) if path.exists() else []
    for number, record in enumerate(records, start=1):
        kinds.check(record, kind, f"{path}, line {number}")
        if record.get("round") is None:
            raise DataError(f"{path}, line {number}: no 'round'; {kinds.CURE}")
    return sorted(records, key=lambda record: record["round"])
