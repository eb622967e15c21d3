"""The folder in which a deployment was registered: flows work in it, and import nothing from it.

Prefect's own step ``set_working_directory`` puts the folder first on the search path: a file ``random.py`` in it would
be imported in place of Python's own. With the step of this module the process of a flow starts in an empty folder, and
moves to the working folder once protofl and its libraries are imported.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = "PROTOFL_WORKING_FOLDER"


def steps() -> list[dict[str, dict[str, str]]]:
    """Return the steps that Prefect takes before a flow of this folder."""
    return [{f"{__name__}.{set_working_folder.__name__}": {"directory": str(Path.cwd())}}]


def set_working_folder(directory: str) -> None:
    """Set in which folder the process of a flow works, which inherits the environment of this one."""
    os.environ[_FOLDER] = directory


def enter() -> None:
    """Move to the working folder that :func:`set_working_folder` named; without one, do nothing."""
    directory = os.environ.pop(_FOLDER, None)  # processes that this one starts may work elsewhere
    if directory is not None:
        os.chdir(directory)
