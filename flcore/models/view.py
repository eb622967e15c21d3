"""The model as losses and predictors see it, and wrappers of it.

All parts go through :meth:`View.call_part`, the only method that a wrapper overrides to change answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from flcore.models.base import Backbone, DropoutMasks
from flcore.models.network import Network, ParamDict


class View(ABC):
    """The parts of a model, with the dropout of a step; the same for one client or a stack of many.

    Every part takes other ``weights`` (parameters and buffers by name, constants of the context) to ask a frozen model
    in evaluation mode; missing names keep the initial model's values.

    Images may follow the batch's in one call: they are not padding and have no dropout. Other images alone go through
    :meth:`for_extra_inputs`.
    """

    @property
    @abstractmethod
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by name."""

    @abstractmethod
    def call_part(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        """One part of the model: ``encode``, ``project``, ``features``, ``classify`` or ``extra.<name>``."""

    @abstractmethod
    def for_extra_inputs(self) -> View:
        """Return the same model in training for inputs outside the batch: no padding, no dropout."""

    @abstractmethod
    def record_features(self, features: Tensor) -> None:
        """Record the batch's features [B, d] for class averages, if the phase records them; no gradient."""

    def encode(self, images: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Images [B, C, H, W] to the projection's input [B, e]; the features if there is no projection."""
        return self.call_part("encode", images, weights)

    def project(self, encoded: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Encoded images [B, e] to features [B, d]."""
        return self.call_part("project", encoded, weights)

    def features(self, images: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Images [B, C, H, W] to features [B, d]."""
        return self.call_part("features", images, weights)

    def classify(self, features: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Features [B, d] to logits [B, K]."""
        return self.call_part("classify", features, weights)

    def apply_extra(self, name: str, features: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Features [B, d] (or the projection's input) through a method's own layer ``name``, no dropout."""
        return self.call_part(f"extra.{name}", features, weights)


class ModuleView(View):
    """A module as a loss sees it.

    ``dropout_masks`` are the uniform numbers of the step's dropout, None in evaluation.
    """

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
        name = part.removeprefix("extra.")
        if weights is None:
            if part != name:
                return self._module.apply_extra(name, inputs)
            own: Tensor = getattr(self._module, part)(inputs, self.dropout_masks)
            return own
        if part != name:
            return self._network.apply_extra(name, inputs, weights)
        others: Tensor = getattr(self._network, part)(inputs, weights)
        return others

    def for_extra_inputs(self) -> ModuleView:
        """Return the same module without dropout; one client alone has no padding."""
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
