"""Batch plans: samples and random draws of all mini-batches of one client's phase.

A client's randomness is the same alone and in a stack: each kind of draw has its own stream of (seed, round, client,
phase).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flcore.config.sections import LocalConfig
from flcore.core.rng import torch_stream
from flcore.data.images import draw_augmentation
from flcore.experiment.experiment import Experiment
from flcore.methods.api import Method
from flcore.methods.types import ClientContext, Phase
from flcore.models import Backbone


@dataclass(frozen=True)
class BatchPlan:
    """All mini-batches of a phase.

    Attributes:
        positions: int64 [S, B], rows of the client's samples; a row of fewer than B is padded with zeros.
        sizes: number of samples of each mini-batch.
        dropout_masks: per dropout site uniform numbers [S, B, ...].
        augmentation: draws of `flcore.data.images`, each [S, B, ...]; empty without augmentation.
        draws: of the method, each [S, ...].
        recorded_from: first step with recorded features (:attr:`Phase.record_features`); S for none.
        pass_numbers: pass of each step, counted from the pass of the first step.
    """

    positions: Tensor
    sizes: tuple[int, ...]
    dropout_masks: Mapping[str, Tensor]
    augmentation: Mapping[str, Tensor]
    draws: Mapping[str, Tensor]
    recorded_from: int
    pass_numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def on(self, device: str) -> BatchPlan:
        """Return the plan with its tensors on a device."""
        if device == "cpu":
            return self
        dropout_masks, augmentation, draws = (
            {name: draw.to(device) for name, draw in part.items()}
            for part in (self.dropout_masks, self.augmentation, self.draws)
        )
        positions = self.positions.to(device)
        return replace(self, positions=positions, dropout_masks=dropout_masks, augmentation=augmentation, draws=draws)


def plan_batches(
    experiment: Experiment,
    module: Backbone,
    ctx: ClientContext,
    phase: Phase,
    number: int,
    size: int,
    *,
    skip_single: bool,
) -> BatchPlan:
    """Plan a phase on the CPU, except dropout masks, which are drawn on the training device.

    Masks are by far the most numbers (127 MB in a round of 50 clients with ``pfl_cnn``): sending them takes longer than
    a GPU's steps. A GPU draws other numbers than a CPU.

    Args:
        experiment: the run. module: its model, for the dropout sites.
        ctx: of the client. phase: to plan. number: of the phase within the round.
        size: number of the client's samples.
        skip_single: leave out mini-batches of one sample: their batch statistics are undefined.
    """
    config, seed, keys = experiment.config, ctx.setting.seed, (ctx.round, ctx.client, number)
    batch_size, device = config.local.batch_size, config.engine.device
    laid_out = list(_laid_out(size, config.local, ctx, phase, number))
    a_pass = steps_per_pass(size, config.local)
    done = _steps_before(config.local, ctx, phase) % max(a_pass, 1)
    before = {"none": len(laid_out), "last_pass": max(0, len(laid_out) - a_pass)}.get(phase.record_features, 0)
    kept = [row.shape[0] > 1 or not skip_single for row in laid_out]
    rows = [row for row, keep in zip(laid_out, kept, strict=True) if keep]
    sizes = tuple(row.shape[0] for row in rows)
    positions = _filled(rows, sizes, batch_size)
    steps, images = len(rows), phase.source is None
    dropout_masks: Mapping[str, Tensor] = {}
    if module.dropout_shapes:
        dropout_generator = torch_stream(seed, "dropout", *keys, device=device)
        dropout_masks = {
            site: torch.rand(steps, batch_size, *shape, generator=dropout_generator, device=device)
            for site, shape in module.dropout_shapes.items()
        }
    augmentation: Mapping[str, Tensor] = {}
    if images and config.data.augmentation != "none":
        augment_generator = torch_stream(seed, "augmentation", *keys)
        flat = draw_augmentation(steps * batch_size, config.data.augmentation, augment_generator)
        augmentation = {name: draw.reshape(steps, batch_size, *draw.shape[1:]) for name, draw in flat.items()}
    draws: Mapping[str, Tensor] = {}
    if (
        type(experiment.method).random_inputs is not Method.random_inputs
    ):  # most draw nothing, and a stream takes a fifth of a plan's time
        single = skip_single and size % batch_size == 1 and (config.local.batches == "all" or size == 1)
        planned = replace(ctx, steps_per_pass=a_pass - single)
        draws = experiment.method.random_inputs(planned, steps, torch_stream(seed, "draws", *keys))
    return BatchPlan(
        positions=positions,
        sizes=sizes,
        dropout_masks=dropout_masks,
        augmentation=augmentation,
        draws=draws,
        recorded_from=sum(kept[:before]),
        pass_numbers=tuple((done + step) // a_pass for step, keep in enumerate(kept) if keep),
    )


def _filled(rows: Sequence[Tensor], sizes: Sequence[int], width: int) -> Tensor:
    """Stack rows to int64 [S, width]; shorter ones are padded with zeros."""
    if rows and min(sizes) == width:
        return torch.stack(list(rows))
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    for step, row in enumerate(rows):
        positions[step, : sizes[step]] = row
    return positions


def passes(local: LocalConfig, phase: Phase) -> tuple[int, int | None]:
    """Return (epochs, steps) of a phase, by default as configured; steps take precedence."""
    if phase.epochs is None and phase.steps is None:
        return local.epochs, local.steps
    return phase.epochs or 1, phase.steps


def steps_per_pass(size: int, local: LocalConfig) -> int:
    """Return the number of mini-batches of one pass over ``size`` samples."""
    if local.batches == "all":
        return -(-size // local.batch_size)
    return max(size // local.batch_size, min(size, 1))


def planned_steps(size: int, local: LocalConfig, phase: Phase) -> int:
    """Return the mini-batches of a phase over ``size`` samples, with single ones that BatchNorm skips."""
    epochs, steps = passes(local, phase)
    if size == 0:
        return 0
    return steps if steps is not None else epochs * steps_per_pass(size, local)


def _laid_out(size: int, local: LocalConfig, ctx: ClientContext, phase: Phase, number: int) -> Iterator[Tensor]:
    epochs, steps = passes(local, phase)
    seed, full = ctx.setting.seed, local.batches != "all"
    if not _is_endless(local, phase):
        generator = torch_stream(seed, "batches", ctx.round, ctx.client, number)
        return batch_positions(size, local.batch_size, epochs, steps, generator, full=full)

    def generator_of(which: int) -> torch.Generator:
        return torch_stream(seed, "passes", ctx.client, number, which)

    assert steps is not None  # else it is not endless
    return endless_positions(size, local.batch_size, _steps_before(local, ctx, phase), steps, generator_of)


def _is_endless(local: LocalConfig, phase: Phase) -> bool:
    """Return whether a phase's passes continue across rounds."""
    return local.batches == "endless" and passes(local, phase)[1] is not None


