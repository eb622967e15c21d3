"""Where the plug-ins of a parameter file lie. Apart from `flcore/plugins.py`, which imports torch with the methods."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def located(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Parameters whose plug-ins are said relative to a folder, with their places made absolute."""
    entries = raw.get("plugins")
    if not isinstance(entries, list | tuple):
        return dict(raw)
    base = folder.absolute()
    moved: list[Any] = []
    for entry in entries:
        if isinstance(entry, str | os.PathLike):
            moved.append(str(base / _at_home(entry)))
        elif isinstance(entry, Mapping) and isinstance(entry.get("path"), str):
            moved.append({**entry, "path": str(base / _at_home(entry["path"]))})
        else:
            moved.append(entry)  # refused by `load_all`
    return {**raw, "plugins": moved}


def _at_home(entry: str | os.PathLike[str]) -> Path:
    try:
        return Path(entry).expanduser()
    except RuntimeError:  # of a user whom nobody knows; refused by `load`
        return Path(entry)
