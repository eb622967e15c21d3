"""What a study searches: the method's own parameters, and those that every method has in common.

A learning rate decides more than a method does, so a comparison is fair only if all methods may choose it. Hence the
shared part, which is all that FedAvg has: the clients' learning rate, its schedule, momentum, and how long they train.
Not in it are what says how much is spent and how it is scored (rounds, participation, evaluation), and the batch size,
whose effect is that of learning rate and number of steps.

Every range holds the value that the configuration gives, so that a study can begin with that: a value outside widens
its range, and one that no range can hold (null, or 0 on a logarithmic scale) turns it into a list of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flcore.config import Config
from flcore.errors import ConfigError
from flcore.params import Search, declared, shown

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

_LISTED = 8
"""Values that stand for a range beside null."""


@dataclass(frozen=True)
class Dimension:
    """A key of the configuration and the values that it may take.

    Attributes:
        key: dotted.
        search: the range, or the choices.
        whole: whether a range has whole numbers alone.
    """

    key: str
    search: Search
    whole: bool = False

    def suggest(self, trial: BaseTrial) -> Any:
        """A value, chosen by a trial's sampler; one that the trial has already stays."""
        search = self.search
        if search.choices is not None:
            return trial.suggest_categorical(self.key, search.choices)
        assert search.low is not None
        assert search.high is not None
        if self.whole:
            return trial.suggest_int(self.key, int(search.low), int(search.high), log=search.log)
        return trial.suggest_float(self.key, search.low, search.high, log=search.log)

    def describe(self) -> dict[str, Any]:
        """The values as JSON."""
        if self.search.choices is not None:
            return {"choices": list(self.search.choices)}
        return {"low": self.search.low, "high": self.search.high, "log": self.search.log, "whole": self.whole}

    @property
    def words(self) -> str:
        """The values for people: ``0.001 to 0.3, logarithmic``, or ``constant, cosine``."""
        if self.search.choices is not None:
            return ", ".join(shown(choice) for choice in self.search.choices)
        return f"{self.search.low:g} to {self.search.high:g}" + (", logarithmic" if self.search.log else "")


def space(config: Config) -> tuple[Dimension, ...]:
    """What a study of a configuration searches: the method's own parameters, then the shared ones.

    What the configuration refuses whatever the value is, such as a momentum for a method that works without, or a
    parameter that a preset has set, is left out.
    """
    mapping = config.to_mapping()
    found = (_fitted(mapping, *offered) for offered in (*_own(config), *_shared(config)))
    return tuple(dimension for dimension in found if dimension is not None)


def with_values(mapping: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A nested configuration with other values, by dotted key."""
    changed = dict(mapping)
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed[section] = {**changed[section], name: value}
    return changed


def _own(config: Config) -> Iterator[tuple[str, Search, bool]]:
    for parameter in declared(type(config.method)):
        if parameter.search is not None:
            yield f"method.{parameter.name}", parameter.search, parameter.type.startswith("int")


def _shared(config: Config) -> Iterator[tuple[str, Search, bool]]:
    """The ranges are the union of those in the methods' specifications, section 10."""
    is_sgd = config.local.optimizer == "sgd"
    yield "local.lr", Search(1e-3, 0.3, log=True) if is_sgd else Search(1e-4, 1e-2, log=True), False
    if is_sgd:
        yield "local.momentum", Search(choices=(0.0, 0.5, 0.9)), False
    yield "local.schedule", Search(choices=("constant", "exponential", "cosine")), False
    if config.local.steps is None:
        yield "local.epochs", Search(1, 10, log=True), True
    else:
        yield "local.steps", Search(5, 100, log=True), True


def _fitted(mapping: Mapping[str, Any], key: str, search: Search, whole: bool) -> Dimension | None:
    """A dimension that holds the given value, of those values that the configuration takes; None if it takes no other.

    Of a range its ends are tried.
    """
    section, _, name = key.partition(".")
    given = mapping[section][name]
    held = _holding(search, given, whole)
    tried = (held.low, held.high) if held.choices is None else held.choices
    values = [int(value) if whole and value is not None else value for value in tried]
    taken = [value for value in values if value == given or _takes(mapping, key, value)]
    if all(value == given for value in taken):
        return None
    return Dimension(key, held if held.choices is None else Search(choices=tuple(taken)), whole)


def _takes(mapping: Mapping[str, Any], key: str, value: Any) -> bool:
    try:
        Config.from_mapping(with_values(mapping, {key: value}))
    except ConfigError:
        return False
    return True


def _holding(search: Search, given: Any, whole: bool) -> Search:
    if search.choices is not None:
        return search if given in search.choices else replace(search, choices=(given, *search.choices))
    assert search.low is not None
    assert search.high is not None
    if given is None or (search.log and given <= 0):
        return Search(choices=(given, *_spread(search.low, search.high, search.log, whole)))
    return replace(search, low=min(search.low, given), high=max(search.high, given))


def _spread(low: float, high: float, log: bool, whole: bool) -> list[Any]:
    """Both ends of a range and values evenly between them; all of them where there are few."""
    if whole and high - low < _LISTED:
        return list(range(int(low), int(high) + 1))
    values = (np.geomspace if log else np.linspace)(low, high, _LISTED)
    return sorted({round(value) if whole else float(f"{value:.3g}") for value in values.tolist()})
