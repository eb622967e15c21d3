"""A step of local training: a mini-batch, its losses, and the updates of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flcore.core.optim import Optimizer
from flcore.models.network import View

LossInputs = Mapping[str, Any]
"""Constants of a loss: tensors, mappings of tensors, or numbers that all clients of an exchange share."""

LocalModel = View
"""The model as a loss reads it."""


@dataclass(frozen=True)
class Batch:
    """Input of the loss of one step.

    Attributes:
        images: normalised, [B, C, H, W]; in a phase with a ``source`` its inputs, such as pseudo-features [B, d].
        labels: int64 [B].
        weight: float [B], 1 for a sample, 0 for padding; None where nothing is padded.
        random_inputs: the step's random numbers, from :meth:`flcore.methods.api.Method.random_inputs`.
        per_sample: [B, ...] each. Rows of :meth:`flcore.methods.api.Method.per_sample_inputs`, and outputs of
            :meth:`flcore.methods.api.Method.teachers`; the loss computes teacher outputs that are missing.
    """

    images: Tensor
    labels: Tensor
    weight: Tensor | None = None
    random_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LocalModel, Batch, LossInputs], dict[str, Tensor]]

Perturb = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""(trained parameters, their gradient) → the point at which to take the gradient of the update: pure, for one
client, by name."""


@dataclass(frozen=True)
class StepSpec:
    """One update of weights within a step: a gradient on the step's mini-batch, and an optimiser.

    Attributes:
        loss: loss to differentiate; None for the phase's.
        trainable: prefixes of the parameters to update, among the phase's.
        optimizer: factory of the optimiser, which the phase keeps; None: as configured in ``local``.
        perturb: None: the gradient is taken at the weights. Else that gradient goes to it, and a second one is
            taken at the point it returns; the optimiser uses the second. The first leaves no terms, recorded features
            or running statistics.
    """

    loss: Loss | None = None
    trainable: tuple[str, ...] = ("",)
    optimizer: Callable[[], Optimizer] | None = None
    perturb: Perturb | None = None
