"""Declaring parameters once: type, default, range, search range and meaning of every configuration value.

A section of the configuration, a method's hyper-parameters, a partitioner's arguments: each is a frozen dataclass whose
fields are made with :func:`param`. That single declaration feeds validation (:func:`build`), the listings and
documentation (:func:`declared`) and the search space of tuning.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from flcore.core.conditions import Condition
from flcore.core.errors import ConfigError
from flcore.core.text import brief, is_control, nearest, shown, unknown_key
from flcore.core.type_names import choices_of, type_name

T = TypeVar("T")

LARGEST = 2**63 - 1
"""Of whole numbers: what arrays, and other readers of a file, can hold."""

_known_hints: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()
_known_params: WeakKeyDictionary[type, tuple[Param, ...]] = WeakKeyDictionary()  # asked for at every check


@dataclass(frozen=True)
class Classes:
    """A bound that depends on the data: ``share`` times the number of classes, rounded down.

    ``unknown`` stands for it where nobody knows that number before the data are read.
    """

    share: float
    unknown: int

    def of(self, classes: int | None, rounds: int) -> int:
        """The bound for so many classes."""
        return self.unknown if classes is None else math.floor(self.share * classes)

    def __str__(self) -> str:
        return "classes" if self.share == 1 else f"{self.share:g} × classes"


@dataclass(frozen=True)
class Rounds:
    """A bound on a number of rounds that have to pass: ``most``, and fewer than the run has."""

    most: int

    def of(self, classes: int | None, rounds: int) -> int:
        """The bound in a run of so many rounds."""
        return min(self.most, rounds - 1)

    def __str__(self) -> str:
        return f"{self.most}, fewer than the rounds"


@dataclass(frozen=True)
class Search:
    """What tuning explores: numbers from ``low`` to ``high`` (``log``: on a logarithmic scale), or ``choices``.

    Attributes:
        least: with choices, leaves out smaller ones.
        when: only where this holds; elsewhere the parameter has no effect. A text names a class attribute that says
            it, where several classes inherit the parameter and each has a condition of its own.
    """

    low: float | None = None
    high: float | Classes | Rounds | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None
    least: Classes | None = None
    when: Condition | str | None = None

    def __post_init__(self) -> None:
        """Refuse a range that is neither an interval nor a list."""
        if (self.choices is None) == (self.low is None or self.high is None):
            raise ValueError("a search range is either low and high, or choices")

    @property
    def condition(self) -> Condition | None:
        """``when``, in a declaration that :func:`declared` gives."""
        assert not isinstance(self.when, str)
        return self.when

    def in_numbers(self, classes: int | None, rounds: int) -> Search | None:
        """The same without bounds that depend on data and run; None where nothing is left to explore.

        Args:
            classes: of the data; None where nobody knows before they are read. rounds: of the run.
        """
        if self.choices is not None:
            least = -math.inf if self.least is None else self.least.of(classes, rounds)
            left = tuple(choice for choice in self.choices if self.least is None or choice >= least)
            return dataclasses.replace(self, choices=left, least=None) if left else None
        assert self.low is not None
        high = self.high.of(classes, rounds) if isinstance(self.high, Classes | Rounds) else self.high
        assert high is not None
        return dataclasses.replace(self, high=high) if high >= self.low else None

    def describe(self) -> dict[str, Any]:
        """As plain JSON values; bounds that depend on the data, and the condition, in words."""
        entry: dict[str, Any] = {"log": self.log}
        if self.choices is not None:
            entry["choices"] = self.choices
        else:
            depends = isinstance(self.high, Classes | Rounds)
            entry |= {"low": self.low, "high": str(self.high) if depends else self.high}
        if self.least is not None:
            entry["least"] = str(self.least)
        if self.condition is not None:
            entry["when"] = self.condition.words
        return entry


@dataclass(frozen=True)
class Param:
    """One declared parameter, as listings, documentation and tuning see it."""

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
        """What is allowed, in words: ``one of a, b``, ``>= 0``, ``> 0 and <= 1`` or nothing; of a list, each."""
        if self.choices is not None:
            return "one of " + ", ".join(shown(choice) for choice in self.choices)
        bounds = ((">=", self.low), (">", self.above), ("<=", self.high), ("<", self.below))
        limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
        words = [option for option in self.type.split(" or ") if option.startswith("'")]
        return " or ".join([limits, *words] if limits else words)

    def describe(self) -> dict[str, Any]:
        """The parameter as plain JSON values: name, type, default, range, meaning and, where declared, search."""
        entry: dict[str, Any] = {
            "name": self.name,
            "type": self.type,
            "default": list(self.default) if isinstance(self.default, tuple) else self.default,
            "range": self.range,
            "meaning": self.help,
        }
        if self.search is not None:
            entry["search"] = self.search.describe()
        return entry


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
    """A dataclass field that carries its own documentation and limits.

    Args:
        default: the value used when the configuration is silent.
        help: one line that says what the value means, with its unit.
        low: smallest allowed value, included. ``above``: likewise, excluded.
        high: largest allowed value, included. ``below``: likewise, excluded.
        search: the range that tuning explores, if tuning should touch this parameter at all.
        switch: True for an on/off part of a method that an ablation turns off.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    metadata = {"help": help, "search": search, "switch": switch, **limits}
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared(cls: type) -> tuple[Param, ...]:
    """Every parameter declared by the dataclass ``cls``, in order of declaration."""
    known = _known_params.get(cls)
    if known is None:
        hints = _hints(cls)
        fields = (field for field in dataclasses.fields(cls) if "help" in field.metadata)
        known = tuple(_param_of(cls, field, hints[field.name]) for field in fields)
        if not any(isinstance(parameter.default, dict) for parameter in known):  # which whoever asks could change
            _known_params[cls] = known
    return known


