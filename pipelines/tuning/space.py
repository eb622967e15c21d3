"""The search space of a study: the method's own parameters, its base's, and shared ones.

A learning rate matters more than the method, so a comparison is fair only if all methods may choose it. Hence the
shared part, FedAvg's whole space: the clients' learning rate, its schedule, momentum, and the length of local training.
It excludes budget and scoring (rounds, participation, evaluation), and the batch size, which acts through learning rate
and number of steps. A method without local training has no shared part.

Every range contains the given value, so a study can begin with it: a value outside widens its range, and a value that
no range can contain (null, or 0 on a logarithmic scale) turns the range into a list of values.

Trials that differ only in values without effect are the same trial: a parameter with a condition is searched only if
the condition holds, and after the parameters that the condition reads. Bounds that depend on the number of classes use
the data source's description, since the space is part of a study's identity, which is checked before data are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.core.params import Search, declared
from flcore.core.text import to_yaml

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

Values = Mapping[str, Any]
"""Values by dotted key, such as ``method.mu``, or ``method.base_settings.moon.method.mu`` of a base."""

_LISTED = 8
"""Number of values that replace a range, in addition to null or 0."""

_BASES = "base_settings."


@dataclass(frozen=True)
class Dimension:
    """A key of the configuration and the values that it may take.

    Attributes:
        key: dotted.
        search: the range, or the choices, in numbers.
        whole: True for a range of integers.
        section: the object with this parameter, such as a method.
    """

    key: str
    search: Search
    whole: bool = False
    section: object = None

    def applies(self, values: Values) -> bool:
        """Return whether it has an effect with all other values as given here."""
        return self.may_apply({key: (value,) for key, value in values.items()})

    def may_apply(self, possible: Mapping[str, tuple[Any, ...]]) -> bool:
        """Return whether it has an effect for some of these values."""
        return self._look(possible)[0]

    def asks(self, possible: Mapping[str, tuple[Any, ...]]) -> set[str]:
        """Return the dotted keys that its condition reads for these values."""
        return self._look(possible)[1]

    def _look(self, possible: Mapping[str, tuple[Any, ...]]) -> tuple[bool, set[str]]:
        """Evaluate the condition for all possible values of what it reads; a value is chosen when it is read."""
        if self.search.when is None:
            return True, set()
        place = self.key.rpartition(".")[0]
        known = {parameter.name: f"{place}.{parameter.name}" for parameter in declared(type(self.section))}
        holds, read, waiting = False, set[str](), [dict[str, Any]()]
        while waiting:
            values = waiting.pop()
            section = _with_parameters(self.section, values, known)
            try:
                holds |= bool(self.search.when(section))
            except _UnknownError as error:
                key = known[error.name]
                read.add(key)
                waiting += [{**values, error.name: value} for value in possible[key]]
        return holds, read

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The choices, or both ends of the range."""
        return (self.search.low, self.search.high) if self.search.choices is None else self.search.choices

    def holds(self, value: Any) -> bool:
        """Return whether a value may be suggested."""
        if self.search.choices is not None:
            return value in self.search.choices
        low, high = _ends(self.search)
        return isinstance(value, int if self.whole else int | float) and low <= value <= high

    def suggest(self, trial: BaseTrial) -> Any:
        """Return a value from a trial's sampler; a value that the trial already has is kept."""
        search = self.search
        if search.choices is not None:
            return trial.suggest_categorical(self.key, search.choices)
        low, high = _ends(search)
        if self.whole:
            return trial.suggest_int(self.key, int(low), int(high), log=search.log)
        return trial.suggest_float(self.key, low, high, log=search.log)

    def describe(self) -> dict[str, Any]:
        """Return the values as JSON, for a study's identity."""
        if self.search.choices is not None:
            return {"choices": list(self.search.choices)}
        return {"low": self.search.low, "high": self.search.high, "log": self.search.log, "whole": self.whole}

    @property
    def words(self) -> str:
        """The values for people: ``0.001 to 0.3, logarithmic``, or ``constant, cosine``."""
        if self.search.choices is not None:
            return ", ".join(to_yaml(choice) for choice in self.search.choices)
        return f"{self.search.low:g} to {self.search.high:g}" + (", logarithmic" if self.search.log else "")


