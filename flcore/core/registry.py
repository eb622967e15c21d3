"""Registries: tables of names whose entries are imported on first use.

A run imports only what its configuration names. It starts fast, and its code fingerprint
(`flcore/experiment/provenance.py`) covers only the modules that it uses.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar, cast

from flcore.core.text import first_line

T = TypeVar("T")


class Named:
    """Base of classes in registries: the class statement sets attributes, the docstring's first line the summary.

    As in ``class FedProx(FedAvg, name="fedprox", citation="Li et al., MLSys 2020")``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    def __init_subclass__(cls, **attributes: Any) -> None:
        """Set the attributes of the class statement, and the summary: the first line of the docstring.

        Raises:
            TypeError: no base class declares an attribute.
        """
        if cls.__doc__ and "summary" not in vars(cls):
            cls.summary = first_line(cls.__doc__)
        for attribute, value in attributes.items():
            if not any(attribute in vars(base).get("__annotations__", {}) for base in cls.__mro__):
                raise TypeError(f"{cls.__name__}: unknown argument {attribute} of the class statement")
            setattr(cls, attribute, value)


class Registry(Mapping[str, T]):
    """Map names to objects, in the order of listings.

    Attributes:
        kind: name of an entry's kind in messages, such as ``method``.
        added: entries of plug-ins, after the table's.
    """

    def __init__(self, kind: str, places: Mapping[str, str]) -> None:
        """Keep the table of name → ``module:attribute``."""
        self.kind = kind
        self.added: dict[str, T] = {}
        self._places = dict(places)

    def __getitem__(self, name: str) -> T:
        """Import and return an entry.

        Raises:
            KeyError: unknown name.
        """
        if name in self.added:
            return self.added[name]
        module, _, attribute = self._places[name].partition(":")
        return cast("T", getattr(importlib.import_module(module), attribute))

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self.added

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from self.added

    def __len__(self) -> int:
        return len(self._places) + len(self.added)