def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's fields, which Python would compile from their text at every question."""
    if cls not in _known_hints:
        _known_hints[cls] = typing.get_type_hints(cls)
    return _known_hints[cls]


def _param_of(cls: type, field: dataclasses.Field[Any], hint: Any) -> Param:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    search = field.metadata["search"]
    if search is not None and isinstance(search.when, str):
        search = dataclasses.replace(search, when=getattr(cls, search.when))
    return Param(
        name=field.name,
        type=type_name(hint),
        default=default,
        choices=choices_of(hint),
        **{**field.metadata, "search": search},
    )


def build(cls: type[T], values: Mapping[str, Any], path: str) -> T:
    """Make the frozen dataclass ``cls`` from ``values``, checking names, types and ranges.

    Args:
        cls: a dataclass whose fields were made with :func:`param`.
        values: key to value, as read from YAML or JSON.
        path: dotted path of the section, for messages (``method`` gives ``method.mu``).

    Raises:
        ConfigError: an unknown key, a value of another type or out of range; or a cross-field rule of ``cls``.
    """
    params = {p.name: p for p in declared(cls)}
    hints = _hints(cls)
    known: dict[str, Any] = {}
    for key, value in values.items():
        if key not in params:
            raise ConfigError(unknown_key(f"{path}.{brief(key)}" if path else brief(key), key, params))
        known[key] = _check(params[key], hints[key], value, f"{path}.{key}" if path else key)
    try:
        return cls(**known)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


_NOUNS = {"float": "a number", "int": "a whole number", "list of float": "numbers", "list of int": "whole numbers"}