class _UnknownError(Exception):
    def __init__(self, name: str) -> None:
        self.name = name


def _with_parameters(section: object, values: Mapping[str, Any], known: Collection[str]) -> object:
    """Return a copy of a section with these parameters; reading another of its parameters raises."""

    def read(self: object, name: str) -> Any:
        if name in known and name not in values:
            raise _UnknownError(name)
        return object.__getattribute__(self, name)

    copy: Any = object.__new__(type(type(section).__name__, (type(section),), {"__getattribute__": read}))
    copy.__dict__.update(values)
    return copy


def space(config: Config) -> tuple[Dimension, ...]:
    """Return the search space of a configuration: the method's own parameters, a base's, then the shared ones.

    It excludes parameters with a single accepted value, such as a momentum for a method that works without or a
    parameter set by a preset, and parameters that never have an effect.
    """
    mapping, given = config.to_mapping(), values_of(config)
    found = (_fitted(mapping, given, *offered) for offered in (*_own(config), *_shared(config)))
    dimensions = [dimension for dimension in found if dimension is not None]
    possible = {key: (value,) for key, value in given.items()}
    widest = possible | {dimension.key: dimension.extremes for dimension in dimensions}
    # With 0, which switches a part off, a condition reads all its parameters: the order depends on no given value.
    ordered = _in_order(dimensions, {key: (*values, 0) for key, values in widest.items()})
    kept = []
    for dimension in ordered:
        if dimension.may_apply(possible):
            kept.append(dimension)
            possible[dimension.key] = dimension.extremes
    return tuple(kept)


def values_of(config: Config) -> dict[str, Any]:
    """Return every value of a configuration by dotted key, including bases and defaults."""
    sections = {section: values for section, values in config.to_mapping().items() if isinstance(values, Mapping)}
    found = {
        f"{place}.{parameter.name}": getattr(method, parameter.name)
        for place, method in _methods(config)
        for parameter in declared(type(method))
    }
    return found | {
        f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()
    }


