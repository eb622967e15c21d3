"""Trees of files for the tests of image folders, written as folders or as zips."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


def as_folder(tree: Mapping[str, bytes], path: Path) -> Path:
    for name, content in tree.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def as_zip(tree: Mapping[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for name, content in tree.items():
            archive.writestr(name, content)
    return path.with_suffix(".zip")


Packed = Callable[[Mapping[str, bytes], Path], Path]
both = pytest.mark.parametrize("packed", [as_folder, as_zip])
