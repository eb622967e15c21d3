"""The model as a loss sees it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flcore.models import Backbone, Noise
from flcore.models.network import Network, Values


class ModelView:
    """A module as a loss sees it.

    ``noise`` is the dropout noise of the step, None in evaluation; ``noted`` what the loss noted in it.
    """

    def __init__(self, module: Backbone, network: Network, params: Values, noise: Noise | None = None) -> None:
        """View a module whose parameters are ``params``; other weights are asked through ``network``."""
        self._module, self._network = module, network
        self.params: Mapping[str, Tensor] = params
        self.noise = noise
        self.noted: Tensor | None = None

    def encode(self, images: Tensor, weights: Values | None = None) -> Tensor:
        """Images to what the projection reads."""
        if weights is not None:
            return self._network.encode(images, weights)
        return self._module.encode(images, self.noise)

    def project(self, encoded: Tensor, weights: Values | None = None) -> Tensor:
        """Encoded images to features."""
        if weights is not None:
            return self._network.project(encoded, weights)
        return self._module.project(encoded, self.noise)

    def features(self, images: Tensor, weights: Values | None = None) -> Tensor:
        """Images to features."""
        if weights is not None:
            return self._network.features(images, weights)
        return self._module.features(images, self.noise)

    def classify(self, features: Tensor, weights: Values | None = None) -> Tensor:
        """Features to logits."""
        if weights is not None:
            return self._network.classify(features, weights)
        return self._module.classify(features, self.noise)

    def apply_extra(self, name: str, features: Tensor, weights: Values | None = None) -> Tensor:
        """Features through a layer of the method's own."""
        if weights is not None:
            return self._network.apply_extra(name, features, weights)
        return self._module.apply_extra(name, features)

    def beside(self) -> ModelView:
        """The same module without dropout noise; one client alone has no padding."""
        return ModelView(self._module, self._network, self.params)

    def note(self, features: Tensor) -> None:
        """Keep the features of this step."""
        self.noted = features.detach()

    def take_noted(self, method: str) -> Tensor:
        """What was noted since the last call.

        Raises:
            LookupError: nothing.
        """
        features, self.noted = self.noted, None
        if features is None:
            raise LookupError(f"{method}: a phase says note, but the loss never calls model.note(features)")
        return features
