"""From ``params.yaml`` and ``--set`` to a checked configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flcore.config import SECTIONS, Config, own_keys
from flcore.errors import ConfigError
from flcore.params import unknown_key
from flcore.plugins import located

DEFAULT_FILE = Path("params.yaml")


def read_params(path: Path | None) -> dict[str, Any]:
    """The mapping in a parameter file; plug-ins in it stand relative to the file, and are returned absolute.

    Args:
        path: the file; None takes ``params.yaml`` where there is one, else nothing but defaults.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds no mapping.
    """
    if path is None:
        if not DEFAULT_FILE.exists():
            return {}
        path = DEFAULT_FILE
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name another file with --params") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as 'data:' and 'method:', found {type(raw).__name__}")
    return located(raw, path.parent)


def with_plugins(raw: Mapping[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Parameters with the plug-ins of ``--plugin`` behind their own."""
    if not files:
        return dict(raw)
    own = raw.get("plugins") or []
    if not isinstance(own, list):
        raise ConfigError(f"plugins = {own}: expected a list of files")
    return {**raw, "plugins": [*own, *(str(file.absolute()) for file in files)]}


def override(raw: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply ``KEY=VALUE`` assignments with dotted keys; values are read as YAML.

    Choosing another ``name`` in a section (another method, partitioner, ...) drops that section's keys of the earlier
    choice: they were meant for it and would be errors. Assignments to such keys stay, in whatever order they are given.

    Raises:
        ConfigError: an assignment without ``=``, or a key that leads nowhere.
    """
    pairs = [_split(assignment) for assignment in assignments]
    result = copy.deepcopy(dict(raw))
    for (section, *rest), value in pairs:
        current = result.get(section)
        if rest == ["name"] and isinstance(current, dict) and current.get("name") != value:
            result[section] = {key: kept for key, kept in current.items() if key in own_keys(section)}
    for keys, value in pairs:
        if keys[0] not in SECTIONS:
            raise ConfigError(f"--set {'.'.join(keys)}: {unknown_key(keys[0], keys[0], SECTIONS)}")
        _assign(result, keys, value)
    return result


def _split(assignment: str) -> tuple[list[str], Any]:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {assignment}: expected KEY=VALUE, such as --set local.lr=0.05")
    try:
        return key.strip().split("."), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment}: the value is not valid YAML") from error


def _assign(mapping: dict[str, Any], keys: list[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1], 1):
        inner = mapping.setdefault(key, {})
        if inner is None:
            inner = mapping[key] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {'.'.join(keys)}: {'.'.join(keys[:depth])} is a value, not a section")
        mapping = inner
    mapping[keys[-1]] = value


def for_entry(raw: Mapping[str, Any], method: str | None, seed: int | None) -> dict[str, Any]:
    """The parameters of one run of a comparison: its method with what ``compare.settings`` says of it, and its seed."""
    assignments: dict[str, Any] = {}
    if method is not None:
        compare = raw.get("compare")
        settings = compare.get("settings") if isinstance(compare, Mapping) else None
        own = settings.get(method) if isinstance(settings, Mapping) else None
        if own is not None and not isinstance(own, Mapping):
            raise ConfigError(
                f"compare.settings.{method} = {own}: expected dotted keys with values, such as local.lr: 0.05"
            )
        assignments = {"method.name": method, **(own or {})}
    if seed is not None:
        assignments["seed"] = seed
    return override(
        raw, [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in assignments.items()]
    )


def load_config(
    params: Path | None, assignments: Iterable[str] = (), *, method: str | None = None, seed: int | None = None
) -> Config:
    """The checked configuration of one run.

    Args:
        params: parameter file; None as in :func:`read_params`.
        assignments: ``KEY=VALUE`` overrides.
        method: run as this entry of a comparison, see :func:`for_entry`. seed: likewise.

    Raises:
        ConfigError: as documented for each step.
    """
    return Config.from_mapping(for_entry(override(read_params(params), assignments), method, seed))
