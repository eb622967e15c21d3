"""When a parameter has an effect: what other parameters of the same section have to be.

``on("use_memory") & above("weight_memory")`` is said once, in the method's file: the method asks it whether the term is
there, and tuning whether there is something to search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Condition(ABC):
    """Something that the values of a section meet or do not meet."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The parameters that it asks about, each once."""

    @property
    @abstractmethod
    def words(self) -> str:
        """It, for people: ``use_memory and weight_memory > 0``."""

    @abstractmethod
    def may_hold(self, possible: Mapping[str, tuple[Any, ...]]) -> bool:
        """Whether some of these values meet it: per parameter those that it may take, of a range both ends.

        Parameters count as independent of each other, so that it may say yes once too often, and never no.
        """

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether these values meet it, by name; there may be others among them."""
        return self.may_hold({name: (values[name],) for name in self.names})

    def holds_for(self, section: object) -> bool:
        """Whether the values of a section, such as a method, meet it."""
        return self.holds({name: getattr(section, name) for name in self.names})

    def __and__(self, other: Condition) -> Condition:
        return _Every((self, other))

    def __or__(self, other: Condition) -> Condition:
        return _Some((self, other))


def on(name: str) -> Condition:
    """A switch that is on."""
    return _On(name)


def among(name: str, *values: Any) -> Condition:
    """A choice that is one of these."""
    return _Among(name, values)


def above(name: str, bound: float = 0) -> Condition:
    """A number beyond a bound, such as a weight that is not 0; null is not."""
    return _Above(name, bound)


@dataclass(frozen=True)
class _About(Condition):
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


class _On(_About):
    @property
    def words(self) -> str:
        return self.name

    def may_hold(self, possible: Mapping[str, tuple[Any, ...]]) -> bool:
        return True in possible[self.name]


@dataclass(frozen=True)
class _Among(_About):
    values: tuple[Any, ...]

    @property
    def words(self) -> str:
        return f"{self.name} is {' or '.join(str(value).lower() for value in self.values)}"

    def may_hold(self, possible: Mapping[str, tuple[Any, ...]]) -> bool:
        return any(value in self.values for value in possible[self.name])


@dataclass(frozen=True)
class _Above(_About):
    bound: float

    @property
    def words(self) -> str:
        return f"{self.name} > {self.bound:g}"

    def may_hold(self, possible: Mapping[str, tuple[Any, ...]]) -> bool:
        return any(value is not None and value > self.bound for value in possible[self.name])


@dataclass(frozen=True)
class _Joined(Condition):
    parts: tuple[Condition, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part.names))


class _Every(_Joined):
    @property
    def words(self) -> str:
        parts = (f"({part.words})" if isinstance(part, _Some) else part.words for part in self.parts)
        return " and ".join(dict.fromkeys(parts))

    def may_hold(self, possible: Mapping[str, tuple[Any, ...]]) -> bool:
        return all(part.may_hold(possible) for part in self.parts)


class _Some(_Joined):
    @property
    def words(self) -> str:
        return " or ".join(dict.fromkeys(part.words for part in self.parts))

    def may_hold(self, possible: Mapping[str, tuple[Any, ...]]) -> bool:
        return any(part.may_hold(possible) for part in self.parts)
