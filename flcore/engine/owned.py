"""Records that name their run and their place in it: a moved file is not read as another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from flcore.io.records import Payloads, Record, load_record, save_record


def save_owned(path: Path, record: Payloads, place: Any, run: str) -> None:
    """Write a record.

    Args:
        path: the file. record: its content.
        place: in the run, as a JSON value. run: digest of the run's name; empty if unknown.
    """
    save_record(path, record, {"place": place, "run": run})


def load_owned(path: Path, place: Any, run: str, cure: str) -> Record:
    """Read what :func:`save_owned` wrote; arguments as there.

    Raises:
        DataError: it is missing, damaged, or something else; the message ends with ``cure``.
    """
    record, extra = load_record(path, cure=cure)
    if extra.get("place") != place or (run and extra.get("run") not in ("", run)):
        raise DataError(f"{path}: belongs to another run or another place in it; {cure}")
    return record
