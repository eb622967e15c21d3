"""Parameter files, and folders as a command line names them. Light, so that a list answers without torch.

Of a file nothing is checked here but that it is YAML.
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
from pipelines.config import yaml_text

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
        text = file.read(yaml_text.LONGEST + 1)  # it may be a device that never ends
    for line in text.splitlines() if "://" in text else ():
        remember(line)
    return yaml_text.parse(text)


def points_of(path: Path) -> list[Any]:
    """The points of a file for a sweep: a YAML list; what stands in it is checked where they are planned.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds no list.
    """
    points = _of_option("--rows", path)
    if not isinstance(points, list) or not points:
        raise ConfigError(f"--rows {path}: expected a list of points, such as [{{method.mu: 0.1}}, {{method.mu: 1}}]")
    return points


def claims_of(path: Path) -> dict[str, Any]:
    """The claims of a file for a comparison: a YAML mapping by name; the configuration checks what stands in it.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds no mapping.
    """
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
    """Parameters with the plug-ins of ``--plugin`` behind their own."""
    if not files:
        return dict(raw)
    own = raw.get("plugins") or []
    if not isinstance(own, list):
        raise ConfigError(f"plugins = {shorten(own)}: expected a list of files")
    return {**raw, "plugins": [*own, *(str(file.absolute()) for file in files)]}


def dated(folder: Path, day: date) -> Path:
    """A folder with ``{date}`` in its name replaced by a day, as 2026-11-30.

    Raises:
        ConfigError: its name has control characters.
    """
    if any(map(is_control, str(folder))):
        raise ConfigError(f"{shorten(str(folder))}: a folder's name has no control characters; choose another --out")
    return Path(str(folder).replace("{date}", day.isoformat()))
