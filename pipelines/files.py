"""Small files written all or nothing, with the same bytes for the same content; and the layout of a run directory."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flcore.errors import DataError, RunError

logger = logging.getLogger(__name__)


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new content, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys and a newline at the end."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DataError: missing or not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; run the stage that makes it first") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: damaged ({error}); delete it and run again") from error


def take_lock(file: IO[Any], *, wait: bool) -> bool:
    """Lock an open file until it is closed or its process ends, however it ends.

    Args:
        file: what processes agree upon to lock.
        wait: until another process lets go of it.

    Returns:
        False if another holds it and ``wait`` is False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks; that must not stop the work
        logger.debug("no lock on %s: %s", file.name, error)
    return True


@contextmanager
def sole_use(directory: Path) -> Iterator[None]:
    """Keep other processes out of a folder for as long as this lasts; a process that ends, however, lets go of it.

    Raises:
        RunError: another process is at work there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".running"
    while True:
        with path.open("w") as file:
            if not take_lock(file, wait=False):
                raise RunError(
                    f"{directory}: another process is at work on this run; wait for it or end it, "
                    "or choose another --out"
                )
            if not _is_at(file, path):  # its last holder has just removed it: whoever comes next makes a new one
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(file: IO[Any], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class RunFiles:
    """Where things lie in a run directory (ARCHITECTURE, "A run on disk")."""

    directory: Path

    @property
    def config(self) -> Path:
        """Resolved configuration, run hash and environment; a side file, since it names this machine."""
        return self.directory / "config.json"

    @property
    def checkpoint(self) -> Path:
        """What a running run needs to resume; gone when it has finished."""
        return self.directory / "checkpoint"

    @property
    def history(self) -> Path:
        """A record per evaluated round; written last, so that its presence means the run has finished."""
        return self.directory / "history.jsonl"

    @property
    def model(self) -> Path:
        """The global model as a plain state dict; without tensors where a method has none."""
        return self.directory / "model.safetensors"

    @property
    def server(self) -> Path:
        """Everything the server holds, as a record."""
        return self.directory / "server.safetensors"

    @property
    def clients(self) -> Path:
        """What clients keep: one record per client that remembers something."""
        return self.directory / "clients"

    @property
    def timing(self) -> Path:
        """Seconds by round and phase; a side file."""
        return self.directory / "timing.json"

    @property
    def metrics(self) -> Path:
        """The final scores and costs."""
        return self.directory / "metrics.json"

    @property
    def curves(self) -> Path:
        """The history as a table for plotting tools."""
        return self.directory / "curves.csv"

    @property
    def analyses(self) -> Path:
        """Data of the analyses that were asked for: ``index.json``, and ``<name>.npz`` and ``<name>.csv`` of each."""
        return self.directory / "analyses"

    @property
    def figures(self) -> Path:
        """Figures with their data: ``<name>.svg`` and ``.csv``; of analyses ``<name>.png``."""
        return self.directory / "figures"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.directory / "report.html"
