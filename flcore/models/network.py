"""A model's parts as pure functions of weights, in evaluation mode: for frozen models in a loss, and for servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from flcore.models.base import Backbone

Values = Mapping[str, Tensor]
"""Parameters and buffers by the module's names; see :meth:`flcore.messages.Weights.values`."""

Result = TypeVar("Result")


class Bound(nn.Module):
    """A module with other parameters and buffers for the length of one call of a function."""

    def __init__(self, module: Backbone) -> None:
        """Wrap a module; its own values stand in for names that a call does not give."""
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[Backbone], Result]) -> Result:
        """Hand the module to a function."""
        return function(self.module)

    def call(self, values: Values, function: Callable[[Backbone], Result]) -> Result:
        """``function(module)`` with ``values`` in place of the module's own."""
        named = {f"module.{name}": value for name, value in values.items()}
        result: Result = functional_call(self, named, (function,))
        return result


class Network:
    """A model without weights of its own.

    Evaluation mode: BatchNorm uses the statistics given, dropout is off. Gradients flow to ``values`` and inputs.
    """

    def __init__(self, module: Backbone) -> None:
        """Copy the architecture; ``module`` itself is not touched."""
        own = deepcopy(module).eval().requires_grad_(False)
        self.feature_dim, self.num_classes = own.feature_dim, own.num_classes
        self._bound = Bound(own)

    def ask(self, function: Callable[[Backbone], Result], values: Values) -> Result:
        """Any function of the module with ``values``: what only some architectures can say."""
        return self._bound.call(values, function)

    def encode(self, images: Tensor, values: Values) -> Tensor:
        """Images [B, C, H, W] to what the projection reads [B, e]."""
        return self._bound.call(values, lambda module: module.encode(images))

    def project(self, encoded: Tensor, values: Values) -> Tensor:
        """Encoded images [B, e] to features [B, d]."""
        return self._bound.call(values, lambda module: module.project(encoded))

    def features(self, images: Tensor, values: Values) -> Tensor:
        """Images [B, C, H, W] to features [B, d]."""
        return self._bound.call(values, lambda module: module.features(images))

    def classify(self, features: Tensor, values: Values) -> Tensor:
        """Features [B, d] to logits [B, K]."""
        return self._bound.call(values, lambda module: module.classify(features))

    def apply_extra(self, name: str, features: Tensor, values: Values) -> Tensor:
        """Features [B, d] through the method's own layer ``name``."""
        return self._bound.call(values, lambda module: module.apply_extra(name, features))
