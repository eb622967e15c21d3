"""Checks of what a YAML file of ``papers`` gives, each with a message that names the place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flcore.core.errors import ConfigError


def number(value: Any, place: str) -> float:
    """A number, which true and false are not.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{place} = {value}: expected a number")
    return float(value)


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """Keys, as text, with their values.

    Raises:
        ConfigError: there are no keys.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: expected keys with values")
    return {str(key): own for key, own in value.items()}


def only(given: Mapping[str, Any], place: str, known: Sequence[str]) -> None:
    """Refuse keys that are not known.

    Raises:
        ConfigError: there is one.
    """
    for key in given:
        if key not in known:
            raise ConfigError(f"{place}: {key} is not known; one of {', '.join(known)}")


def needed(given: Mapping[str, Any], key: str, place: str) -> Any:
    """The value of a key that must be there.

    Raises:
        ConfigError: it is not.
    """
    if given.get(key) is None:
        raise ConfigError(f"{place}: {key} is not given")
    return given[key]
