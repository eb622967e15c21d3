"""``preset: authors``: values of a method's published code that differ from this project's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from flcore.core.params import param
from flcore.methods.api import ValidatedParams


@dataclass(frozen=True)
class AuthorsPreset(ValidatedParams):
    """Mixin that adds the authors' values as a preset; list it before classes that validate parameters.

    Attributes:
        AUTHORS: the values by parameter, from the specification.
    """

    AUTHORS: ClassVar[Mapping[str, Any]]

    preset: Literal["default", "authors"] = param(
        "default", "authors: where their code differs from the defaults, as in their code"
    )

    def __post_init__(self) -> None:
        """Set the preset's values, so that a method reads only its parameters.

        Raises:
            ValueError: another value is set for one of them.
        """
        if self.preset == "authors":
            defaults = {declared.name: declared.default for declared in fields(self)}
            for name, value in self.AUTHORS.items():
                if getattr(self, name) not in (value, defaults[name]):
                    raise ValueError(
                        f"preset = authors means {name} = {value}, not {getattr(self, name)}; leave {name} out, or "
                        "choose one by one with preset = default"
                    )
                object.__setattr__(self, name, value)
        super().__post_init__()
