"""Parameter files, and folders from the command line. Light, so that a list needs no torch.

Files are only checked to be YAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from flcore.config.stored import resolve_paths
from flcore.core.errors import ConfigError
from flcore.core.text import is_control, shorten
from pipelines.addresses import remember
from pipelines.plan import yaml_text

DEFAULT_FILE = Path("params.yaml")


def read_params(path: Path | None) -> dict[str, Any]:
    """Return the mapping in a parameter file; paths of plug-ins, relative to the file, become absolute.

    Args:
        path: the file; None: ``params.yaml`` if it exists, else only defaults.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds no mapping.
    """
    if path is None:
        if not DEFAULT_FILE.exists():
            return {}
        path = DEFAULT_FILE
    try:
        raw = _parsed(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name another file with --params") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as 'data:' and 'method:', found {type(raw).__name__}")
    return resolve_paths(raw, path.parent)


def _parsed(path: Path) -> Any:
    with path.open(encoding="utf-8") as file:
        text = file.read(yaml_text.LONGEST + 1)  # it may be a device without an end
    for line in text.splitlines() if "://" in text else ():
        remember(line)
    return yaml_text.parse(text)


def points_of(path: Path) -> list[Any]:
    """Return the points of a sweep's file, a YAML list (else a ConfigError); the plan validates them."""
    points = _of_option("--rows", path)
    if not isinstance(points, list) or not points:
        raise ConfigError(f"--rows {path}: expected a list of points, such as [{{method.mu: 0.1}}, {{method.mu: 1}}]")
    return points


def claims_of(path: Path) -> dict[str, Any]:
    """Return the claims of a comparison's file, a YAML mapping by name (else a ConfigError)."""
    claims = _of_option("--claims", path)
    if not isinstance(claims, dict) or not claims:
        raise ConfigError(f"--claims {path}: expected claims by name, such as ours: {{better: gfpl, than: fedavg}}")
    return {str(name): claim for name, claim in claims.items()}


def _of_option(option: str, path: Path) -> Any:
    try:
        return _parsed(path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{option} {path}: not valid YAML: {error}") from error


def with_plugins(raw: Mapping[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Return parameters with the plug-ins of ``--plugin`` after their own."""
    if not files:
        return dict(raw)
    own = raw.get("plugins") or []
    if not isinstance(own, list):
        raise ConfigError(f"plugins = {shorten(own)}: expected a list of files")
    return {**raw, "plugins": [*own, *(str(file.absolute()) for file in files)]}


def dated(folder: Path, day: date) -> Path:
    """Return a folder with ``{date}`` in its name replaced by a day; ConfigError: it has control characters."""
    if any(map(is_control, str(folder))):
        raise ConfigError(f"{shorten(str(folder))}: a folder's name has no control characters; choose another --out")
    return Path(str(folder).replace("{date}", day.isoformat()))
