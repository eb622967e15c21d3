"""Configuration keys that earlier versions had: a stored run that has them is read, and keeps its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED: Mapping[str, Mapping[str, Any]] = {"engine": {"stack_runs": False}}
"""Section → removed key → the value that means what is done now."""


def without_removed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration without removed keys; one with another value stays, to be refused as unknown."""
    kept = dict(stored)
    for section, removed in REMOVED.items():
        if isinstance(kept.get(section), Mapping):
            kept[section] = {k: v for k, v in kept[section].items() if k not in removed or v != removed[k]}
    return kept


def with_removed(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity with removed keys, so that runs of earlier versions are found under their names."""
    return {**identity, **{section: {**identity[section], **removed} for section, removed in REMOVED.items()}}
