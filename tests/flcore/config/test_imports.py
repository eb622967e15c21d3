"""Invariant 1: `flcore` needs seven packages and the standard library, and nothing that operates or watches runs."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flcore

SEVEN = {"torch", "torchvision", "numpy", "sklearn", "scipy", "safetensors", "pydantic"}
ALLOWED = SEVEN | {"flcore", "PIL", "threadpoolctl", "typing_extensions", "filelock"}  # requirements of the seven
MODULES = {"scikit-learn": "sklearn", "pyyaml": "yaml"}
REPOSITORY = Path(flcore.__file__).parents[1]


def declared() -> set[str]:
    """Module names of everything pyproject.toml depends on."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[<>=\[ ]", entry)[0] for entries in lists for entry in entries}
    return {MODULES.get(name, name) for name in names}


def test_the_seven_are_declared() -> None:
    assert declared() >= SEVEN
    assert {"prefect", "mlflow", "dvc", "optuna", "ray", "yaml", "pandas"} <= declared()


def test_what_is_not_asked_for_is_not_imported() -> None:
    """``import flcore`` is light; a configuration imports no slow library and no method but those that it names."""
    code = """
import sys, flcore
print("torch" in sys.modules, callable(flcore.run))
import flcore.config.schema
print(sorted({"torchvision", "sklearn", "pandas"} & set(sys.modules)))
from flcore.methods import METHODS
names, loaded = list(METHODS), {name for name in sys.modules if name.startswith("flcore.methods.")}
METHODS["fedprox"]
print(len(names) > 20, sorted({name for name in sys.modules if name.startswith("flcore.methods.")} - loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.splitlines() == ["False True", "[]", "True ['flcore.methods.fedavg', 'flcore.methods.fedprox']"]


@pytest.mark.slow
def test_every_module_imports_without_the_other_packages() -> None:
    """Whatever else pyproject.toml declares is made unimportable (threadpoolctl is scikit-learn's own dependency)."""
    modules = [module.name for module in pkgutil.walk_packages(flcore.__path__, "flcore.")]
    assert {"flcore.config.schema", "flcore.engine.rounds", "flcore.data.partition"} <= set(modules)
    banned = sorted(declared() - ALLOWED)
    code = f"""
import importlib, sys
for name in {banned!r}:
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
for name in {["flcore", *modules]!r}:
    importlib.import_module(name)
loaded = {{name.partition(".")[0] for name, module in sys.modules.items() if module is not None}}
print(*sorted(loaded & set({banned!r})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
