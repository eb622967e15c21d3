"""Snapshot of the package's sources at import.

Modules imported later use it, so the code in memory matches the fingerprint. A run is refused if the files have changed
since.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

from flcore.core.errors import RunError

ROOT = Path(__file__).parent.parent
"""The folder of `flcore`."""


def read_sources(root: Path) -> dict[str, bytes]:
    """Return the Python sources below a folder by their relative paths, ``methods/fedavg.py``."""
    # Four times as fast as Path.rglob, and every command does it.
    paths = [Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(".py")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


PACKAGE_SOURCES: Mapping[str, bytes] = read_sources(ROOT)
"""The sources of the package when it was imported."""


_PIECES = re.compile(
    rb'''("""(?:[^\\"]+|\\.|"(?!""))*"""|\'\'\'(?:[^\\']+|\\.|'(?!''))*\'\'\''''
    rb"""|"(?:[^"\\\n]+|\\.)*"|'(?:[^'\\\n]+|\\.)*')|  #[^\n]*|\n(?: *(?:#[^\n]*)?\n)+""",
    re.DOTALL,
)
"""Strings, comments after code, and sequences of lines without code."""


@cache
def code_digest(source: bytes) -> str:
    """Return the SHA-256 of a Python source without comments and empty lines, which change no result."""
    code = _PIECES.sub(lambda found: found[1] or found[0][:1].strip(b" "), b"\n" + source.replace(b"\r\n", b"\n"))
    return hashlib.sha256(code.strip()).hexdigest()


class EditedError(RunError):
    """A file of a run's code has changed since the command began."""

    @classmethod
    def of(cls, file: object) -> EditedError:
        """Return the error that names the file."""
        return cls(f"{file} was edited while this command runs; start the command again")


_edited_before: set[str] = set()
"""Files that were edited between the start of the parent process and the start of this one."""


@cache
def digests() -> dict[str, str]:
    """Return the SHA-256 of each of the sources."""
    return {name: hashlib.sha256(source).hexdigest() for name, source in PACKAGE_SOURCES.items()}


def compare_with_parent(parent: Mapping[str, str]) -> None:
    """Record which sources differ from the :func:`digests` of the parent process."""
    here = digests()
    _edited_before.update(name for name in {*here, *parent} if here.get(name) != parent.get(name))


def source_file(module: str, sources: Mapping[str, bytes]) -> str | None:
    """Return the file of a module of the package; None if there is none."""
    package, _, inner = module.partition(".")
    stem = inner.replace(".", "/")
    names = (f"{stem}/__init__.py".lstrip("/"), f"{stem}.py") if package == "flcore" else ()
    return next((name for name in names if name in sources), None)


def refuse_edited(modules: Iterable[str] | None = None) -> None:
    """Refuse to continue if files of the package have changed since this process or its parent started.

    Args:
        modules: check only these modules, and ignore others than of the package.

    Raises:
        EditedError: names the first file that was edited.
    """
    files = (
        PACKAGE_SOURCES if modules is None else {source_file(module, PACKAGE_SOURCES) for module in modules} - {None}
    )
    for name in sorted(filter(None, files)):
        if _on_disk(name) != PACKAGE_SOURCES[name]:
            raise EditedError.of(f"flcore/{name}")
        if name in _edited_before:
            raise EditedError(
                f"flcore/{name} is not the file that this command began with; start the command again, with the same "
                "version of protofl on every machine"
            )


def _on_disk(name: str) -> bytes | None:
    try:
        return (ROOT / name).read_bytes()
    except OSError:  # removed, or being replaced
        return None


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        name = source_file(fullname, PACKAGE_SOURCES)
        if name is None or _on_disk(name) == PACKAGE_SOURCES[name]:
            return super().get_code(fullname)
        return self.source_to_code(PACKAGE_SOURCES[name], self.path)


class _Finder:
    """Find modules of the package as Python does, and load them from :data:`PACKAGE_SOURCES`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith("flcore.") else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def install() -> None:
    """Let all further imports of the package use the snapshot; `importlib.reload` then returns the old source."""
    sys.meta_path.insert(0, _Finder())
