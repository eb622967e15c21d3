"""Keys that the stages of ``dvc.yaml`` require in ``params.yaml``, since DVC has no defaults for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flcore.core.text import shorten
from pipelines.plan import yaml_text

PLUGINS = Path("plugins")
"""Folder in the project for plug-ins that DVC's stages depend on."""

_IMAGES = "images"
"""An empty folder in the project, for own images."""


def missing_keys(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a stage names and the parameters lack, each with a value that has no effect.

    Args:
        folder: of ``dvc.yaml``; if it has none, or one that cannot be read, nothing is missing.
        raw: the content of its ``params.yaml``.
    """
    try:
        text = (folder / "dvc.yaml").read_text(encoding="utf-8")
        stages = yaml_text.parse(text)["stages"]
        named = [key for stage in stages.values() for key in stage.get("params", ())]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # DVC reports the error
        return {}
    absent = dict.fromkeys(key for key in named if isinstance(key, str) and not _is_there(key, raw))
    if "${data.root}" in text and _value("data.root", raw) is None:  # DVC requires that dependencies exist
        absent["data.root"] = None
    absent = {key: None for key in absent if not any(other.startswith(f"{key}.") for other in absent)}
    if not absent:
        return {}
    from flcore.config.schema import Config

    defaults = Config().to_mapping()
    values = {key: _IMAGES if key == "data.root" else _value(key, defaults) for key in absent}
    return {key: {} if isinstance(value, Mapping) else value for key, value in values.items()}


def problem(folder: Path, raw: Mapping[str, Any]) -> str | None:
    """Return the reason why DVC cannot run the stages with these parameters; None if it can."""
    missing = missing_keys(folder, raw)
    if missing:
        return advice(missing)
    root = _value("data.root", raw)
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


def advice(missing: Mapping[str, Any]) -> str:
    """Return a message on missing keys, with what to add."""
    values = ", ".join(f"{key}: {json.dumps(value)}" for key, value in missing.items())
    return f"params.yaml lacks keys that dvc.yaml names, and DVC knows no defaults; add {values}"


def _is_there(key: str, raw: Any) -> bool:
    for part in key.split("."):
        if not isinstance(raw, Mapping) or part not in raw:
            return False
        raw = raw[part]
    return True


def _value(key: str, values: Any) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
