"""One client's loss as a pure function, for stacks and compiled steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor

from flcore.engine.local.batchnorm import MaskedBatchNorm, maskable
from flcore.experiment.experiment import Experiment
from flcore.methods.types import Batch, Loss, LossInputs
from flcore.models.base import Backbone, DropoutMasks
from flcore.models.network import ModuleView, Network, ParamDict, SwappedParams


class MaskedView(ModuleView):
    """A client's model in its loss, for a mini-batch that may be padded."""

    def __init__(
        self,
        module: Backbone,
        network: Network,
        params: ParamDict,
        dropout_masks: DropoutMasks | None,
        layers: Sequence[MaskedBatchNorm],
        mask: Tensor | None,
    ) -> None:
        """View ``module``; ``mask`` [B], for ``layers``, is 1 for samples and 0 for padding; None without padding."""
        super().__init__(module, network, params, dropout_masks)
        self._layers, self._mask = layers, mask

    def call_part(self, part: str, inputs: Tensor, weights: ParamDict | None) -> Tensor:
        """As :class:`ModuleView`, with the mask in every BatchNorm layer."""
        for layer in self._layers:
            layer.mask = self._mask
        return super().call_part(part, inputs, weights)

    def for_extra_inputs(self) -> ModuleView:
        """The model for inputs without padding."""
        return MaskedView(self._module, self._network, self.params, None, self._layers, None)


class ClientLoss:
    """The loss terms of a client's mini-batch; values replace the module's own."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.module = deepcopy(experiment.new_module())
        maskable(self.module)
        self._bound = SwappedParams(self.module)
        self._layers = [layer for layer in self.module.modules() if isinstance(layer, MaskedBatchNorm)]
        self._parameters = [name for name, _ in self.module.named_parameters()]

    def __call__(
        self, loss: Loss, values: ParamDict, batch: Mapping[str, Any], inputs: LossInputs, *, recording: bool
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return every loss term, and recorded features [B, d].

        Args:
            loss: to call.
            values: parameters and buffers; running statistics change in place.
            batch: ``images`` [B, ...], ``labels`` [B], ``weight`` as a list of one mask [B] or none, ``drops``,
                ``draws`` and ``frozen`` by name.
            inputs: constants of the loss.
            recording: whether to return features.
        """
        method = self.experiment.method
        (weight,) = batch["weight"] or (None,)
        params = {name: values[name] for name in self._parameters}
        seen = Batch(batch["images"], batch["labels"], weight, batch["draws"], batch["frozen"])

        def run(module: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
            view = MaskedView(
                module, self.experiment.setting.network, params, batch["dropout_masks"] or None, self._layers, weight
            )
            terms = loss(view, seen, inputs)
            return terms, [view.take_recorded(method.name)] if recording else []

        return self._bound.call(values, run)

    def forget_masks(self) -> None:
        """Remove the last step's masks from the module."""
        for layer in self._layers:
            layer.mask = None
