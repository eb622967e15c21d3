"""``protofl new method NAME``: writes a new method and its test; both work unchanged."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from flcore.core.errors import ConfigError
from flcore.experiment.run_folder import refuse_inside_a_run, write_text
from flcore.methods import METHODS

_TEMPLATES = Path(__file__).parent / "templates"


def write(name: str, folder: Path) -> tuple[Path, Path]:
    """Write ``NAME.py`` and ``test_NAME.py`` in a folder, and return both files.

    Raises:
        ConfigError: the name is not valid for a method, a file exists, or the folder is one that a run may remove.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"new method {name}: a name is made of a-z, 0-9 and _, a letter first, and no Python keyword")
    if name in METHODS:
        raise ConfigError(f"new method {name}: there is a method called so already; choose another name")
    refuse_inside_a_run(folder)
    method, test = folder / f"{name}.py", folder / f"test_{name}.py"
    for file in (method, test):
        if file.exists():
            raise ConfigError(f"{file}: is there already; choose another name, or another folder with --out")
    words = {"name": name, "class_name": "".join(part.capitalize() for part in name.split("_"))}
    for file, template in ((method, "new_method.py.txt"), (test, "new_method_test.py.txt")):
        text = (_TEMPLATES / template).read_text(encoding="utf-8")
        write_text(file, Template(text).substitute(words))
    return method, test
