"""Declare type, default, range, search range and meaning of every configuration value once.

Sections, methods and partitioners are frozen dataclasses with :func:`param` fields. The declaration serves validation
(:func:`build`), listings and documentation (:func:`declared`), and the search space of tuning.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from flcore.core.errors import ConfigError
from flcore.core.text import is_control, nearest, shorten, to_yaml, unknown_key

if TYPE_CHECKING:
    from pydantic import TypeAdapter  # imported late: it takes as long as numpy

T = TypeVar("T")

LARGEST = 2**63 - 1
"""Largest whole number: arrays and other readers of a file hold no larger one."""

_UNIONS = (typing.Union, types.UnionType)
_declared: WeakKeyDictionary[type, tuple[Param, ...]] = WeakKeyDictionary()
_validators: WeakKeyDictionary[type, TypeAdapter[dict[str, Any]]] = WeakKeyDictionary()

DataBound = Callable[[int | None, int], float]
"""A bound that depends on data and run: (number of classes or None if unknown, rounds) → number."""


@dataclass(frozen=True)
class Search:
    """Search range of tuning: numbers from ``low`` to ``high`` (``log``: on a logarithmic scale), or ``choices``.

    Attributes:
        least: with choices, drops smaller ones.
        when: returns whether the parameter has an effect, from the parameters of its section alone.
    """

    low: float | None = None
    high: float | DataBound | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None
    least: DataBound | None = None
    when: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        """Refuse a range that is neither an interval nor a list."""
        if (self.choices is None) == (self.low is None or self.high is None):
            raise ValueError("a search range is either low and high, or choices")

    def in_numbers(self, classes: int | None, rounds: int) -> Search | None:
        """Return the range with its bounds as numbers; None if it is empty.

        Args:
            classes: of the data; None if unknown before they are read. rounds: of the run.
        """
        if self.choices is not None:
            least = -math.inf if self.least is None else self.least(classes, rounds)
            choices = tuple(choice for choice in self.choices if self.least is None or choice >= least)
            return dataclasses.replace(self, choices=choices, least=None) if choices else None
        assert self.low is not None
        high = self.high(classes, rounds) if callable(self.high) else self.high
        assert high is not None
        return dataclasses.replace(self, high=high) if high >= self.low else None

    def describe(self) -> dict[str, Any]:
        """Return the range as JSON values; a bound that depends on data and run is null."""
        if self.choices is not None:
            return {"log": self.log, "choices": self.choices}
        return {"log": self.log, "low": self.low, "high": None if callable(self.high) else self.high}


@dataclass(frozen=True)
class Param:
    """A declared parameter, for listings, documentation and tuning."""

    name: str
    type: str
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] | None = None
    search: Search | None = None
    switch: bool = False

    @property
    def range(self) -> str:
        """Allowed values, or items of a list: ``one of a, b``, ``>= 0``, ``> 0 and <= 1``, or empty."""
        if self.choices is not None:
            return "one of " + ", ".join(to_yaml(choice) for choice in self.choices)
        bounds = ((">=", self.low), (">", self.above), ("<=", self.high), ("<", self.below))
        limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
        words = [option for option in self.type.split(" or ") if option.startswith("'")]
        return " or ".join([limits, *words] if limits else words)

    def describe(self) -> dict[str, Any]:
        """Return name, type, default, range, meaning and, if declared, search as JSON values."""
        default = list(self.default) if isinstance(self.default, tuple) else self.default
        entry = {"name": self.name, "type": self.type, "default": default, "range": self.range, "meaning": self.help}
        return entry if self.search is None else {**entry, "search": self.search.describe()}


def param(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    search: Search | None = None,
    switch: bool = False,
) -> Any:
    """Make a dataclass field with documentation and limits.

    Args:
        default: value if the configuration does not set it.
        help: meaning in one line, with its unit.
        low: smallest allowed value, included. ``above``: excluded.
        high: largest allowed value, included. ``below``: excluded.
        search: range of tuning; None: not tuned.
        switch: True for a part of a method that an ablation turns off.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    metadata = {"help": help, "search": search, "switch": switch, **limits}
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared(cls: type) -> tuple[Param, ...]:
    """Return the parameters of the dataclass ``cls``, in order of declaration."""
    if cls not in _declared:
        hints = typing.get_type_hints(cls)
        _declared[cls] = tuple(
            Param(
                name=field.name,
                type=_type_name(hints[field.name]),
                default=field.default if field.default_factory is MISSING else field.default_factory(),
                choices=_choices(hints[field.name]),
                **field.metadata,
            )
            for field in dataclasses.fields(cls)
            if "help" in field.metadata
        )
    return _declared[cls]


def _choices(hint: Any) -> tuple[Any, ...] | None:
    """Return the values of a ``Literal``, of an optional one or of a list of them; None for other types."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return inside
    if origin in _UNIONS:
        options = [option for option in inside if option is not type(None)]
        if len(options) == 1 and typing.get_origin(options[0]) is typing.Literal:
            return (*typing.get_args(options[0]), None)
    return _choices(inside[0]) if origin is tuple else None


def _type_name(hint: Any, *, quote: bool = False) -> str:
    """Return a type's name: ``float or null``, ``list of int``; with ``quote``, the values of a ``Literal``."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, inside)) if quote else type(inside[0]).__name__
    if origin in _UNIONS:
        mixed = len(set(inside) - {type(None)}) > 1
        return " or ".join("null" if o is type(None) else _type_name(o, quote=mixed) for o in inside)
    if origin is tuple:
        return f"list of {_type_name(inside[0])}"
    return "mapping" if origin in (dict, Mapping) else getattr(hint, "__name__", str(hint))


