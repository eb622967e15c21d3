"""Start Python processes that ignore the working folder when they import modules.

``python -m`` and ``python -c`` search the working folder first. A file ``random.py`` in it, or a folder ``flcore``,
would be imported in place of the library of that name, and code in a downloaded folder would run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python(*arguments: str) -> list[str]:
    """Return the command of a Python process of this environment, without the working folder in its search path."""
    return [sys.executable, "-P", *arguments]


def safe_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment whose Python processes ignore the working folder.

    Args:
        changes: additional variables.
    """
    return {**os.environ, **(changes or {}), **_SAFE_PATH}
