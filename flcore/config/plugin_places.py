"""Resolve the plug-in paths of a parameter file. It does not import torch, unlike `flcore/config/plugins.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def resolve_paths(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Parameters whose plug-ins are said relative to a folder, with their places made absolute."""
    entries = raw.get("plugins")
    if not isinstance(entries, list | tuple):
        return dict(raw)
    base = folder.absolute()
    at_home = os.path.expanduser  # `Path.expanduser` raises if the user is unknown
    moved: list[Any] = []
    for entry in entries:
        if isinstance(entry, str | os.PathLike):
            moved.append(str(base / at_home(entry)))
        elif isinstance(entry, Mapping) and isinstance(entry.get("path"), str):
            moved.append({**entry, "path": str(base / at_home(entry["path"]))})
        else:
            moved.append(entry)  # refused by `load_all`
    return {**raw, "plugins": moved}
