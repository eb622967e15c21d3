"""Parameter files, and folders as a command line names them. Light, so that a list answers without torch.

Of a file nothing is checked here but that it is YAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from flcore.errors import ConfigError
from flcore.plugin_places import located

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
    import yaml  # a third of what `protofl --help` takes

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name another file with --params") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as 'data:' and 'method:', found {type(raw).__name__}")
    return located(raw, path.parent)


def points_of(path: Path) -> list[Any]:
    """The points of a file for a sweep: a YAML list; what stands in it is checked where they are planned.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds no list.
    """
    import yaml

    try:
        points = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--rows {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rows {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(points, list) or not points:
        raise ConfigError(f"--rows {path}: expected a list of points, such as [{{method.mu: 0.1}}, {{method.mu: 1}}]")
    return points


def with_plugins(raw: Mapping[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Parameters with the plug-ins of ``--plugin`` behind their own."""
    if not files:
        return dict(raw)
    own = raw.get("plugins") or []
    if not isinstance(own, list):
        raise ConfigError(f"plugins = {own}: expected a list of files")
    return {**raw, "plugins": [*own, *(str(file.absolute()) for file in files)]}


def dated(folder: Path, day: date) -> Path:
    """A folder with ``{date}`` in its name replaced by a day, as 2026-11-30."""
    return Path(str(folder).replace("{date}", day.isoformat()))
