"""Parts of a training step that one client and a stack share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

from flcore.config.sections import LocalConfig
from flcore.core.optim import Adam, Optimizer, Sgd
from flcore.core.schedules import exponential
from flcore.data.images import augment
from flcore.experiment.experiment import Experiment
from flcore.methods.types import Loss, LossInputs, Perturb, Phase
from flcore.models.base import Backbone

LossOutput = tuple[dict[str, Tensor], list[Tensor]]
"""Loss terms by name, and the features that were recorded if any: a list of one tensor or none."""


@dataclass(frozen=True)
class Step:
    """An update of a phase with its optimiser.

    Attributes:
        loss: to differentiate. perturb: see :class:`~flcore.methods.types.StepSpec`.
        names: of the updated parameters, in the module's order. optimizer: of these.
    """

    loss: Loss
    perturb: Perturb | None
    names: tuple[str, ...]
    optimizer: Optimizer


def build_steps(experiment: Experiment, module: Backbone, phase: Phase, round_number: int) -> tuple[Step, ...]:
    """Return the updates of a phase with fresh optimisers, for a module prepared by :func:`set_mode`."""
    config = experiment.config
    moving = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return tuple(
        Step(
            update.loss or phase.loss or experiment.method.loss,
            update.perturb,
            tuple(name for name in moving if name.startswith(update.trainable)),
            update.optimizer()
            if update.optimizer is not None
            else make_optimizer(config.local, round_number, config.federation.rounds),
        )
        for update in phase.updates
    )


def perturbed(
    update: Step, leaves: Mapping[str, Tensor], grads: Sequence[Tensor], *, stacked: bool
) -> dict[str, Tensor]:
    """Return the moved parameters at the point of the gradient, as new leaves.

    Args:
        update: with a perturbation. leaves: all weights. grads: of the moved ones, in order.
        stacked: whether all have a leading dimension for clients; the perturbation is mapped over it.
    """
    assert update.perturb is not None
    perturb = torch.vmap(update.perturb) if stacked else update.perturb
    with torch.no_grad():
        point = perturb(
            {name: leaves[name].detach() for name in update.names}, dict(zip(update.names, grads, strict=True))
        )
    return {name: point[name].detach().requires_grad_() for name in update.names}


def gradients(
    update: Step,
    values: Mapping[str, Tensor],
    buffers: Collection[str],
    ask: Callable[[Mapping[str, Tensor], bool], LossOutput],
    *,
    stacked: bool,
    recording: bool,
) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Return loss terms, recorded features and the gradients of an update; running statistics change in place.

    Args:
        update: the update. values: parameters and buffers by name. buffers: names of the buffers.
        ask: (weights by name, whether to record features) → loss terms and features.
        stacked: whether values have a leading dimension for clients. recording: whether to record features.
    """

    def taken(leaves: Mapping[str, Tensor], *, recording: bool) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        terms, features = ask(leaves, recording)
        asked = [leaves[name] for name in update.names]
        grads = torch.autograd.grad(total_of(terms), asked, allow_unused=True, materialize_grads=True)
        return terms, features, list(grads)

    leaves = {name: value.detach().requires_grad_(name in update.names) for name, value in values.items()}
    if update.perturb is not None:
        apart = {name: leaves[name].clone() for name in buffers}
        _, _, grads = taken({**leaves, **apart}, recording=False)
        leaves |= perturbed(update, leaves, grads, stacked=stacked)
    return taken(leaves, recording=recording)


def qualified_name(function: object) -> str | None:
    """Return a name that determines a loss or a perturbation, equal in every process of this code.

    A module's function has one, and a method of a dataclass, with the values of its fields. Lambdas and nested
    functions have None: two of them may share a name.
    """
    if function is None:
        return "none"
    if not isinstance(function, FunctionType | MethodType):
        function = getattr(function, "__call__", None)  # noqa: B004 - bound to what is called
    owner, plain = getattr(function, "__self__", None), getattr(function, "__func__", function)
    module, name = getattr(plain, "__module__", None), getattr(plain, "__qualname__", "")
    found: object = sys.modules.get(str(module))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not plain or not (owner is None or is_dataclass(owner)):
        return None
    full = f"{module}.{name} of {owner!r}"
    return None if " at 0x" in full else full


