"""A method that wraps a base method and forwards to it everything that it does not override."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from flcore.core.errors import ConfigError
from flcore.core.params import build, param
from flcore.io.messages import Weights
from flcore.io.records import Payloads, Record
from flcore.methods import types as fl
from flcore.methods.api import Method
from flcore.methods.registry import METHODS

T = TypeVar("T")


@dataclass(frozen=True)
class WrapperMethod(Method):
    """A base method with additions: a subclass overrides what it adds, and calls ``super()`` for the base's part.

    Without overrides it equals the base bit for bit. Names of additions to the server state differ from the base's.

    ``base_settings`` holds hyper-parameters per base: ``{fedprox: {method.mu: 0.1}}``. Other bases use their defaults.
    """

    base: str = param("fedavg", "the method underneath; any that trains a global model which answers by itself")
    base_settings: Mapping[str, Any] = param(
        {}, "per base, dotted keys of its own as in compare.settings: {fedprox: {method.mu: 0.1}}"
    )

    def __post_init__(self) -> None:
        """Refuse an unknown base, invalid settings for one, and a method that wraps itself."""
        super().__post_init__()
        for name in dict.fromkeys((self.base, *self.base_settings)):
            where = f"base = {name}" if name == self.base else f"base_settings.{name}"
            if name not in METHODS:
                raise ValueError(f"{where}: there is no such method; it may be {', '.join(possible_bases())}")
            # Before it is built, which would build its own base, without end.
            if METHODS[name] is type(self):
                raise ValueError(f"{where}: {self.name} cannot wrap itself")
            if not _base(name, self.base_settings).can_be_base:
                bases = ", ".join(possible_bases())
                raise ValueError(f"{where}: it has no trained global model that predicts by itself; it may be {bases}")
        for below in _underneath(self):
            if type(below) is type(self):
                raise ValueError(f"base = {self.base}: it wraps {self.name} already")

    @cached_property
    def base_method(self) -> Method:
        return _base(self.base, self.base_settings)

    def base_model(self, server: Record) -> Weights:
        model = self.base_method.global_model(server)
        assert model is not None  # it can be calibrated
        return model

    def exchanges_with(self, round_number: int, setting: fl.FederationContext, *added: str) -> tuple[fl.Exchange, ...]:
        """Return the base's exchanges, each with its server steps by name; ``added`` steps follow in the last one."""
        every = tuple(self.base_method.server_steps())
        exchanges = [
            replace(exchange, server_steps=every if exchange.server_steps is None else exchange.server_steps)
            for exchange in self.base_method.round_exchanges(round_number, setting)
        ]
        return (*exchanges[:-1], replace(exchanges[-1], server_steps=(*(exchanges[-1].server_steps or ()), *added)))

    def merged(self, theirs: Mapping[str, T], added: Mapping[str, T]) -> dict[str, T]:
        """Return the base's entries and the added ones.

        Raises:
            ConfigError: both have the same name.
        """
        twice = sorted(theirs.keys() & added.keys())
        if twice:
            raise ConfigError(f"method.base = {self.base}: {self.name} adds {twice[0]!r}, which it has")
        return {**theirs, **added}

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        return self.base_method.reply(ctx, trained)


_OWN = frozenset({"AUTHORS", "aggregates", "releases_weights_alone", "reply"})
"""Members of :class:`Method` that are not forwarded: a wrapper defines or derives them itself."""


def _forward(name: str, member: object) -> object:
    if not callable(member):
        return property(lambda self: getattr(self.base_method, name))

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return getattr(self.base_method, name)(*args, **named)

    forward.__name__, forward.__qualname__ = name, f"WrapperMethod.{name}"  # a compiled loss is known by its name
    return forward


for _name, _member in vars(Method).items():
    if not _name.startswith("_") and _name not in _OWN:
        setattr(WrapperMethod, _name, _forward(_name, _member))


def possible_bases() -> tuple[str, ...]:
    """Return the methods that may be a base with default parameters; imports every method."""
    return tuple(name for name, method in METHODS.items() if method().can_be_base)


def _underneath(method: WrapperMethod) -> Iterator[Method]:
    below: Method = method
    while isinstance(below, WrapperMethod):
        below = below.base_method
        yield below


def _base(name: str, settings: Mapping[str, Any]) -> Method:
    own = settings.get(name, {})
    if not isinstance(own, Mapping) or not all(str(key).startswith("method.") for key in own):
        raise ValueError(f"base_settings.{name} = {own}: expected dotted keys with values, such as method.mu: 0.1")
    values = {str(key).removeprefix("method."): value for key, value in own.items()}
    return build(METHODS[name], values, f"method.base_settings.{name}")
