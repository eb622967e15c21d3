"""Find the imports of Python sources without running them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache


@cache
def imported_names(source: bytes, *, for_types: bool = False, package: str = "") -> frozenset[str]:
    """Return the dotted names of all imports in a source, including those inside functions.

    ``from a.b import c`` gives ``a.b.c``, a module or an attribute of ``a.b``. Relative imports need ``package``, their
    base. Imports under ``if TYPE_CHECKING`` need ``for_types``.

    Raises:
        SyntaxError: invalid Python.
    """
    return frozenset(_names(ast.parse(source), for_types, package))


def _names(node: ast.AST, for_types: bool, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and (package or not node.level):
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        start = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{start}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.If) and not for_types and _is_for_types(node.test):
        for statement in node.orelse:
            yield from _names(statement, for_types, package)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names(child, for_types, package)


def _is_for_types(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def closure(
    entries: Iterable[str],
    source_of: Callable[[str], bytes | None],
    is_package: Callable[[str], bool] | None = None,
) -> dict[str, bytes]:
    """Return the modules that loading the entries may load, with their sources, in order of names.

    The packages around a module are loaded before it.

    Args:
        entries: names of modules.
        source_of: returns the source of a module; None for names that are not modules or not to be followed.
        is_package: for relative imports, which are ignored without it.
    """
    sources: dict[str, bytes | None] = {}
    waiting = set(entries)
    while waiting:
        name = waiting.pop()
        sources[name] = source = source_of(name)
        if source is not None:
            package = "" if is_package is None else name if is_package(name) else name.rpartition(".")[0]
            waiting |= (_around(name) | _loaded(source, package)) - sources.keys()
    return {name: source for name, source in sorted(sources.items()) if source is not None}


@cache
def _loaded(source: bytes, package: str) -> frozenset[str]:
    return frozenset().union(*map(_around, imported_names(source, package=package)))


def _around(name: str) -> frozenset[str]:
    """Return the name and the packages around it."""
    parts = name.split(".")
    return frozenset(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
