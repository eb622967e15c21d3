"""Training at the server: one loop for generators, calibrated heads and federated features. A method has the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from flcore.core.optim import Optimizer
from flcore.core.schedules import Schedule
from flcore.io.messages import all_finite

B = TypeVar("B")

Terms = Mapping[str, tuple[float, Tensor]]
"""Weight and value of each term by name. The sum of their products is minimised; terms of weight 0 are only
recorded."""


@dataclass(frozen=True)
class Moving:
    """Tensors that one optimiser trains.

    Attributes:
        values: leaves that require a gradient, by name; updated in place.
        optimizer: the optimiser.
        rate: learning rate by steps made; None leaves the optimiser's.
    """

    values: Mapping[str, Tensor]
    optimizer: Optimizer
    rate: Schedule | None = None


@dataclass(frozen=True)
class Fitted:
    """Result of a training.

    Attributes:
        values: trained tensors by name, detached.
        terms: unweighted value of every term in every step, on the device.
    """

    values: dict[str, Tensor]
    terms: Sequence[Mapping[str, Tensor]] = field(default_factory=list)

    def facts(self, prefix: str, step: int = -1, suffix: str = "") -> dict[str, float]:
        """Return the terms of a step (default: the last) as metrics ``<prefix><term><suffix>``; none without steps."""
        terms = self.terms[step] if self.terms else {}
        return {f"{prefix}{name}{suffix}": float(value) for name, value in terms.items()}


def leaves(values: Mapping[str, Tensor], device: str | None = None) -> dict[str, Tensor]:
    """Return trainable copies of tensors, on a device."""
    return {name: value.detach().to(device, copy=True).requires_grad_() for name, value in values.items()}


def fit(
    moving: Moving | Sequence[Moving], batches: Iterable[B], loss: Callable[[B], Terms], *, what: str, cure: str
) -> Fitted:
    """Take one optimiser step per batch on the weighted sum of the terms.

    Args:
        moving: tensors to train, in place; several groups where parts have separate optimisers.
        batches: inputs of the loss, one per step.
        loss: terms of a batch, functions of the trained tensors.
        what: name of the trained part, for the error.
        cure: keys to lower, for the error.

    Raises:
        ArithmeticError: a trained value is not finite.
    """
    groups = [moving] if isinstance(moving, Moving) else list(moving)
    own = [list(group.values.values()) for group in groups]
    every = [value for values in own for value in values]
    history: list[Mapping[str, Tensor]] = []
    for step, batch in enumerate(batches):
        terms = loss(batch)
        weighed = [weight * value for weight, value in terms.values() if weight != 0]
        grads = list(torch.autograd.grad(torch.stack(weighed).sum(), every, allow_unused=True, materialize_grads=True))
        for group, values in zip(groups, own, strict=True):
            if group.rate is not None:
                group.optimizer.lr = group.rate(step)
            group.optimizer.step(values, grads[: len(values)])
            del grads[: len(values)]
        history.append({name: value.detach() for name, (_, value) in terms.items()})
    fitted = Fitted({name: value.detach() for group in groups for name, value in group.values.items()}, history)
    if not all_finite(fitted.values.values()):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in fitted.facts("").items())
        raise ArithmeticError(f"{what} diverged ({shown}); lower {cure}")
    return fitted
