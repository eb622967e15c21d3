"""The model as a loss and an answer see it, and what may stand in front of it.

Everything goes through one door, :meth:`View.ask`: a view that changes what a model says overrides that alone, and
forgets nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from flcore.models.base import Backbone, Drops
from flcore.models.network import Network, ParamDict


class View(ABC):
    """The parts of a model; the dropout of a step is inside. The same for one client or a stack of many.

    Every part takes other ``weights`` (parameters and buffers by name, constants of the context) to ask a frozen model
    instead, in evaluation mode; names that are not given are those of the initial model.

    Images may stand behind those of the batch in one call: they are not padding, and have no dropout. Other images
    alone go through :meth:`beside`.
    """

    @property
    @abstractmethod
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by name."""

    @abstractmethod
    def ask(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        """One part of the model: ``encode``, ``project``, ``features``, ``classify`` or ``extra.<name>``."""

    @abstractmethod
    def beside(self) -> View:
        """The same model in training for inputs that are not the batch's: none is padding; without dropout."""

    @abstractmethod
    def note(self, features: Tensor) -> None:
        """Leave the batch's features [B, d] to be averaged by class where the phase's ``note`` says so; no gradient."""

    def encode(self, images: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Images [B, C, H, W] to what the projection reads [B, e]; the features where there is no projection."""
        return self.ask("encode", images, weights)

    def project(self, encoded: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Encoded images [B, e] to features [B, d]."""
        return self.ask("project", encoded, weights)

    def features(self, images: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Images [B, C, H, W] to features [B, d]."""
        return self.ask("features", images, weights)

    def classify(self, features: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Features [B, d] to logits [B, K]."""
        return self.ask("classify", features, weights)

    def apply_extra(self, name: str, features: Tensor, weights: ParamDict | None = None) -> Tensor:
        """Features [B, d] (or what the projection reads) through a method's own layer ``name``, no dropout."""
        return self.ask(f"extra.{name}", features, weights)


class ModuleView(View):
    """A module as a loss sees it.

    ``drops`` are the uniform numbers of the step's dropout, None in evaluation; ``noted`` what the loss noted in it.
    """

    def __init__(self, module: Backbone, network: Network, params: ParamDict, drops: Drops | None = None) -> None:
        """View a module whose parameters are ``params``; other weights are asked through ``network``."""
        self._module, self._network, self._params = module, network, params
        self.drops = drops
        self.noted: Tensor | None = None

    @property
    def params(self) -> Mapping[str, Tensor]:
        """The module's."""
        return self._params

    def ask(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        """The module, or with other weights the network."""
        name = part.removeprefix("extra.")
        if weights is None:
            if part != name:
                return self._module.apply_extra(name, inputs)
            own: Tensor = getattr(self._module, part)(inputs, self.drops)
            return own
        if part != name:
            return self._network.apply_extra(name, inputs, weights)
        others: Tensor = getattr(self._network, part)(inputs, weights)
        return others

    def beside(self) -> ModuleView:
        """The same module without dropout; one client alone has no padding."""
        return ModuleView(self._module, self._network, self._params)

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


class Forwarding(View):
    """A view in front of another one, which says the same."""

    def __init__(self, model: View) -> None:
        self.model = model

    @property
    def params(self) -> Mapping[str, Tensor]:
        """The model's."""
        return self.model.params

    def ask(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        """The model's answer."""
        return self.model.ask(part, inputs, weights)

    def beside(self) -> View:
        """The model for other inputs."""
        return self.model.beside()

    def note(self, features: Tensor) -> None:
        self.model.note(features)


class WithLayers(Forwarding):
    """A model with other weights in some of its upper parts: projection, head, or a method's own layers."""

    def __init__(self, model: View, layers: ParamDict) -> None:
        """View ``model`` with whole parts (``head.…``, ``projection.…``, ``extra.…``) of other weights."""
        super().__init__(model)
        self._layers = layers

    def ask(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        """The answer of the other layers where the part is among them."""
        if weights is not None:
            return super().ask(part, inputs, weights)
        if part == "features" and self._holds("project"):
            return self.ask("project", self.model.ask("encode", inputs, None), None)
        return super().ask(part, inputs, self._layers if self._holds(part) else None)

    def _holds(self, part: str) -> bool:
        prefix = {"classify": "head.", "project": "projection."}.get(part, f"{part}.")
        return any(name.startswith(prefix) for name in self._layers)


class EncodedOnce(Forwarding):
    """A model that encodes one batch of images once, whoever asks: several losses, or several ways to answer."""

    def __init__(self, model: View, images: Tensor) -> None:
        """Stand in front of ``model`` for ``images`` [B, C, H, W]."""
        super().__init__(model)
        self._images = images
        self._encoded: Tensor | None = None
        self._features: Tensor | None = None

    @property
    def encoded(self) -> Tensor:
        """The batch, [B, e]; encoded by the model once somebody asks."""
        if self._encoded is None:
            self._encoded = self.model.encode(self._images)
        return self._encoded

    def ask(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        """What is known of the batch already; of everything else the model's answer."""
        if weights is not None or inputs is not self._images or part not in ("encode", "features"):
            return super().ask(part, inputs, weights)
        if part == "encode":
            return self.encoded
        if self._features is None:
            self._features = self.model.project(self.encoded)
        return self._features
