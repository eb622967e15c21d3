"""Where this machine keeps what any run of the user may need again: measurements of the engine, compiled steps."""

from __future__ import annotations

import os
from pathlib import Path

from flcore.core.errors import ConfigError

VARIABLE = "XDG_CACHE_HOME"
"""The environment variable that names the user's cache folder; without it ``.cache`` at home."""


def user_cache() -> Path:
    """``protofl`` in the user's cache folder.

    Raises:
        ConfigError: nobody says where that is, and the user has no home.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named) / "protofl"
    try:
        return Path.home() / ".cache" / "protofl"
    except RuntimeError as error:
        raise ConfigError(f"no home folder to keep caches in; name a folder in {VARIABLE}") from error
