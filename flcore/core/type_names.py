"""Type names and choices of parameters, from their annotations."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any


def choices_of(hint: Any) -> tuple[Any, ...] | None:
    """Return the values of a ``Literal`` or a list of it; None for other types."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [o for o in typing.get_args(hint) if o is not type(None)]
        if len(options) == 1 and typing.get_origin(options[0]) is typing.Literal:
            return (*typing.get_args(options[0]), None)
    if typing.get_origin(hint) is tuple:
        return choices_of(typing.get_args(hint)[0])
    return None


def type_name(hint: Any) -> str:
    """Return a type's name: ``float or null``, ``list of int``."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return type(typing.get_args(hint)[0]).__name__
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        mixed = len([option for option in options if option is not type(None)]) > 1
        return " or ".join("null" if o is type(None) else _words(o) if mixed else type_name(o) for o in options)
    if origin is tuple:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if origin in (dict, Mapping):
        return "mapping"
    return getattr(hint, "__name__", str(hint))


def _words(hint: Any) -> str:
    """Return the quoted values of a ``Literal``: ``'median'``; else the type's name."""
    is_words = typing.get_origin(hint) is typing.Literal
    return " or ".join(map(repr, typing.get_args(hint))) if is_words else type_name(hint)
