"""A model's parts as pure functions of weights, in evaluation mode: for frozen models in a loss, and for servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor

from flcore.models.base import Backbone

ParamDict = Mapping[str, Tensor]
"""Parameters and buffers by the module's names; see :meth:`flcore.io.messages.Weights.values`."""

T = TypeVar("T")

_Slot = tuple[dict[str, Any], str]
"""A layer's parameters or buffers, and the name of one among them."""


class SwappedParams:
    """A module whose parameters and buffers are replaced during one call of a function.

    As ``torch.func.functional_call``, without a search for every tensor in every call, which took a fifth of a step of
    a small head. Layers that are replaced later are not seen.
    """

    def __init__(self, module: Backbone) -> None:
        """Wrap a module; names that a call does not give keep the module's values."""
        self.module = module
        self._slots: dict[str, list[_Slot]] = {}
        of_tensor: dict[int, list[_Slot]] = {}
        for prefix, layer in module.named_modules(remove_duplicate=False):
            own: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
            for place in ((tensors, key) for tensors in own for key in tensors if tensors[key] is not None):
                # A tensor that two layers share is one value, by whichever name it is given.
                tensors, key = place
                places = of_tensor.setdefault(id(tensors[key]), [])
                places.append(place)
                self._slots[f"{prefix}.{key}" if prefix else key] = places

    def call(self, values: ParamDict, function: Callable[[Backbone], T]) -> T:
        """Return ``function(module)`` with ``values`` in place of the module's own.

        Raises:
            KeyError: a name that the module does not have.
        """
        own: list[tuple[_Slot, Tensor]] = []
        try:
            for name, value in values.items():
                for place in self._slots[name]:
                    tensors, key = place
                    own.append((place, tensors[key]))
                    tensors[key] = value
            return function(self.module)
        finally:
            for (tensors, key), tensor in reversed(own):
                tensors[key] = tensor


class Network:
    """A model in evaluation mode that takes its weights as an argument.

    BatchNorm uses the statistics given, dropout is off. Gradients flow to ``values`` and inputs.
    """

    def __init__(self, module: Backbone) -> None:
        """Copy the architecture of ``module``."""
        own = deepcopy(module).eval().requires_grad_(False)
        self.feature_dim, self.num_classes = own.feature_dim, own.num_classes
        self._bound = SwappedParams(own)

    def call(self, function: Callable[[Backbone], T], values: ParamDict) -> T:
        """Call a function of the module with ``values``, for parts that only some architectures have."""
        return self._bound.call(values, function)

    def encode(self, images: Tensor, values: ParamDict) -> Tensor:
        """Images [B, C, H, W] to the projection's input [B, e]."""
        return self._bound.call(values, lambda module: module.encode(images))

    def project(self, encoded: Tensor, values: ParamDict) -> Tensor:
        """Encoded images [B, e] to features [B, d]."""
        return self._bound.call(values, lambda module: module.project(encoded))

    def features(self, images: Tensor, values: ParamDict) -> Tensor:
        """Images [B, C, H, W] to features [B, d]."""
        return self._bound.call(values, lambda module: module.features(images))

    def classify(self, features: Tensor, values: ParamDict) -> Tensor:
        """Features [B, d] to logits [B, K]."""
        return self._bound.call(values, lambda module: module.classify(features))

    def apply_extra(self, name: str, features: Tensor, values: ParamDict) -> Tensor:
        """Features [B, d] through the method's own layer ``name``."""
        return self._bound.call(values, lambda module: module.apply_extra(name, features))
