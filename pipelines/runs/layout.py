"""Small files that are written atomically, with the same bytes for the same content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flcore.io import files
from flcore.core.errors import DataError
from flcore.experiment.run_folder import RunFiles, write_text
from flcore.experiment.run_folder import write_result as write_json

__all__ = ["TRACKED", "RunFiles", "read_json", "write_json", "write_text"]


TRACKED = ".mlflow.json"
"""File in a run folder: its run in MLflow, by store."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; DataError: it is missing, or has none."""
    if not path.exists():
        raise DataError(f"{path}: not found; carry out the command that writes it first")
    return files.read_json(path, "delete it and run again")
