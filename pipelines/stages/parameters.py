"""Values in ``params.yaml`` with which the stages of ``dvc.yaml`` would read files that DVC does not watch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flcore.core.text import shorten

PLUGINS = Path("plugins")
"""Folder in the project for plug-ins that DVC's stages depend on."""


def problem(folder: Path, raw: Mapping[str, Any]) -> str | None:
    """Return the reason why DVC cannot run the stages with these parameters; None if it can, or says why itself."""
    data = raw.get("data")
    root = data.get("root") if isinstance(data, Mapping) else None
    if isinstance(root, str) and root.startswith("~"):
        return f"data.root = {shorten(root)}: DVC does not know ~; write the whole path"
    listed = raw.get("plugins")
    entries = listed if isinstance(listed, list) else []
    paths = [entry.get("path") if isinstance(entry, Mapping) else entry for entry in entries]
    return unseen_plugin(folder, [Path(path) for path in paths if isinstance(path, str)])


def unseen_plugin(folder: Path, paths: Iterable[Path]) -> str | None:
    """Return a message on the first plug-in with changes that DVC would not see; None if there is none."""
    home = (folder / PLUGINS).resolve()
    unseen = next((path for path in paths if not path.resolve().is_relative_to(home)), None)
    if unseen is None:
        return None
    return f"plugins: {shorten(unseen.name)} is not in {PLUGINS}/, where DVC sees changes; move it there"
