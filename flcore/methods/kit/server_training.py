"""Training at the server: the one loop behind generators, calibrated heads and federated features.

What is minimised is the idea of a method and stands in its file; how it is minimised stands here.
"""

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
"""By name: weight and value of a term; what is minimised is the sum of their products. Weight 0: only looked at."""


@dataclass(frozen=True)
class Moving:
    """Tensors that move together.

    Attributes:
        values: by name, leaves that require a gradient; they are moved in place.
        optimizer: what moves them.
        rate: learning rate by steps made; None leaves the optimiser's.
    """

    values: Mapping[str, Tensor]
    optimizer: Optimizer
    rate: Schedule | None = None


@dataclass(frozen=True)
class Fitted:
    """What a training leaves.

    Attributes:
        values: what moved, by name, without history.
        terms: of every step the value of every term (not weighted), on the device.
    """

    values: dict[str, Tensor]
    terms: Sequence[Mapping[str, Tensor]] = field(default_factory=list)

    def facts(self, prefix: str, step: int = -1, suffix: str = "") -> dict[str, float]:
        """The terms of a step, by default of the last one, as facts ``<prefix><term><suffix>``; none without steps."""
        terms = self.terms[step] if self.terms else {}
        return {f"{prefix}{name}{suffix}": float(value) for name, value in terms.items()}


def leaves(values: Mapping[str, Tensor], device: str | None = None) -> dict[str, Tensor]:
    """Copies that training may move, on a device."""
    return {name: value.detach().to(device, copy=True).requires_grad_() for name, value in values.items()}


def fit(
    moving: Moving | Sequence[Moving],
    batches: Iterable[B],
    loss: Callable[[B], Terms],
    *,
    what: str,
    cure: str,
) -> Fitted:
    """One optimiser step per batch on the weighted sum of the terms.

    Args:
        moving: what moves, in place; several where parts have optimisers of their own.
        batches: what the loss is asked with, one per step.
        loss: the terms of a batch, functions of the moving values.
        what: in words, for the refusal.
        cure: keys whose values are to be lowered, for the refusal.

    Raises:
        ArithmeticError: it diverged: a value is not finite.
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
