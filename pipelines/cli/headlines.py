"""What there is, a line each, read from the sources without importing them.

Importing a method imports torch, which takes seconds, and a list should not. What is read are texts in the
classes that the tables of registries name; a test holds them against what importing gives.
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
"""Registries, by what they list."""
ENGINES = {
    "local": "in the main process (workers: 0), or in a pool of processes on this machine",
    "ray": "in Ray actors with their share of CPUs and GPUs, on this machine or on a cluster (protofl[ray])",
}
KINDS = (*TABLES, "engines", "analyses")
"""What can be listed."""

SHOWN = {
    "method": "methods",
    "dataset": "datasets",
    "partitioner": "partitioners",
    "model": "models",
    "sampler": "samplers",
    "engine": "engines",
}
"""What can be shown → the kind that it is listed as."""


@dataclass(frozen=True)
class Headline:
    """An entry of a registry in a line."""

    name: str
    summary: str
    citation: str = ""

    @property
    def line(self) -> str:
        return f"{self.name:20s} {self.summary}" + (f"  [{self.citation}]" if self.citation else "")


def names(kind: str) -> list[str]:
    """The names of the package's own entries of a kind, in order.

    Args:
        kind: one of :data:`KINDS`.
    """
    return list(places(kind)) if kind in TABLES else [entry.name for entry in headlines(kind)]


def places(kind: str) -> dict[str, str]:
    """Return the package's own entries of a registry, in order: name → ``module:Class``.

    Args:
        kind: one of :data:`TABLES`.
    """
    return _table(_ROOT / TABLES[kind])


def headlines(kind: str) -> list[Headline]:
    """The package's own entries of a kind, in order; plug-ins are not among them.

    Args:
        kind: one of :data:`KINDS`.
    """
    if kind not in TABLES:
        return [Headline(name, summary) for name, summary in (ENGINES if kind == "engines" else SUMMARIES).items()]
    found = []
    for name, place in places(kind).items():
        module, _, attribute = place.partition(":")
        texts = _texts(_ROOT.parent.joinpath(*module.split(".")).with_suffix(".py"), attribute)
        found.append(Headline(name, texts.get("summary", ""), texts.get("citation", "")))
    return found


def _table(path: Path) -> dict[str, str]:
    """Name → ``module:Class``, as the call of ``Registry`` in a source has it."""
    calls = (node for node in ast.walk(_parsed(path)) if isinstance(node, ast.Call))
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
    named = {str(key): value.value for key, value in pairs if isinstance(value, ast.Constant)}
    return {
        "summary": first_line(ast.get_docstring(node) or ""),
        **{k: v for k, v in named.items() if isinstance(v, str)},
    }


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
