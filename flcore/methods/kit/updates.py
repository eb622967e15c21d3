"""What a step of local training is: a mini-batch, losses of it, and the updates that move weights by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flcore.core.optim import Optimizer
from flcore.models.view import View

LossInputs = Mapping[str, Any]
"""Constants of a loss: tensors, mappings of tensors, or numbers that all clients of an exchange share."""

LocalModel = View
"""The model as a loss sees it."""


@dataclass(frozen=True)
class Batch:
    """What the loss of one step sees.

    Attributes:
        images: normalised, [B, C, H, W]; in a phase with a ``source`` its inputs, such as pseudo-features [B, d].
        labels: int64 [B].
        weight: float [B], 1 for a sample, 0 for padding; None where nothing is padded.
        random_inputs: the random numbers of the step, from :meth:`flcore.methods.api.Method.random_inputs`.
        per_sample: what is known of these samples, [B, ...] each: what the frozen models of
            :meth:`flcore.methods.api.Method.teachers` say, of which a name is missing where the engine has not looked
            it up and the loss computes it; and what the client remembers
            (:meth:`flcore.methods.api.Method.per_sample_inputs`).
    """

    images: Tensor
    labels: Tensor
    weight: Tensor | None = None
    random_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LocalModel, Batch, LossInputs], dict[str, Tensor]]

Perturb = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""(what moves, its gradient) → the point at which the gradient that moves it is taken: pure, of one client, by name."""


@dataclass(frozen=True)
class StepSpec:
    """One move of weights within a step: a gradient on the step's mini-batch, and what an optimiser makes of it.

    Attributes:
        loss: what the gradient is of; None for the phase's.
        trainable: prefixes of the names that move, of those that the phase moves.
        optimizer: makes the one that moves them, which the phase keeps; None: as configured in ``local``.
        probe: None: the gradient is taken where the weights are. Else it is taken there first, which leaves nothing (no
            term, no note, no running statistics), and then at the point that the probe makes of weights and gradient;
            the optimiser moves the weights by that second one.
    """

    loss: Loss | None = None
    trainable: tuple[str, ...] = ("",)
    optimizer: Callable[[], Optimizer] | None = None
    probe: Perturb | None = None
