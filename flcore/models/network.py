"""A model as losses, predictors and servers see it: its parts as functions of inputs and weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor

from flcore.models.base import Backbone, DropoutMasks

ParamDict = Mapping[str, Tensor]
"""Parameters and buffers by the module's names; see :meth:`flcore.io.messages.Weights.values`."""

T = TypeVar("T")

_Slot = tuple[dict[str, Any], str]
"""A layer's parameters or buffers, and the name of one among them."""


class SwappedParams:
    """A module with parameters and buffers that are replaced during one call of a function.

    As ``torch.func.functional_call``, without a search for every tensor in every call, which took a fifth of a step of
    a small head. Missing names keep the module's values. Layers that are replaced later are not seen.
    """

    def __init__(self, module: Backbone) -> None:
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


class Parts(ABC):
    """A model's parts: ``encode`` images to [B, e], ``project`` to features [B, d], ``classify`` features to [B, K].

    ``weights`` are parameters and buffers by name; missing names keep the initial model's values. With weights a part
    is in evaluation mode: BatchNorm uses its statistics, dropout is off, and gradients flow to weights and inputs.
    """

    @abstractmethod
    def call_part(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        """Call ``encode``, ``project``, ``features``, ``classify`` or ``extra.<name>``, a method's own layer."""

    def encode(self, images: Tensor, weights: ParamDict | None = None) -> Tensor:
        return self.call_part("encode", images, weights)

    def project(self, encoded: Tensor, weights: ParamDict | None = None) -> Tensor:
        return self.call_part("project", encoded, weights)

    def features(self, images: Tensor, weights: ParamDict | None = None) -> Tensor:
        return self.call_part("features", images, weights)

    def classify(self, features: Tensor, weights: ParamDict | None = None) -> Tensor:
        return self.call_part("classify", features, weights)

    def apply_extra(self, name: str, features: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Map features [B, d] (or the projection's input) by a method's own layer ``name``, without dropout."""
        return self.call_part(f"extra.{name}", features, weights)


class Network(Parts):
    """A model that takes its weights as an argument, for frozen models in a loss, and for servers."""

    def __init__(self, module: Backbone) -> None:
        """Copy the architecture of ``module``."""
        copied = deepcopy(module).eval().requires_grad_(False)
        self.feature_dim, self.num_classes = copied.feature_dim, copied.num_classes
        self._bound = SwappedParams(copied)

    def call(self, function: Callable[[Backbone], T], values: ParamDict) -> T:
        """Call a function of the module with ``values``, for parts that only some architectures have."""
        return self._bound.call(values, function)

    def call_part(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        return self._bound.call(weights or {}, lambda module: module.call_part(part, inputs))


class View(Parts):
    """A model in training as losses and predictors see it, alike for one client or a stack of many.

    Images may follow the batch's in one call: they are not padding and have no dropout. Other images alone go through
    :meth:`for_extra_inputs`. A wrapper overrides :meth:`call_part` alone to change answers.
    """

    @property
    @abstractmethod
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by name."""

    @abstractmethod
    def for_extra_inputs(self) -> View:
        """Return the same model in training for inputs outside the batch: no padding, no dropout."""

    @abstractmethod
    def record_features(self, features: Tensor) -> None:
        """Record the batch's features [B, d] for class averages, if the phase records them; no gradient."""


class ModuleView(View):
    """A module with the uniform numbers of its dropout in a step, None in evaluation."""

    def __init__(
        self, module: Backbone, network: Network, params: ParamDict, dropout_masks: DropoutMasks | None = None
    ) -> None:
        """View a module with parameters ``params``; other weights go through ``network``."""
        self._module, self._network, self._params = module, network, params
        self.dropout_masks = dropout_masks
        self.recorded: Tensor | None = None

    @property
    def params(self) -> Mapping[str, Tensor]:
        return self._params

    def call_part(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        if weights is None:
            return self._module.call_part(part, inputs, self.dropout_masks)
        return self._network.call_part(part, inputs, weights)

    def for_extra_inputs(self) -> ModuleView:
        return ModuleView(self._module, self._network, self._params)

    def record_features(self, features: Tensor) -> None:
        self.recorded = features.detach()

    def take_recorded(self, method: str) -> Tensor:
        """Return the features recorded since the last call.

        Raises:
            LookupError: there are none.
        """
        features, self.recorded = self.recorded, None
        if features is None:
            raise LookupError(
                f"{method}: a phase records features, but the loss never calls model.record_features(features)"
            )
        return features


class Forwarding(View):
    """A wrapper that forwards everything to another view."""

    def __init__(self, model: View) -> None:
        self.model = model

    @property
    def params(self) -> Mapping[str, Tensor]:
        return self.model.params

    def call_part(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        return self.model.call_part(part, inputs, weights)

    def for_extra_inputs(self) -> View:
        return self.model.for_extra_inputs()

    def record_features(self, features: Tensor) -> None:
        self.model.record_features(features)


class WithLayers(Forwarding):
    """A model with other weights in some of its upper parts: projection, head, or a method's own layers."""

    def __init__(self, model: View, layers: ParamDict) -> None:
        """Wrap ``model`` with other weights of whole parts (``head.…``, ``projection.…``, ``extra.…``)."""
        super().__init__(model)
        self._layers = layers

    def call_part(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        if weights is not None:
            return super().call_part(part, inputs, weights)
        if part == "features" and self._holds("project"):
            return self.call_part("project", self.model.call_part("encode", inputs, None), None)
        return super().call_part(part, inputs, self._layers if self._holds(part) else None)

    def _holds(self, part: str) -> bool:
        prefix = {"classify": "head.", "project": "projection."}.get(part, f"{part}.")
        return any(name.startswith(prefix) for name in self._layers)


class EncodedOnce(Forwarding):
    """A model that encodes one batch of images only once, for several losses or predictors."""

    def __init__(self, model: View, images: Tensor) -> None:
        """Wrap ``model`` for ``images`` [B, C, H, W]."""
        super().__init__(model)
        self._images = images
        self._encoded: Tensor | None = None
        self._features: Tensor | None = None

    @property
    def encoded(self) -> Tensor:
        """The encoded batch, [B, e], computed at the first use."""
        if self._encoded is None:
            self._encoded = self.model.encode(self._images)
        return self._encoded

    def call_part(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        if weights is not None or inputs is not self._images or part not in ("encode", "features"):
            return super().call_part(part, inputs, weights)
        if part == "encode":
            return self.encoded
        if self._features is None:
            self._features = self.model.project(self.encoded)
        return self._features