def _steps_before(local: LocalConfig, ctx: ClientContext, phase: Phase) -> int:
    """Return the number of mini-batches of a phase's chain of passes before this round."""
    _, steps = passes(local, phase)
    return (ctx.round - 1) * steps if steps is not None and _is_endless(local, phase) else 0


def batch_positions(
    size: int, batch_size: int, epochs: int, steps: int | None, generator: torch.Generator, *, full: bool = False
) -> Iterator[Tensor]:
    """Yield positions of each mini-batch in a client's data: shuffled passes, with a smaller last batch.

    With ``steps``, passes are chained and cut after that number of batches. With ``full``, a smaller last batch is left
    out unless it is the only one (fedpa.md, 7l).
    """
    if size == 0:
        return
    if steps is None:
        for _ in range(epochs):
            yield from _one_pass(size, batch_size, generator, full=full)
        return
    taken = 0
    while taken < steps:
        for positions in _one_pass(size, batch_size, generator, full=full):
            yield positions
            taken += 1
            if taken == steps:
                return


def endless_positions(
    size: int, batch_size: int, begin: int, steps: int, generator_of: Callable[[int], torch.Generator]
) -> Iterator[Tensor]:
    """Yield ``steps`` full mini-batches, from number ``begin`` on, of an endless chain of shuffled passes.

    Like a data loader with an iterator that outlives the round, as in the releases of FedGen and FedPA (fedpa.md,
    section 2). The chain advances in every round, also without the client, so that it is a function of the round.

    Args:
        size: samples of the client. batch_size: B; a client with fewer has one batch a pass.
        begin: counted over the run, from 0. generator_of: of the pass with a number, from 0.
    """
    if size == 0:
        return
    whole = max(1, size // batch_size)
    which, skipped = divmod(begin, whole)
    taken = 0
    while taken < steps:
        for positions in _one_pass(size, batch_size, generator_of(which), full=True)[skipped : skipped + steps - taken]:
            yield positions
            taken += 1
        which, skipped = which + 1, 0


def _one_pass(size: int, batch_size: int, generator: torch.Generator, *, full: bool) -> tuple[Tensor, ...]:
    rows = torch.split(torch.randperm(size, generator=generator), batch_size)
    return rows[:-1] if full and len(rows) > 1 and len(rows[-1]) < batch_size else rows