def total_of(terms: Mapping[str, Tensor]) -> Tensor:
    """Return the minimised value: the sum of all terms and clients."""
    if len(terms) > 1:
        return torch.stack(tuple(terms.values())).sum()
    (term,) = terms.values()
    return term.sum() if term.ndim else term


def merge_terms(terms: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the terms of several updates; raise ValueError for a repeated name."""
    twice = sorted(terms.keys() & more.keys())
    if twice:
        raise ValueError(f"two updates of a step both have a term {twice[0]!r}; give one of them another name")
    return {**terms, **more}


def make_optimizer(local: LocalConfig, round_number: int, rounds: int) -> Optimizer:
    """Return a fresh optimiser with the learning rate of a round (1-based)."""
    rate = learning_rate(local, round_number, rounds)
    if local.optimizer == "adam":
        return Adam(rate, local.weight_decay)
    return Sgd(rate, local.momentum, local.weight_decay)


def learning_rate(local: LocalConfig, round_number: int, rounds: int) -> float:
    """Return the learning rate of a round; round 1 has ``local.lr``."""
    passed = round_number - 1
    if local.schedule == "cosine":
        return local.lr * 0.5 * (1 + math.cos(math.pi * passed / rounds))
    if local.schedule == "constant":
        return local.lr
    return exponential(local.lr, local.decay, every=local.decay_every if local.schedule == "step" else 1)(passed)


def loss_context(inputs: LossInputs, phases: Sequence[Phase]) -> LossInputs:
    """Return loss inputs without the phases' samples, which no loss reads."""
    sources = {phase.source for phase in phases}
    return {name: value for name, value in inputs.items() if name not in sources}


def set_mode(module: Backbone, phase: Phase, batchnorm: str) -> None:
    """Set training mode for a phase's trainable layers; freeze the rest, BatchNorm statistics included."""
    module.train()
    for name, layer in module.named_modules():
        updates = any(f"{name}.".startswith(prefix) for prefix in phase.trainable)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (batchnorm == "frozen" or not updates):
            layer.eval()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(name.startswith(prefix) for prefix in phase.trainable))


def augmented(experiment: Experiment, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
    """Augment images [n, C, H, W] by their draws; padding is black, as if padded before normalising."""
    if not draws:
        return images
    meta = experiment.dataset.meta
    black = -torch.tensor(meta.mean) / torch.tensor(meta.std)
    return augment(images, experiment.config.data.augmentation, draws, fill=black)


def precision(experiment: Experiment) -> AbstractContextManager[object]:
    """Return a context for ``engine.precision``: autocast for bf16; weights and messages stay float32."""
    engine = experiment.config.engine
    if engine.precision == "bf16":
        return torch.autocast(engine.device, dtype=torch.bfloat16)
    return nullcontext()


def by_pass(found: tuple[Tensor, Tensor], number: Tensor, passes: int) -> tuple[Tensor, Tensor]:
    """Return a mini-batch's class means in the row of its pass, for averages by pass.

    Args:
        found: sums of features ``[..., C, d]`` and how many they are ``[..., C]``.
        number: int64 ``[...]``, the mini-batch's pass. passes: P, how many there are.

    Returns:
        Means ``[..., P, C, d]`` and how many they are ``[..., P, C]``, 1 for a class that the mini-batch has.
    """
    sums, counts = found
    means, present = sums / counts.clamp_min(1).unsqueeze(-1), (counts > 0).to(counts.dtype)
    row = (number.unsqueeze(-1) == torch.arange(passes, device=number.device)).to(counts.dtype)
    return row[..., None, None] * means.unsqueeze(-3), row.unsqueeze(-1) * present.unsqueeze(-2)


def add_class_sums(
    first: tuple[Tensor, Tensor] | None, second: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """Sums and counts of both; None is nothing."""
    if first is None or second is None:
        return first or second
    return first[0] + second[0], first[1] + second[1]
