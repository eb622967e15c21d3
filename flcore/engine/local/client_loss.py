"""One client's loss as a function of values alone: what stacks map over clients, and what is compiled."""

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
        """View ``module``; ``mask`` [B] is 1 for samples that count, None where all do; ``layers`` have to know it."""
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
    """The loss terms of a client's mini-batch, of any update; the module is a shell for the values that are given."""

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
        """Every loss term, and if asked the features that were recorded, [B, d].

        Args:
            loss: that is asked.
            values: parameters and buffers; running statistics among them move in place.
            batch: ``images`` [B, ...], ``labels`` [B], ``weight`` as a list of one mask [B] or none, ``drops``,
                ``draws`` and ``frozen`` by name.
            inputs: constants of the loss.
            recording: whether features are asked for.
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
        """Leave nothing of a step in the module."""
        for layer in self._layers:
            layer.mask = None
