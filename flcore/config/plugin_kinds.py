"""What a plug-in may bring, and what keeps a class of it from being used."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from flcore.core.errors import ConfigError
from flcore.core.params import build, declared
from flcore.core.registry import Registry
from flcore.data.partitioners import PARTITIONERS
from flcore.data.partitioners.base import Partitioner
from flcore.data.sources import SOURCES
from flcore.data.sources.base import Source
from flcore.methods import METHODS, Method
from flcore.models import MODELS, ModelSpec
from flcore.sampling import SAMPLERS
from flcore.sampling.base import Sampler

KINDS: tuple[tuple[Registry[Any], type], ...] = (
    (METHODS, Method),
    (SOURCES, Source),
    (PARTITIONERS, Partitioner),
    (MODELS, ModelSpec),
    (SAMPLERS, Sampler),
)
"""What a plug-in may bring: each registry with the base class of its entries."""

PLACES: Mapping[tuple[str, str], Registry[Any]] = {
    ("method", "name"): METHODS,
    ("data", "name"): SOURCES,
    ("partition", "name"): PARTITIONERS,
    ("model", "name"): MODELS,
    ("federation", "sampler"): SAMPLERS,
}
"""Section and key that name an entry of a registry."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def problem_of(registry: Registry[Any], cls: Any) -> str | None:
    """Return what keeps a class from being used."""
    for attribute in ("name", "summary", *(["citation"] if registry is METHODS else [])):
        value = vars(cls).get(attribute)
        if not isinstance(value, str) or not value.strip():
            return f'has no {attribute} of its own; write {attribute}: ClassVar[str] = "..."'
    if not _NAME.fullmatch(cls.name):
        return f"is called {cls.name!r}; a name is made of a-z, 0-9 and _, a letter first"
    if cls.name in registry:
        return f"is called {cls.name}, and there is a {registry.kind} called so already; choose another name"
    if inspect.isabstract(cls):
        return f"does not answer {', '.join(sorted(cls.__abstractmethods__))}"
    if "__dataclass_fields__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
        return "is no frozen dataclass; write @dataclass(frozen=True) above it"
    loose = [found.name for found in dataclasses.fields(cls) if "help" not in found.metadata]
    if loose:
        return f"declares {', '.join(loose)} without flcore.core.params.param, or means a ClassVar"
    try:
        entry = build(cls, {parameter.name: parameter.default for parameter in declared(cls)}, cls.name)
        if isinstance(entry, Method):
            entry.server_steps()
    except Exception as error:
        return f"cannot be made with its own defaults: {in_words(error)}"
    return None


def in_words(error: BaseException) -> str:
    """Return an error as part of a sentence."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}".rstrip(": ")