def with_values(mapping: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return a nested configuration with other values, by dotted key."""
    changed = dict(mapping)
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed[section] = _with_value(changed[section], name, value)
    return changed


def _with_value(section: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    if not name.startswith(_BASES):
        return {**section, name: value}
    base, inner, own = _of_base(section, name)
    return _with_base(section, base, _with_value(own, inner, value))


def without_keys(mapping: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a nested configuration without some dotted keys."""
    left = dict(mapping)
    for key in keys:
        section, _, name = key.partition(".")
        left[section] = _without_name(left[section], name)
    return left


def _without_name(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not name.startswith(_BASES):
        return {key: value for key, value in section.items() if key != name}
    base, inner, own = _of_base(section, name)
    return _with_base(section, base, _without_name(own, inner))


def _of_base(section: Mapping[str, Any], name: str) -> tuple[str, str, dict[str, Any]]:
    """Return the base in a name, the name within the base, and the base's values by name."""
    base, _, inner = name.removeprefix(_BASES).partition(".")
    said = section.get("base_settings", {}).get(base, {})
    return base, inner.removeprefix("method."), {key.removeprefix("method."): value for key, value in said.items()}


def _with_base(section: Mapping[str, Any], base: str, own: Mapping[str, Any]) -> dict[str, Any]:
    said = {**section.get("base_settings", {}), base: {f"method.{name}": value for name, value in own.items()}}
    return {**section, "base_settings": {name: values for name, values in said.items() if values}}


def _methods(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the method and its bases, each with the dotted prefix of its parameters."""
    place = "method"
    for method in config.methods:
        yield place, method
        place = f"{place}.{_BASES}{getattr(method, 'base', '')}.method"


def _own(config: Config) -> Iterator[tuple[str, Search, bool, object]]:
    classes, rounds = config.source.num_classes, config.federation.rounds
    for place, method in _methods(config):
        for parameter in declared(type(method)):
            if parameter.search is not None and (search := parameter.search.in_numbers(classes, rounds)):
                yield f"{place}.{parameter.name}", search, parameter.type.startswith("int"), method


def _shared(config: Config) -> Iterator[tuple[str, Search, bool, object]]:
    """Yield the shared ranges: the union of those in the methods' specifications, section 10."""
    if not config.method.trains_locally:
        return
    local = config.local
    is_sgd = local.optimizer == "sgd"
    yield "local.lr", Search(1e-3, 0.3, log=True) if is_sgd else Search(1e-4, 1e-2, log=True), False, local
    if is_sgd:
        yield "local.momentum", Search(choices=(0.0, 0.5, 0.9)), False, local
    yield "local.schedule", Search(choices=("constant", "exponential", "cosine")), False, local
    if local.steps is None:
        yield "local.epochs", Search(1, 10, log=True), True, local
    else:
        yield "local.steps", Search(5, 100, log=True), True, local


def _fitted(
    mapping: Mapping[str, Any], known: Values, key: str, search: Search, whole: bool, section: object
) -> Dimension | None:
    """Return a dimension with the given value and the other accepted values; None if there are no others.

    For a range, only its ends are tried.
    """
    given = known[key]
    held = _holding(search, given, whole)
    tried = (held.low, held.high) if held.choices is None else held.choices
    values = [int(value) if whole and value is not None else value for value in tried]
    taken = [value for value in values if value == given or _takes(mapping, key, value)]
    if all(value == given for value in taken):
        return None
    return Dimension(key, held if held.choices is None else replace(held, choices=tuple(taken)), whole, section)


def _takes(mapping: Mapping[str, Any], key: str, value: Any) -> bool:
    try:
        Config.from_mapping(with_values(mapping, {key: value}))
    except ConfigError:
        return False
    return True


def _in_order(dimensions: list[Dimension], possible: Mapping[str, tuple[Any, ...]]) -> list[Dimension]:
    """Return dimensions as declared, but those that a condition reads before those with the condition.

    Raises:
        ValueError: conditions depend on each other in a cycle.
    """
    asked = {dimension.key: dimension.asks(possible) for dimension in dimensions}
    waiting, ordered = list(dimensions), []
    while waiting:
        left = {dimension.key for dimension in waiting}
        first = next((dimension for dimension in waiting if not left & asked[dimension.key]), None)
        if first is None:
            raise ValueError(f"{', '.join(sorted(left))}: each is searched only where another one is this or that")
        ordered.append(first)
        waiting.remove(first)
    return ordered


def _holding(search: Search, given: Any, whole: bool) -> Search:
    if search.choices is not None:
        return search if given in search.choices else replace(search, choices=(given, *search.choices))
    low, high = _ends(search)
    if given is None or (search.log and given <= 0):
        return Search(choices=(given, *_spread(low, high, search.log, whole)), when=search.when)
    return replace(search, low=min(low, given), high=max(high, given))


def _ends(search: Search) -> tuple[float, float]:
    """Return the ends of a range in numbers."""
    assert search.low is not None
    assert isinstance(search.high, int | float)
    return search.low, search.high


def _spread(low: float, high: float, log: bool, whole: bool) -> list[Any]:
    """Return both ends of a range and evenly spaced values between them; all integers if there are few."""
    if whole and high - low < _LISTED:
        return list(range(int(low), int(high) + 1))
    values = (np.geomspace if log else np.linspace)(low, high, _LISTED)
    return sorted({round(value) if whole else float(f"{value:.3g}") for value in values.tolist()})
