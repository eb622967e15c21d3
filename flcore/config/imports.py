"""Find the imports of Python sources without running them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache


@cache
def imported_names(source: bytes, *, for_types: bool = False, package: str = "") -> frozenset[str]:
    """Return the dotted names of all imports in a source, including those inside functions.

    ``from a.b import c`` gives ``a.b.c``, a module or an attribute of ``a.b``.

    Args:
        source: of a module.
        package: base of relative imports; empty ignores them.
        for_types: include imports under ``if TYPE_CHECKING``.

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
    found: dict[str, bytes] = {}
    seen: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        source = source_of(name)
        if source is None:
            continue
        found[name] = source
        package = "" if is_package is None else name if is_package(name) else name.rpartition(".")[0]
        for other in (name, *imported_names(source, package=package)):
            parts = other.split(".")
            waiting += [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return dict(sorted(found.items()))
