"""A step of local training as a function of tensors alone: losses, gradients, optimiser, running statistics.

For compilers and CUDA graphs: everything that differs between two steps is an input tensor, and results are written in
place. One recording serves all steps of all clients and rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flcore.core.optim import clip_gradients
from flcore.data.images import scaled
from flcore.engine.local.client_loss import ClientLoss
from flcore.engine.local.stacked_inputs import Path, nested
from flcore.engine.local.step import LossOutput, Step, gradients, merge_terms, precision

Inputs = Mapping[Path, Tensor]
"""Inputs of a step by path; the first part of a path is its kind:

``value`` (parameters and buffers by name, moved), ``memory`` (of each update's optimiser by number, moved), ``rates``
(likewise by number), ``images``, ``labels``, ``weight``, ``drop``, ``draw``, ``frozen``; of the loss inputs ``own``,
``shared`` and ``number``; in a stack ``alive``, bool [A], whether a client still trains. uint8 images are first
multiplied by ``scale`` and moved by ``shift``, [C, 1, 1] each.
"""


@dataclass(frozen=True)
class StepFunction:
    """One step of a phase, for one client or, with a leading dimension A in what is each client's own, for a stack.

    Attributes:
        loss: of a client.
        moves: the updates; their optimisers' :meth:`~flcore.core.optim.Optimizer.move` is used.
        plain: values of the context that are no tensors.
        stacked: whether there is a leading dimension.
        recording: whether features are recorded.
    """

    loss: ClientLoss
    updates: tuple[Step, ...]
    plain: Mapping[Path, Any]
    stacked: bool
    recording: bool

    def __call__(self, inputs: Inputs) -> LossOutput:
        """Make one step.

        Returns:
            Every loss term, [A] in a stack, and if recorded the features, [B, d] or [A, B, d].
        """
        if inputs["images",].dtype == torch.uint8:
            inputs = {**inputs, ("images",): scaled(inputs["images",], inputs["scale",], inputs["shift",])}
        values, memory = kind(inputs, "value"), kind(inputs, "memory")
        # Clients without a further step are computed and discarded: shapes stay fixed.
        work = {name: value.clone() for name, value in values.items()} if self.stacked else values
        kept = {path: tensor.clone() for path, tensor in memory.items()} if self.stacked else memory
        terms: dict[str, Tensor] = {}
        recorded: list[Tensor] = []
        limit = self.loss.experiment.config.local.clip
        buffers = [name for name, _ in self.loss.module.named_buffers()]
        for number, update in enumerate(self.updates):
            found, features, grads = gradients(
                update,
                work,
                buffers,
                partial(self._ask, update, inputs),
                stacked=self.stacked,
                recording=self.recording and number == 0,
            )
            own = [tensor for (owner, _), tensor in kept.items() if owner == str(number)]
            with torch.no_grad():
                if limit is not None:
                    clip_gradients(grads, limit, stacked=self.stacked)
                update.optimizer.move([work[name] for name in update.names], grads, own, inputs["rates", str(number)])
            terms, recorded = merge_terms(terms, found), recorded + features
        if self.stacked:
            with torch.no_grad():
                alive = inputs["alive",]
                _replace(list(memory.values()), list(kept.values()), alive)
                _replace(list(values.values()), list(work.values()), alive)
        return {name: term.detach() for name, term in terms.items()}, recorded

    def _ask(self, update: Step, inputs: Inputs, leaves: Mapping[str, Tensor], recording: bool) -> LossOutput:
        with precision(self.loss.experiment):
            return (self._of_all if self.stacked else self._of_one)(update, leaves, inputs, recording=recording)

    def _of_one(self, update: Step, leaves: Mapping[str, Tensor], inputs: Inputs, *, recording: bool) -> LossOutput:
        loss_inputs = nested({**self.plain, **kind(inputs, "shared", "number")})
        return self.loss(update.loss, leaves, _batch(inputs), loss_inputs, recording=recording)

    def _of_all(self, update: Step, leaves: Mapping[str, Tensor], inputs: Inputs, *, recording: bool) -> LossOutput:
        common = {**self.plain, **kind(inputs, "shared", "number")}
        mine = {path: tensor for path, tensor in inputs.items() if path[0] in _BY_CLIENT}

        def one_client(leaves: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> LossOutput:
            own = dict(zip(mine, tensors, strict=True))
            loss_inputs = nested({**common, **kind(own, "own")})
            return self.loss(update.loss, leaves, _batch(own), loss_inputs, recording=recording)

        found: LossOutput = torch.vmap(one_client)(leaves, list(mine.values()))
        return found


_BY_CLIENT = ("images", "labels", "weight", "drop", "draw", "frozen", "own")


def kind(inputs: Mapping[Path, Tensor], *kinds: str) -> dict[Any, Tensor]:
    """Return tensors of some kinds by the rest of their path, or by name if that is all of it."""
    found = {path[1:]: tensor for path, tensor in inputs.items() if path[0] in kinds}
    named = kinds[0] in ("value", "drop", "draw", "frozen")
    return {path[0]: tensor for path, tensor in found.items()} if named else found


def _batch(inputs: Mapping[Path, Tensor]) -> dict[str, Any]:
    return {
        "images": inputs["images",],
        "labels": inputs["labels",],
        "weight": [inputs["weight",]],
        "dropout_masks": kind(inputs, "drop"),
        "draws": kind(inputs, "draw"),
        "frozen": kind(inputs, "frozen"),
    }


def _replace(places: Sequence[Tensor], values: Sequence[Tensor], alive: Tensor) -> None:
    """Write [A, ...] values for clients that still train."""
    for place, value in zip(places, values, strict=True):
        place.copy_(torch.where(alive.reshape((-1,) + (1,) * (value.ndim - 1)), value, place))
