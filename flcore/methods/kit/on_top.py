"""A method on top of another one: everything that it does not answer itself, the base answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flcore.core.errors import ConfigError
from flcore.core.params import build, param
from flcore.io.messages import Weights
from flcore.io.records import Payloads, Record
from flcore.methods.api import Method, Part, ScoreKind
from flcore.methods.registry import METHODS
from flcore.methods.types import (
    Batch,
    Before,
    Context,
    Exchange,
    Kind,
    Leg,
    LocalModel,
    Phase,
    Predict,
    Setting,
    Stage,
    TrainedClient,
    Turn,
)

T = TypeVar("T")


@dataclass(frozen=True)
class OnTop(Method):
    """A base method with something added: a subclass overrides what it adds, and calls ``super()`` for the base's part.

    Without overrides it *is* the base, to the bit. The base's payloads in the server's record stay the base's: what is
    added stands beside them under names of its own, so that the base goes on as if it were alone.

    ``base_settings`` holds hyper-parameters by base, written as in ``compare.settings``: ``{fedprox: {method.mu:
    0.1}}``; other bases run with their defaults. Ranges that tuning searches are declared where a parameter is: those
    of a base by the base, and none of them here.
    """

    base: str = param("fedavg", "the method underneath; any that trains a global model which answers by itself")
    base_settings: Mapping[str, Any] = param(
        {}, "per base, dotted keys of its own as in compare.settings: {fedprox: {method.mu: 0.1}}"
    )

    def __post_init__(self) -> None:
        """Refuse a base, or settings for one, that do not exist, and a method on top of itself.

        Raises:
            ValueError: no such base, one that cannot be calibrated, or settings that are not dotted keys of its own.
        """
        super().__post_init__()
        for name in dict.fromkeys((self.base, *self.base_settings)):
            where = f"base = {name}" if name == self.base else f"base_settings.{name}"
            if name not in METHODS:
                raise ValueError(f"{where}: there is no such method; it may be {', '.join(possible_bases())}")
            # Before it is made: it would make its own base, and so on without an end.
            if METHODS[name] is type(self):
                raise ValueError(f"{where}: {self.name} on top of {self.name} has nothing to add")
            if not _base(name, self.base_settings).can_be_calibrated:
                raise ValueError(
                    f"{where}: nothing goes on top of it as it is set, it has no global model that answers by itself "
                    f"and goes on being trained; it may be {', '.join(possible_bases())}"
                )
        for below in _underneath(self):
            if type(below) is type(self):
                raise ValueError(f"base = {self.base}: there is a {self.name} under it already")

    @cached_property
    def base_method(self) -> Method:
        """The method underneath."""
        return _base(self.base, self.base_settings)

    def base_model(self, server: Record, setting: Setting) -> Weights:
        """The base's global model: what there is to calibrate, and what answers for it."""
        model = self.base_method.global_model(server, setting)
        assert model is not None  # it can be calibrated
        return model

    def legs_with(self, round_number: int, setting: Setting, *own: str) -> tuple[Leg, ...]:
        """The base's legs, each with the base's stages by name; in the last one ``own`` stages follow them."""
        every = tuple(self.base_method.stages())
        legs = [
            replace(leg, stages=every if leg.stages is None else leg.stages)
            for leg in self.base_method.legs(round_number, setting)
        ]
        return (*legs[:-1], replace(legs[-1], stages=(*(legs[-1].stages or ()), *own)))

    def beside(self, theirs: Mapping[str, T], own: Mapping[str, T]) -> dict[str, T]:
        """The base's things by name, and what is added to them.

        Raises:
            ConfigError: a name stands twice.
        """
        twice = sorted(theirs.keys() & own.keys())
        if twice:
            raise ConfigError(f"method.base = {self.base}: it and {self.name} both have what they call {twice[0]!r}")
        return {**theirs, **own}

    # Facts about the base; a class attribute of Method is a property here.
    trains = property(lambda self: self.base_method.trains)
    data_scope = property(lambda self: self.base_method.data_scope)
    has_global_model = property(lambda self: self.base_method.has_global_model)
    has_vote = property(lambda self: self.base_method.has_vote)
    trains_locally = property(lambda self: self.base_method.trains_locally)
    needs_linear_head = property(lambda self: self.base_method.needs_linear_head)
    no_tasks = property(lambda self: self.base_method.no_tasks)
    needs = property(lambda self: self.base_method.needs)

    @property
    def can_be_calibrated(self) -> bool:
        """The base's."""
        return self.base_method.can_be_calibrated

    @property
    def broadcasts_model(self) -> bool:
        """The base's."""
        return self.base_method.broadcasts_model

    @property
    def answers_from_memory(self) -> bool:
        """The base's."""
        return self.base_method.answers_from_memory

    @property
    def answers_alike(self) -> bool:
        """The base's."""
        return self.base_method.answers_alike

    def num_outputs(self, num_classes: int) -> int:
        """The base's."""
        return self.base_method.num_outputs(num_classes)

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, nn.Module]:
        """The base's."""
        return self.base_method.extra_layers(feature_dim, num_classes, encoded_dim)

    def start_server(self, setting: Setting) -> Payloads:
        """The base's."""
        return self.base_method.start_server(setting)

    def legs(self, round_number: int, setting: Setting) -> tuple[Leg, ...]:
        """The base's."""
        return self.base_method.legs(round_number, setting)

    def phases(self) -> tuple[Phase, ...]:
        """The base's."""
        return self.base_method.phases()

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The base's."""
        return self.base_method.broadcast(server, client, exchange)

    def begin(self, turn: Turn) -> Weights:
        """The base's."""
        return self.base_method.begin(turn)

    def context(self, turn: Turn) -> Context:
        """The base's."""
        return self.base_method.context(turn)

    def frozen(self, turn: Turn) -> Mapping[str, tuple[Part, Weights]]:
        """The base's."""
        return self.base_method.frozen(turn)

    def tables(self, turn: Turn) -> Mapping[str, Tensor]:
        """The base's."""
        return self.base_method.tables(turn)

    def draws(self, turn: Turn, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """The base's."""
        return self.base_method.draws(turn, steps, generator)

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The base's."""
        return self.base_method.loss(model, batch, context)

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The base's."""
        return self.base_method.reply(turn, trained)

    def stages(self) -> Mapping[str, Stage]:
        """The base's."""
        return self.base_method.stages()

    @property
    def sends(self) -> frozenset[Kind]:
        """The base's."""
        return self.base_method.sends

    def score_before(self) -> Mapping[str, Before]:
        """The base's."""
        return self.base_method.score_before()

    def global_model(self, server: Record, setting: Setting) -> Weights | None:
        """The base's."""
        return self.base_method.global_model(server, setting)

    def client_model(self, server: Record, client: int, memory: Record, setting: Setting) -> Weights | None:
        """The base's."""
        return self.base_method.client_model(server, client, memory, setting)

    @property
    def score_kind(self) -> ScoreKind:
        """The base's."""
        return self.base_method.score_kind

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """The base's."""
        return self.base_method.predict(model, images, server, classes)

    def predict_private(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """The base's: what is added answers at the server."""
        return self.base_method.predict_private(model, images, server, classes)

    def alternatives(self) -> Mapping[str, Predict]:
        """The base's."""
        return self.base_method.alternatives()

    @property
    def projections(self) -> Predict | None:
        """The base's."""
        return self.base_method.projections

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """The base's."""
        return self.base_method.generated_features(server, setting, count, generator)

    def virtual_images(self, server: Record, setting: Setting) -> Tensor | None:
        """The base's."""
        return self.base_method.virtual_images(server, setting)

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """The base's."""
        return self.base_method.privacy(releases)


def possible_bases() -> tuple[str, ...]:
    """Names of the methods that may be a base, as they are set by default; imports every method."""
    return tuple(name for name, method in METHODS.items() if method().can_be_calibrated)


def patched(model: Weights, part: Weights | None) -> Weights:
    """A model with the parameters of a part of it in place of its own; the very model without a part."""
    return model if part is None else Weights({**model.params, **part.params}, model.buffers)


def _underneath(method: OnTop) -> Iterator[Method]:
    """The base, its base, and so on."""
    below: Method = method
    while isinstance(below, OnTop):
        below = below.base_method
        yield below


def _base(name: str, settings: Mapping[str, Any]) -> Method:
    """A registered method with its hyper-parameters.

    Raises:
        ValueError: settings that are not dotted keys of its own.
        ConfigError: a hyper-parameter that it does not have, or a value out of range.
    """
    own = settings.get(name, {})
    if not isinstance(own, Mapping) or not all(str(key).startswith("method.") for key in own):
        raise ValueError(f"base_settings.{name} = {own}: expected dotted keys with values, such as method.mu: 0.1")
    values = {str(key).removeprefix("method."): value for key, value in own.items()}
    return build(METHODS[name], values, f"method.base_settings.{name}")
