"""``preset: authors``: the choices of a method's published code, where they are not this project's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from flcore.core.params import param
from flcore.methods.api import ValidatedParams


@dataclass(frozen=True)
class AuthorsPreset(ValidatedParams):
    """A parameter that puts the authors' values in; to be mixed into a method, in front of what checks them.

    Attributes:
        AUTHORS: those values, by parameter: what the specification says of the code, where a default differs from it.
    """

    AUTHORS: ClassVar[Mapping[str, Any]]

    preset: Literal["default", "authors"] = param(
        "default", "authors: where their code differs from the defaults, as in their code"
    )

    def __post_init__(self) -> None:
        """Put the preset's values in, so that a method reads its parameters and nothing else.

        Raises:
            ValueError: another value was chosen for one of them, which would be lost without a word.
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
