"""Read stored configurations: removed keys and relative plug-in paths. This module does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLUGIN_FOLDER = "plugins"
"""Subfolder of a run folder that holds copies of the run's plug-ins."""

REMOVED: Mapping[str, Mapping[str, Any]] = {"engine": {"stack_runs": False}}
"""Section → removed key → the only value that is still supported."""

_WITHOUT_EFFECT = {"engine": {"durability"}}
"""Section → removed keys that could not change a result."""


def resolve_paths(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration with absolute plug-in paths; relative ones start in ``folder``."""
    entries = raw.get("plugins")
    if not isinstance(entries, list | tuple):
        return dict(raw)

    at_home = os.path.expanduser  # `Path.expanduser` raises for unknown users

    def resolve(entry: Any) -> Any:
        if isinstance(entry, str | os.PathLike):
            return str(folder.absolute() / at_home(entry))
        if isinstance(entry, Mapping) and isinstance(entry.get("path"), str):
            return {**entry, "path": resolve(entry["path"])}
        return entry  # invalid: `plugins.load_all` raises

    return {**raw, "plugins": [resolve(entry) for entry in entries]}


def without_removed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration without removed keys that had no effect or have their supported value."""
    result = dict(stored)
    for section, removed in REMOVED.items():
        if isinstance(values := stored.get(section), Mapping):
            dropped = _WITHOUT_EFFECT.get(section, ())
            result[section] = {
                key: value
                for key, value in values.items()
                if key not in dropped and (key not in removed or value != removed[key])
            }
    return result


def with_removed(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity with the removed keys, so that the names of stored runs stay the same."""
    return {**identity, **{section: {**identity[section], **removed} for section, removed in REMOVED.items()}}


def as_decided(identity: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's identity with a stored run's values in place of ``auto`` in the section ``engine``.

    A run stores what ``auto`` stood for, and a configuration does not know it before its data are read.
    """
    engine, values = identity["engine"], stored.get("engine", {})
    decided = {key: values.get(key, value) if value == "auto" else value for key, value in engine.items()}
    return {**identity, "engine": decided}
