"""Things by name, imported when they are asked for.

A registry is a plain table: name → "module:Class". What a run does not name it does not import, so a run starts fast,
and its identity (`flcore/experiment/provenance.py`) holds the modules that it really uses. A plug-in adds to one at run
time.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Name → object, in the order of listings."""

    def __init__(self, kind: str, places: Mapping[str, str]) -> None:
        """Keep the table.

        Args:
            kind: what the entries are, for messages: ``method``.
            places: name → ``module:attribute``.
        """
        self.kind = kind
        self._places = dict(places)
        self._found: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        """The entry of a name, imported now if need be.

        Raises:
            KeyError: there is none.
        """
        if name not in self._found:
            module, _, attribute = self._places[name].partition(":")
            self._found[name] = cast("T", getattr(importlib.import_module(module), attribute))
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._found

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from (name for name in self._found if name not in self._places)

    def __len__(self) -> int:
        return len(set(self._places) | set(self._found))

    def add(self, name: str, entry: T) -> None:
        """Register an entry of a plug-in.

        Raises:
            ValueError: the name is taken by something else.
        """
        if name in self and self[name] is not entry:
            raise ValueError(f"there is a {self.kind} called {name} already")
        self._found[name] = entry

    def remove(self, name: str) -> None:
        """Forget an entry of a plug-in; the table's own stay."""
        if name not in self._places:
            self._found.pop(name, None)