def _check(declaration: Param, hint: Any, value: Any, path: str) -> Any:
    converted = _convert(hint, value)
    if converted is _WRONG:
        allowed = declaration.range or declaration.type
        if allowed.startswith((">", "<")):
            allowed = f"{_NOUNS.get(declaration.type.partition(' or ')[0], declaration.type)} {allowed}"
        if isinstance(value, Mapping) and declaration.type == "mapping":
            allowed = "a mapping of text to finite numbers, text, true, false, null, and lists and mappings of them"
        if _is_quoted(hint, value):
            raise ConfigError(f'{path} = "{shown(value)}": is text in quotes, leave these out; expected {allowed}')
        raise ConfigError(f"{path} = {shown(value)}: {_nearest(declaration, value)}expected {allowed}")
    for item in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            _check_range(declaration, item, path)
        elif isinstance(item, str) and any(map(is_control, item)):
            raise ConfigError(f"{path} = {shown(item)}: expected text without control characters")
    return converted


def _is_quoted(hint: Any, value: Any) -> bool:
    """Whether a value is text that would do as a number or boolean if it had no quotes."""
    try:
        return isinstance(value, str) and _convert(hint, json.loads(value)) is not _WRONG
    except (ValueError, RecursionError):
        return False


def _nearest(declaration: Param, value: Any) -> str:
    """What a misspelt choice, or one of a list, was probably meant to be; else nothing."""
    choices = [choice for choice in declaration.choices or () if isinstance(choice, str)]
    given = value if isinstance(value, list | tuple) else [value]
    wrong = [item for item in given if isinstance(item, str) and item not in choices]
    near = next(filter(None, (nearest(item, choices, cutoff=0.8) for item in wrong)), None)
    return f"did you mean {near!r}? " if near else ""


def _check_range(declaration: Param, value: float, path: str) -> None:
    inside = (
        (isinstance(value, int) or math.isfinite(value))
        and (declaration.low is None or value >= declaration.low)
        and (declaration.high is None or value <= declaration.high)
        and (declaration.above is None or value > declaration.above)
        and (declaration.below is None or value < declaration.below)
    )
    if not inside:
        limits = [declaration.range] if declaration.range else []
        limits += [] if isinstance(value, int) or math.isfinite(value) else ["finite"]
        raise ConfigError(f"{path} = {shown(value)}: must be {' and '.join(limits)}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(f"{path} = {shown(value)}: too large; the largest whole number is {LARGEST}")


_WRONG = object()
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
"""Text that is taken for a number: YAML 1.1 reads 1e-3 as text. Python alone would also take 1_0, inf and nan."""


def _convert(hint: Any, value: Any) -> Any:
    """``value`` as the annotated type, or ``_WRONG``. Only lossless readings: no truthiness, no rounding."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        matches = [choice for choice in typing.get_args(hint) if type(choice) is type(value) and choice == value]
        return matches[0] if matches else _WRONG
    if origin in (typing.Union, types.UnionType):
        tried = (_convert(option, value) for option in typing.get_args(hint))
        return next((result for result in tried if result is not _WRONG), _WRONG)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return _WRONG
        items = tuple(_convert(typing.get_args(hint)[0], item) for item in value)
        return _WRONG if any(item is _WRONG for item in items) else items
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return value if isinstance(value, Mapping) and is_plain(value) else _WRONG
    if hint is type(None):
        return None if value is None else _WRONG
    if hint is float:
        return _as_float(value)
    return value if type(value) is hint else _WRONG


def is_plain(value: Any, depth: int = 32) -> bool:
    """Whether a value is made of what JSON has: mappings by text, lists, text, finite numbers, booleans, null."""
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return all(is_plain(key) and isinstance(key, str) and is_plain(own, depth - 1) for key, own in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(item, depth - 1) for item in value)
    if isinstance(value, str):
        return not any(map(is_control, value))
    if isinstance(value, bool | None):
        return True
    return (type(value) is int and abs(value) <= LARGEST) or (type(value) is float and math.isfinite(value))


def _as_float(value: Any) -> Any:
    if isinstance(value, bool):
        return _WRONG
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return _WRONG
    try:
        return float(value) if isinstance(value, (int, float, str)) else _WRONG
    except OverflowError:
        return _WRONG
