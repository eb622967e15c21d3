"""One-line descriptions of registry entries, read from the sources without importing them.

Importing a method imports torch, which takes seconds, too long for a list. The texts come from the classes that the
registries' tables name; a test compares them with the imported ones.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import flcore
from flcore.config.analyses import SUMMARIES
from flcore.core.text import first_line

_ROOT = Path(flcore.__file__).parent
TABLES = {
    "methods": "methods/registry.py",
    "datasets": "data/sources/__init__.py",
    "partitioners": "data/partitioners/__init__.py",
    "models": "models/__init__.py",
    "samplers": "sampling/__init__.py",
}
"""Tables of registries, by kind."""
ENGINES = {
    "local": "in the main process (workers: 0), or in a pool of processes on this machine",
    "ray": "in Ray actors with their share of CPUs and GPUs, on this machine or on a cluster (protofl[ray])",
}
KINDS = (*TABLES, "engines", "analyses")
"""Kinds of entries for ``protofl list``."""

SHOWN = {kind.removesuffix("s"): kind for kind in (*TABLES, "engines")}
"""Kinds of entries for ``protofl show`` → the same kind for ``protofl list``."""


@dataclass(frozen=True)
class Headline:
    """A registry entry, described in a line."""

    name: str
    summary: str
    citation: str = ""

    @property
    def line(self) -> str:
        return f"{self.name:20s} {self.summary}" + (f"  [{self.citation}]" if self.citation else "")


def names(kind: str) -> list[str]:
    """Return the names of the package's own entries of one of :data:`KINDS`, in order."""
    return [*_places(kind)] if kind in TABLES else [entry.name for entry in headlines(kind)]


def headlines(kind: str) -> list[Headline]:
    """Return the package's own entries of one of :data:`KINDS`, in order, without plug-ins."""
    if kind not in TABLES:
        return [Headline(name, summary) for name, summary in (ENGINES if kind == "engines" else SUMMARIES).items()]
    entries = []
    for name, place in _places(kind).items():
        module, _, attribute = place.partition(":")
        texts = _texts(_ROOT.parent.joinpath(*module.split(".")).with_suffix(".py"), attribute)
        entries.append(Headline(name, texts.get("summary", ""), texts.get("citation", "")))
    return entries


def _places(kind: str) -> dict[str, str]:
    """Return name → ``module:Class`` from the call of ``Registry`` in a source."""
    calls = (node for node in ast.walk(_parsed(_ROOT / TABLES[kind])) if isinstance(node, ast.Call))
    places = next(call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Registry")
    table: dict[str, str] = ast.literal_eval(places)
    return table


def _texts(path: Path, name: str) -> dict[str, str]:
    """Return texts by attribute: arguments of the class statement, the docstring's first line, and assignments."""
    node = next(node for node in _parsed(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
    pairs += [
        (ast.unparse(each.target), each.value) for each in node.body if isinstance(each, ast.AnnAssign) and each.value
    ]
    texts = {str(key): v.value for key, v in pairs if isinstance(v, ast.Constant) and isinstance(v.value, str)}
    return {"summary": first_line(ast.get_docstring(node) or ""), **texts}


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
