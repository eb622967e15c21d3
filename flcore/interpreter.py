"""How other Python processes are started: what they import is what is installed, not what lies in a working folder.

``python -m`` and ``python -c`` search the working folder first. A file ``random.py`` in it, or a folder ``flcore``,
would be imported in place of the library of that name, and a folder that somebody sent would have its code run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python(*arguments: str) -> list[str]:
    """Return the command of a Python process of this environment, without the working folder in its search path."""
    return [sys.executable, "-P", *arguments]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process whose own Python processes keep the working folder out of theirs too.

    Args:
        changes: variables beside those of this process.
    """
    return {**os.environ, **(changes or {}), **_SAFE_PATH}
