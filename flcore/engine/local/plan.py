"""Batch plans: samples and random draws of all mini-batches of a phase, for one client or a stack.

Every number is a function of (seed, purpose, round, client, phase, pass, row) alone (:mod:`flcore.core.philox`): a
client draws the same alone, in any stack and on any device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flcore.config.sections import LocalConfig
from flcore.core import philox
from flcore.data.images import augmentation_draws
from flcore.experiment.experiment import Experiment
from flcore.methods.api import Method
from flcore.methods.types import ClientContext, Phase
from flcore.models import Backbone


@dataclass(frozen=True)
class BatchPlan:
    """All mini-batches of a phase for A clients, with S the most steps of one of them.

    What a client lacks is zero: samples of a smaller mini-batch, and everything after its last step.

    Attributes:
        positions: int64 [S, A, B], rows of a client's samples.
        sizes: int64 [A, S] on the CPU, the number of samples of each mini-batch.
        dropout_masks: per dropout site uniform numbers [S, A, B, ...].
        augmentation: draws of `flcore.data.images`, each [S, A, B, ...]; empty without augmentation.
        draws: of the method, each [S, A, ...].
        recorded_from: int64 [A] on the CPU, the first step with recorded features (:attr:`Phase.record_features`); a
            client's number of steps for none.
        pass_numbers: int64 [A, S] on the CPU, the pass of each step, counted from the pass of the first step.
        passes: number of passes, of the client with most.
    """

    positions: Tensor
    sizes: Tensor
    dropout_masks: Mapping[str, Tensor]
    augmentation: Mapping[str, Tensor]
    draws: Mapping[str, Tensor]
    recorded_from: Tensor
    pass_numbers: Tensor
    passes: int

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


@dataclass(frozen=True, eq=False)
class Layout:
    """The mini-batches of a phase over ``size`` samples, before any is drawn.

    The chain of shuffled passes is cut into rows of B; a pass begins a new row.

    Attributes:
        size: number of samples. batch_size: B.
        per_pass: rows of a pass. steps_per_pass: rows of a pass that are trained on.
        first_pass: number of the chain's first pass. passes: number of passes.
        rows: of the mini-batches, counted from the first pass: a range, or int64 [S].
        sizes: int64 [S], its number of samples.
        recorded_from, pass_numbers: see :class:`BatchPlan`.
    """

    size: int
    batch_size: int
    per_pass: int
    steps_per_pass: int
    first_pass: int
    passes: int
    rows: slice | np.ndarray
    sizes: np.ndarray
    recorded_from: int
    pass_numbers: np.ndarray

    @property
    def last_pass(self) -> int:
        """Number of the last step's pass, from the first step's; -1 without steps."""
        return int(self.pass_numbers[-1]) if len(self.pass_numbers) else -1

    def positions(self, key: philox.Key, clients: Sequence[int], round_number: int) -> np.ndarray:
        """Return rows of the samples of clients with this layout, int64 [S, A, B]."""
        width = self.per_pass * self.batch_size
        passes = range(self.first_pass, self.first_pass + self.passes)
        counters = [(which, client, round_number) for client in clients for which in passes]
        chain = philox.permutations(key, counters, self.size)[:, :width]
        if self.size < width:
            chain, orders = np.zeros((len(counters), width), dtype=np.int64), chain
            chain[:, : self.size] = orders
        found: np.ndarray = chain.reshape(len(clients), -1, self.batch_size)[:, self.rows].swapaxes(0, 1)
        return found


def phase_layout(size: int, local: LocalConfig, phase: Phase, round_number: int, *, skip_single: bool) -> Layout:
    """Return the layout of a client's phase in a round.

    Args:
        size: number of its samples. local: section. phase: of the exchange. round_number: 1-based.
        skip_single: leave out mini-batches of one sample: their batch statistics are undefined.
    """
    begin = _steps_before(local, phase, round_number)
    steps = planned_steps(size, local, phase)
    return _layout(
        size, local.batch_size, steps_per_pass(size, local), steps, begin, phase.record_features, skip_single
    )


@lru_cache(maxsize=4096)
def _layout(
    size: int, batch_size: int, per_pass: int, steps: int, begin: int, record: str, skip_single: bool
) -> Layout:
    first_pass, done = divmod(begin, max(per_pass, 1))
    rows = done + np.arange(steps)
    sizes = np.minimum(batch_size, size - rows % max(per_pass, 1) * batch_size)
    kept = sizes > 1 if skip_single else sizes > 0
    before = {"none": steps, "last_pass": max(0, steps - per_pass)}.get(record, 0)
    return Layout(
        size=size,
        batch_size=batch_size,
        per_pass=per_pass,
        steps_per_pass=per_pass - (skip_single and size - (per_pass - 1) * batch_size == 1),
        first_pass=first_pass,
        passes=-(-(done + steps) // per_pass) if steps else 0,
        rows=slice(done, done + steps) if kept.all() else rows[kept],
        sizes=sizes[kept],
        recorded_from=int(kept[:before].sum()),
        pass_numbers=rows[kept] // max(per_pass, 1),
    )


def plan_batches(
    experiment: Experiment,
    module: Backbone,
    contexts: Sequence[ClientContext],
    phase: Phase,
    number: int,
    layouts: Sequence[Layout],
) -> BatchPlan:
    """Plan a phase of several clients on the CPU, except dropout masks, which are drawn on the training device.

    Masks are by far the most numbers (127 MB in a round of 50 clients with ``pfl_cnn``): sending them takes longer than
    a GPU's steps.

    Args:
        experiment: the run. module: its model, for the dropout sites.
        contexts: of the clients. phase: to plan. number: of the phase within the round.
        layouts: of the clients' mini-batches.
    """
    config, seed, round_number = experiment.config, contexts[0].setting.seed, contexts[0].round
    endless, batch_size = _is_endless(config.local, phase), config.local.batch_size
    key = philox.philox_key(seed, "passes" if endless else "batches", number)
    order_round = 0 if endless else round_number
    clients = [ctx.client for ctx in contexts]
    first, most = layouts[0], max(len(layout.sizes) for layout in layouts)
    if all(layout is first for layout in layouts):
        positions = first.positions(key, clients, order_round)
        sizes, pass_numbers = (values[None].repeat(len(clients), 0) for values in (first.sizes, first.pass_numbers))
    else:
        positions = np.zeros((most, len(clients), batch_size), dtype=np.int64)
        sizes, pass_numbers = (np.zeros((len(clients), most), dtype=np.int64) for _ in range(2))
        for place, layout in enumerate(layouts):
            steps = len(layout.sizes)
            positions[:steps, place] = layout.positions(key, [clients[place]], order_round)[:, 0]
            sizes[place, :steps], pass_numbers[place, :steps] = layout.sizes, layout.pass_numbers
    augmentation: Mapping[str, Tensor] = {}
    if phase.source is None and config.data.augmentation != "none":
        key = philox.philox_key(seed, "augmentation", number)
        numbers = np.zeros((most, len(clients), batch_size, 4), dtype=np.int64)
        for place, (ctx, layout) in enumerate(zip(contexts, layouts, strict=True)):
            drawn = philox.words(key, (0, ctx.client, round_number), 2 * len(layout.sizes) * batch_size)
            numbers[: len(layout.sizes), place] = drawn.view(np.uint32).reshape(-1, batch_size, 4)
        augmentation = augmentation_draws(torch.from_numpy(numbers), config.data.augmentation)
    return BatchPlan(
        positions=torch.from_numpy(positions),
        sizes=torch.from_numpy(sizes),
        dropout_masks=dropout_masks(experiment, module, contexts, number, [len(layout.sizes) for layout in layouts]),
        augmentation=augmentation,
        draws=_method_draws(experiment.method, contexts, number, layouts),
        recorded_from=torch.from_numpy(np.array([layout.recorded_from for layout in layouts])),
        pass_numbers=torch.from_numpy(pass_numbers),
        passes=max(layout.last_pass for layout in layouts) + 1,
    )


def dropout_masks(
    experiment: Experiment, module: Backbone, contexts: Sequence[ClientContext], number: int, steps: Sequence[int]
) -> dict[str, Tensor]:
    """Return uniform numbers [S, A, B, ...] by dropout site."""
    config, seed, most = experiment.config, contexts[0].setting.seed, max(steps)
    device, batch_size = config.engine.device, config.local.batch_size
    masks: dict[str, Tensor] = {}
    for site, shape in module.dropout_shapes.items():
        key = philox.philox_key(seed, "dropout", site, number)
        counters = [(0, ctx.client, ctx.round) for ctx in contexts]
        a_step = batch_size * math.prod(shape)
        if device == "cpu":
            masks[site] = torch.zeros(most, len(contexts), batch_size, *shape)
            for place, (counter, count) in enumerate(zip(counters, steps, strict=True)):
                drawn = philox.uniforms(philox.words(key, counter, -(-count * a_step // 4)), count * a_step)
                masks[site][:count, place] = drawn.reshape(count, batch_size, *shape)
        else:
            words = philox.device_words(key, counters, -(-most * a_step // 4), device)
            drawn = philox.device_uniforms(words, most * a_step)
            masks[site] = drawn.reshape(len(contexts), most, batch_size, *shape).transpose(0, 1)
    return masks


def _method_draws(
    method: Method, contexts: Sequence[ClientContext], number: int, layouts: Sequence[Layout]
) -> dict[str, Tensor]:
    """Return the method's random inputs [S, A, ...] by name."""
    if type(method).random_inputs is Method.random_inputs:  # most draw nothing
        return {}
    key = philox.philox_key(contexts[0].setting.seed, "draws", number)
    drawn: list[Mapping[str, Tensor]] = []
    for ctx, layout in zip(contexts, layouts, strict=True):
        seed = int(philox.words(key, (0, ctx.client, ctx.round), 1)[0])
        generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        planned = replace(ctx, steps_per_pass=layout.steps_per_pass)
        drawn.append(method.random_inputs(planned, len(layout.sizes), generator))
    return {name: _padded([draws[name] for draws in drawn]) for name in drawn[0]}


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Stack [S_k, ...] of each client to [S, A, ...], padded with zeros."""
    most = max(map(len, parts))
    stacked = parts[0].new_zeros(most, len(parts), *parts[0].shape[1:])
    for client, part in enumerate(parts):
        stacked[: len(part), client] = part
    return stacked


def passes(local: LocalConfig, phase: Phase) -> tuple[int, int | None]:
    """Return (epochs, steps) of a phase, by default as configured; steps take precedence."""
    if phase.epochs is None and phase.steps is None:
        return local.epochs, local.steps
    return phase.epochs or 1, phase.steps


def steps_per_pass(size: int, local: LocalConfig) -> int:
    """Return the number of mini-batches of one pass over ``size`` samples.

    With ``local.batches: full`` or ``endless`` a smaller last batch is left out unless it is the only one.
    """
    if local.batches == "all":
        return -(-size // local.batch_size)
    return max(size // local.batch_size, min(size, 1))


def planned_steps(size: int, local: LocalConfig, phase: Phase) -> int:
    """Return the mini-batches of a phase over ``size`` samples, with single ones that BatchNorm skips."""
    epochs, steps = passes(local, phase)
    if size == 0:
        return 0
    return steps if steps is not None else epochs * steps_per_pass(size, local)


def _is_endless(local: LocalConfig, phase: Phase) -> bool:
    """Return whether a phase's passes continue across rounds.

    Like a data loader with an iterator that outlives the round, as in the releases of FedGen and FedPA (fedpa.md,
    section 2). The chain advances in every round, also without the client, so that it is a function of the round.
    """
    return local.batches == "endless" and passes(local, phase)[1] is not None


def _steps_before(local: LocalConfig, phase: Phase, round_number: int) -> int:
    """Return the number of mini-batches of a phase's chain of passes before this round."""
    _, steps = passes(local, phase)
    return (round_number - 1) * steps if steps is not None and _is_endless(local, phase) else 0
