"""A plug-in as a module, and the finder that loads it from the bytes that were hashed."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import ClassVar

PACKAGE = "protofl_plugins"
"""Modules of files are below it, each under its file's name."""


@dataclass(frozen=True)
class Plugin:
    """A module of a user's own.

    Attributes:
        module: under which it is imported.
        path: the file, absolute.
        sha256: of its content.
        source: its content.
    """

    module: str
    path: Path
    sha256: str
    source: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, module: str, path: Path, source: bytes) -> Plugin:
        """Return the plug-in of a source."""
        return cls(module, path, hashlib.sha256(source).hexdigest(), source)

    @property
    def name(self) -> str:
        """A file's name without ``.py``; of an importable module its own."""
        return self.module.removeprefix(f"{PACKAGE}.")

    def to_mapping(self) -> dict[str, str]:
        """Place and content, as JSON values; of an importable module its name too."""
        where = {} if self.name != self.module else {"module": self.module}
        return {"path": str(self.path), "sha256": self.sha256, **where}


class Finder:
    """Load modules of plug-ins from the bytes that were hashed; Python's own loader trusts a cache by time and size."""

    sources: ClassVar[dict[str, Plugin]] = {}

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        below = any(module.startswith(f"{name}.") for module in cls.sources)
        if name not in cls.sources and (not below or (name != PACKAGE and PathFinder.find_spec(name, path))):
            return None
        spec = importlib.util.spec_from_loader(name, cls(), is_package=below)  # type: ignore[arg-type]
        if below and spec is not None and name in cls.sources and cls.sources[name].path.name == "__init__.py":
            spec.submodule_search_locations = [str(cls.sources[name].path.parent)]  # what no plug-in needs is there
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        plugin = self.sources.get(module.__name__)
        if plugin is not None:
            module.__file__ = str(plugin.path)
            exec(compile(plugin.source, str(plugin.path), "exec"), vars(module))
            vars(module)["__plugin__"] = plugin.sha256


sys.meta_path.insert(0, Finder)
