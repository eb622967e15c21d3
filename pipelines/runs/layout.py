"""Small files written all or nothing, with the same bytes for the same content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flcore.errors import DataError
from flcore.files import NOT_JSON
from flcore.run_folder import RunFiles
from flcore.wording import brief

__all__ = ["RunFiles", "read_json", "write_json", "write_text"]


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
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; run the stage that makes it first") from error
    except (*NOT_JSON, OSError) as error:
        raise DataError(f"{path}: damaged ({brief(str(error))}); delete it and run again") from error
