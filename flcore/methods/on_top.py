"""A method on top of another one: everything that it does not answer itself, the base answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flcore.messages import Weights
from flcore.methods.base import Method
from flcore.methods.registry import METHODS
from flcore.methods.vocabulary import (
    Batch,
    Before,
    Context,
    Exchange,
    Leg,
    LocalModel,
    Phase,
    Predict,
    Setting,
    Stage,
    TrainedClient,
    Turn,
)
from flcore.params import build, param, unknown_key
from flcore.records import Payloads, Record


@dataclass(frozen=True)
class OnTop(Method):
    """A base method with something added: a subclass overrides what it adds, and calls ``super()`` for the base's part.

    Without overrides it *is* the base, to the bit. ``base_settings`` holds hyper-parameters by base, written as in
    ``compare.settings``: ``{fedprox: {method.mu: 0.1}}``; other bases run with their defaults.
    """

    base: str = param("fedavg", "the method underneath; any that says it can be calibrated")
    base_settings: Mapping[str, Any] = param(
        {}, "per base, dotted keys of its own as in compare.settings: {fedprox: {method.mu: 0.1}}"
    )

    def __post_init__(self) -> None:
        """Refuse a base, or settings for one, that do not exist.

        Raises:
            ValueError: no such base, one that cannot be calibrated, or settings that are not dotted keys of its own.
        """
        for name in (*self.base_settings, self.base):
            _base(name, self.base_settings)
        if not self.base_method.can_be_calibrated:
            raise ValueError(
                f"base = {self.base}: it trains no global model that answers by itself, with these settings; "
                "`protofl list methods` says which do"
            )

    @cached_property
    def base_method(self) -> Method:
        """The method underneath."""
        return _base(self.base, self.base_settings)

    # Facts about the base; a class attribute of Method is a property here.
    trains = property(lambda self: self.base_method.trains)
    data_scope = property(lambda self: self.base_method.data_scope)
    has_global_model = property(lambda self: self.base_method.has_global_model)
    has_vote = property(lambda self: self.base_method.has_vote)

    @property
    def can_be_calibrated(self) -> bool:
        """The base's."""
        return self.base_method.can_be_calibrated

    @property
    def answers_from_memory(self) -> bool:
        """The base's."""
        return self.base_method.answers_from_memory

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

    def score_before(self) -> Mapping[str, Before]:
        """The base's."""
        return self.base_method.score_before()

    def global_model(self, server: Record, setting: Setting) -> Weights | None:
        """The base's."""
        return self.base_method.global_model(server, setting)

    def client_model(self, server: Record, client: int, memory: Record, setting: Setting) -> Weights | None:
        """The base's."""
        return self.base_method.client_model(server, client, memory, setting)

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """The base's."""
        return self.base_method.predict(model, images, server, classes)

    def alternatives(self) -> Mapping[str, Predict]:
        """The base's."""
        return self.base_method.alternatives()

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """The base's."""
        return self.base_method.generated_features(server, setting, count, generator)

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """The base's."""
        return self.base_method.privacy(releases)


def _base(name: str, settings: Mapping[str, Any]) -> Method:
    """A base with its hyper-parameters.

    Raises:
        ValueError: no such method, or settings that are not dotted keys of its own.
        ConfigError: a hyper-parameter that it does not have, or a value out of range.
    """
    if name not in METHODS:
        raise ValueError(unknown_key(f"base = {name}", name, METHODS).replace("key", "method", 1))
    own = settings.get(name, {})
    if not isinstance(own, Mapping) or not all(str(key).startswith("method.") for key in own):
        raise ValueError(f"base_settings.{name} = {own}: expected dotted keys with values, such as method.mu: 0.1")
    values = {str(key).removeprefix("method."): value for key, value in own.items()}
    return build(METHODS[name], values, f"method.base_settings.{name}")
