"""Which modules a Python source imports, read without running it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache


@cache
def imported_names(source: bytes, *, for_types: bool = False, package: str = "") -> frozenset[str]:
    """Dotted names of everything that a source imports, inside functions too.

    ``from a.b import c`` gives ``a.b.c``, whether that is a module or stands in ``a.b``.

    Args:
        source: of a module.
        package: in which relative imports begin; empty: they are left out.
        for_types: also what is imported under ``if TYPE_CHECKING``, which never runs.

    Raises:
        SyntaxError: it is not Python.
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


def closure(entries: Iterable[str], source_of: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """Modules that loading the entries may load, with their sources, in order of names.

    The packages around a module are loaded before it.

    Args:
        entries: names of modules.
        source_of: the source of a module; None for names that are none, or are not to be followed.
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
        for other in (name, *imported_names(source)):
            parts = other.split(".")
            waiting += [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return dict(sorted(found.items()))
