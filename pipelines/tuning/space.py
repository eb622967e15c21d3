"""The search space of a study: the method's own parameters, its base's, and shared ones.

A comparison is fair only if all methods may choose what matters more than the method. Hence the shared part, FedAvg's
whole space: the clients' learning rate, its schedule, momentum, and the length of local training. It excludes budget
and scoring (rounds, participation, evaluation), and the batch size, which acts through learning rate and steps.

Every range contains the given value, so a study can begin with it: a value outside widens its range, and a value that
no range can contain (null, or 0 on a logarithmic scale) turns the range into a list of values.

A parameter with a condition is searched only if the condition holds, and after the parameters that the condition reads.
Bounds that depend on the number of classes use the data source's description, since the space is part of a study's
identity, which is checked before data are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
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
    """A dotted key of the configuration, the values that it may take, and the object with it, such as a method."""

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
        prefix = self.key.rpartition(".")[0]
        known = {parameter.name: f"{prefix}.{parameter.name}" for parameter in declared(type(self.section))}
        applies, read, waiting = False, set[str](), [dict[str, Any]()]
        while waiting:
            values = waiting.pop()
            section = _with_parameters(self.section, values, known)
            try:
                applies |= bool(self.search.when(section))
            except _UnknownError as error:
                key = known[error.name]
                read.add(key)
                waiting += [{**values, error.name: value} for value in possible[key]]
        return applies, read

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The choices, or both ends of the range."""
        return (self.search.low, self.search.high) if self.search.choices is None else self.search.choices

    def holds(self, value: Any) -> bool:
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
    mapping, configured = config.to_mapping(), values_of(config)
    fitted = (_fitted(mapping, configured, *offered) for offered in (*_own(config), *_shared(config)))
    dimensions = [dimension for dimension in fitted if dimension is not None]
    possible = {key: (value,) for key, value in configured.items()}
    widest = possible | {dimension.key: dimension.extremes for dimension in dimensions}
    # With 0, which switches a part off, a condition reads all its parameters: the order depends on no given value.
    ordered = _in_order(dimensions, {key: (*values, 0) for key, values in widest.items()})
    searched = []
    for dimension in ordered:
        if dimension.may_apply(possible):
            searched.append(dimension)
            possible[dimension.key] = dimension.extremes
    return tuple(searched)


def values_of(config: Config) -> dict[str, Any]:
    """Return every value of a configuration by dotted key, including bases and defaults."""
    sections = {section: values for section, values in config.to_mapping().items() if isinstance(values, Mapping)}
    parameters = {
        f"{prefix}.{parameter.name}": getattr(method, parameter.name)
        for prefix, method in _methods(config)
        for parameter in declared(type(method))
    }
    return parameters | {
        f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()
    }


def with_values(mapping: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return a nested configuration with other values, by dotted key."""
    changed = deepcopy(dict(mapping))
    for key, value in values.items():
        *sections, name = _path(key)
        _sections(changed, sections)[-1][name] = value
    return changed


def without_keys(mapping: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a nested configuration without some dotted keys, and without bases that have no other."""
    changed = deepcopy(dict(mapping))
    for key in keys:
        *sections, name = _path(key)
        *_, parent, section = _sections(changed, sections)
        section.pop(name, None)
        if len(sections) > 1 and not section:
            del parent[sections[-1]]
    return changed


def _path(key: str) -> list[str]:
    """Return the keys of nested objects that lead to a value, such as of a base.

    >>> _path("local.lr"), _path("method.base_settings.moon.method.mu")
    (['local', 'lr'], ['method', 'base_settings', 'moon', 'method.mu'])
    """
    section, _, name = key.partition(".")
    path, prefix = [section], ""
    while name.startswith(_BASES):
        base, _, name = name.removeprefix(_BASES).partition(".method.")
        path += [f"{prefix}base_settings", base]
        prefix = "method."
    return [*path, prefix + name]


def _sections(mapping: dict[str, Any], keys: Iterable[str]) -> list[dict[str, Any]]:
    """Return nested objects from the outermost on; missing ones are made."""
    sections = [mapping]
    for key in keys:
        sections.append(sections[-1].setdefault(key, {}))
    return sections


def _methods(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the method and its bases, each with the dotted prefix of its parameters."""
    prefix = "method"
    for method in config.methods:
        yield prefix, method
        prefix = f"{prefix}.{_BASES}{getattr(method, 'base', '')}.method"


def _own(config: Config) -> Iterator[tuple[str, Search, bool, object]]:
    classes, rounds = config.source.num_classes, config.federation.rounds
    for prefix, method in _methods(config):
        for parameter in declared(type(method)):
            if parameter.search is not None and (search := parameter.search.in_numbers(classes, rounds)):
                yield f"{prefix}.{parameter.name}", search, parameter.type.startswith("int"), method


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
    configured = known[key]
    widened = _holding(search, configured, whole)
    tried = (widened.low, widened.high) if widened.choices is None else widened.choices
    values = [int(value) if whole and value is not None else value for value in tried]
    taken = [value for value in values if value == configured or _takes(mapping, key, value)]
    if all(value == configured for value in taken):
        return None
    return Dimension(
        key, widened if widened.choices is None else replace(widened, choices=tuple(taken)), whole, section
    )


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
    conditions = {dimension.key: dimension.asks(possible) for dimension in dimensions}
    waiting, ordered = list(dimensions), []
    while waiting:
        remaining = {dimension.key for dimension in waiting}
        first = next((dimension for dimension in waiting if not remaining & conditions[dimension.key]), None)
        if first is None:
            raise ValueError(f"{', '.join(sorted(remaining))}: each is searched only where another one is this or that")
        ordered.append(first)
        waiting.remove(first)
    return ordered


def _holding(search: Search, configured: Any, whole: bool) -> Search:
    if search.choices is not None:
        return search if configured in search.choices else replace(search, choices=(configured, *search.choices))
    low, high = _ends(search)
    if configured is None or (search.log and configured <= 0):
        return Search(choices=(configured, *_spread(low, high, search.log, whole)), when=search.when)
    return replace(search, low=min(low, configured), high=max(high, configured))


def _ends(search: Search) -> tuple[float, float]:
    assert search.low is not None
    assert isinstance(search.high, int | float)
    return search.low, search.high


def _spread(low: float, high: float, log: bool, whole: bool) -> list[Any]:
    """Return both ends of a range and evenly spaced values between them; all integers if there are few."""
    if whole and high - low < _LISTED:
        return list(range(int(low), int(high) + 1))
    values = (np.geomspace if log else np.linspace)(low, high, _LISTED)
    return sorted({round(value) if whole else float(f"{value:.3g}") for value in values.tolist()})
