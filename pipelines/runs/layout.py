"""Small files written all or nothing, with the same bytes for the same content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flcore.errors import DataError
from flcore.files import NOT_JSON
from flcore.run_folder import RunFiles, write_text
from flcore.run_folder import write_result as write_json
from flcore.wording import brief

__all__ = ["RunFiles", "read_json", "write_json", "write_text"]


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
