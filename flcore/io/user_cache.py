"""The user's cache folder: engine measurements and compiled steps that all runs share."""

from __future__ import annotations

import os
from pathlib import Path

from flcore.core.errors import ConfigError

VARIABLE = "XDG_CACHE_HOME"
"""The environment variable that names the user's cache folder; without it ``.cache`` at home."""


def user_cache() -> Path:
    """Return ``protofl`` in the user's cache folder.

    Raises:
        ConfigError: the variable is unset and the user has no home folder.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named) / "protofl"
    try:
        return Path.home() / ".cache" / "protofl"
    except RuntimeError as error:
        raise ConfigError(f"no home folder to keep caches in; name a folder in {VARIABLE}") from error