def build(cls: type[T], values: Mapping[str, Any], path: str) -> T:
    """Make the frozen dataclass ``cls`` from ``values``; check names, types and ranges.

    Args:
        cls: a dataclass with fields made by :func:`param`.
        values: key to value, as read from YAML or JSON.
        path: dotted path of the section, for messages (``method`` gives ``method.mu``).

    Raises:
        ConfigError: an unknown key, a value of another type or out of range; or a cross-field rule of ``cls``.
    """
    import pydantic

    known, place = {p.name: p for p in declared(cls)}, f"{path}." if path else ""
    for key in values:
        if key not in known:
            raise ConfigError(unknown_key(f"{place}{shorten(key)}", key, known))
    try:
        checked = validator(cls).validate_python(dict(values))
    except pydantic.ValidationError as error:
        wrong = {key: [one for one in error.errors(include_url=False) if one["loc"][0] == key] for key in values}
        key = next(key for key in values if wrong[key])
        raise ConfigError(f"{place}{key} = {_problem(cls, known[key], values[key], wrong[key])}") from None
    try:
        return cls(**{key: checked[key] for key in values})
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def validator(cls: type) -> TypeAdapter[dict[str, Any]]:
    """Return the pydantic adapter for the parameters of ``cls``, which stays a plain dataclass without import cost."""
    import pydantic
    import typing_extensions

    if cls not in _validators:
        make: Any = typing_extensions.TypedDict  # mypy knows it as a form, not as a function
        hints = typing.get_type_hints(cls)
        keys: dict[str, Any] = {}
        for p in declared(cls):
            described = pydantic.Field(p.default, description=p.help)
            keys[p.name] = typing.Annotated[_strict(hints[p.name], p), described]
        closed = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        _validators[cls] = pydantic.TypeAdapter(pydantic.with_config(closed)(make(cls.__name__, keys, total=False)))
    return _validators[cls]


def _strict(hint: Any, parameter: Param) -> Any:
    """Add limits of numbers and lossless conversions to an annotation for pydantic."""
    import pydantic

    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return reduce(or_, (_strict(option, parameter) for option in inside))
    if origin is tuple:  # YAML and JSON have lists
        items: Any = _strict(inside[0], parameter)
        return typing.Annotated[tuple[items, ...], pydantic.Field(strict=False)]
    if origin is typing.Literal:  # compared by type as well, since true == 1
        allowed = {type(choice) for choice in inside}
        return typing.Annotated[hint, pydantic.BeforeValidator(lambda value: value if type(value) in allowed else ...)]
    limits = pydantic.Field(ge=parameter.low, gt=parameter.above, le=parameter.high, lt=parameter.below)
    if hint is float:
        return typing.Annotated[float, limits, pydantic.BeforeValidator(_number)]
    if hint in (int, str):
        return typing.Annotated[hint, limits if hint is int else None, pydantic.AfterValidator(_plain)]
    return typing.Annotated[dict[str, Any], pydantic.BeforeValidator(_plain)] if Mapping in (hint, origin) else hint


def _number(value: Any) -> Any:
    """Convert numbers that YAML 1.1 reads as text, such as 1e-3; pydantic would also accept 1_0, inf and nan."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", value)
    return float(value) if is_number else value


def _plain(value: Any) -> Any:
    if is_plain(value):
        return value
    if isinstance(value, int):
        raise ValueError(f"too large; the largest whole number is {LARGEST}")
    mapping = "a mapping of text to finite numbers, text, true, false, null, lists and mappings"
    raise ValueError(f"expected {'text without control characters' if isinstance(value, str) else mapping}")


_NOUNS = {"float": "a number", "int": "a whole number", "list of float": "numbers", "list of int": "whole numbers"}


def _problem(cls: type, declaration: Param, value: Any, errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the message for a value, from pydantic's errors for each alternative of its type."""
    for error in errors:
        if error["type"].startswith(("greater_than", "less_than", "finite_number")):
            limits = [declaration.range, "finite" if error["type"] == "finite_number" else ""]
            return f"{to_yaml(error['input'])}: must be {' and '.join(filter(None, limits))}"
        if reason := str(error.get("ctx", {}).get("error", "")):
            return f"{to_yaml(error['input'])}: {reason}"
    allowed = declaration.range or declaration.type
    if allowed.startswith((">", "<")):
        allowed = f"{_NOUNS.get(declaration.type.partition(' or ')[0], declaration.type)} {allowed}"
    if _is_quoted(cls, declaration.name, value):
        return f'"{to_yaml(value)}": is text in quotes, leave these out; expected {allowed}'
    return f"{to_yaml(value)}: {_nearest(declaration, value)}expected {allowed}"


def _is_quoted(cls: type, key: str, value: Any) -> bool:
    """Return whether a value is a quoted number or boolean."""
    try:
        return isinstance(value, str) and bool(validator(cls).validate_python({key: json.loads(value)}))
    except (ValueError, RecursionError):
        return False


def _nearest(declaration: Param, value: Any) -> str:
    """Return a suggestion for a misspelt choice, or an empty text."""
    choices = [choice for choice in declaration.choices or () if isinstance(choice, str)]
    wrong = [item for item in (value if isinstance(value, list | tuple) else [value]) if item not in choices]
    near = next(filter(None, (nearest(item, choices, cutoff=0.8) for item in wrong)), None)
    return f"did you mean {near!r}? " if near else ""


def is_plain(value: Any, depth: int = 32) -> bool:
    """Return whether a value has JSON types only: mappings by text, lists, text, finite numbers, booleans, null."""
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(key) and is_plain(item, depth - 1) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(item, depth - 1) for item in value)
    if isinstance(value, str):
        return not any(map(is_control, value))
    if isinstance(value, bool | None):
        return True
    return (type(value) is int and abs(value) <= LARGEST) or (type(value) is float and math.isfinite(value))
