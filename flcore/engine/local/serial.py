"""Local training of one client at a time: the reference that the stacked engine must agree with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from flcore.core.optim import clip_gradients
from flcore.engine.client_data import ClientData
from flcore.engine.local.batchnorm import refuse_single_batches, uses_batch_statistics
from flcore.engine.local.samples import Samples, drawn_labels, phase_samples
from flcore.engine.local.step import (
    Step,
    add_noted,
    augmented,
    build_steps,
    in_its_pass,
    loss_context,
    precision,
    probed,
    set_mode,
    together,
    total_of,
)
from flcore.engine.local.tape import BatchPlan, plan_batches
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.math.prototypes.class_means import class_sums
from flcore.methods.types import Batch, ClientContext, LossInputs, Phase
from flcore.models.base import laid_out, load_weights, snapshot
from flcore.models.view import ModuleView

Tables = Mapping[str, Sequence[Tensor]]
"""What is known of every sample, by name and client of the stack, [n_k, ...] on the device: what the client remembers
of it (:meth:`flcore.methods.api.Method.per_sample_inputs`), and what frozen models say of it."""


@dataclass(frozen=True)
class TrainJob:
    """What clients of one exchange are to be trained in, and from what; of one client or more, in order.

    Attributes:
        contexts: of the clients. data: their samples. starts: the weights they begin with, buffers included.
        phases: of the exchange.
        first_phase: number of the leg's first phase within the round.
        tables: see :data:`Tables`; empty for none.
    """

    contexts: Sequence[ClientContext]
    data: Sequence[ClientData]
    starts: Sequence[Weights]
    phases: Sequence[Phase]
    first_phase: int
    tables: Tables = field(default_factory=dict)

    def of(self, clients: Iterable[int]) -> TrainJob:
        """That of some of the clients alone, by their places."""
        chosen = list(clients)
        return replace(
            self,
            contexts=[self.contexts[place] for place in chosen],
            data=[self.data[place] for place in chosen],
            starts=[self.starts[place] for place in chosen],
            tables={name: [own[place] for place in chosen] for name, own in self.tables.items()},
        )


@dataclass(frozen=True)
class TrainResult:
    """What local training leaves.

    Attributes:
        weights: the trained model with its buffers, on the device.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        drawn: int64 [C], how often a sample of each class was in a mini-batch.
        noted: sums of noted features by class, float64 [C, d], and how many they are, float64 [C]; None without any.
            Where passes are noted, of the classes' means in mini-batches by pass, [P, C, d] and [P, C].
        finite: whether no weight is infinite or not a number; None: nobody has looked.
        there: the weights, where they lie on a GPU, have twins on the CPU and may stay until they are folded.
    """

    weights: Weights
    losses: Mapping[str, float]
    steps: int
    drawn: Tensor
    noted: tuple[Tensor, Tensor] | None = None
    finite: bool | None = None
    there: Weights | None = None


class Trainer(Protocol):
    """Trains some clients of one exchange from given weights."""

    def train(self, training: TrainJob) -> list[TrainResult]:
        """One outcome per turn, in order."""


@dataclass
class _Totals:
    """What one client's phases add up to."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    noted: tuple[Tensor, Tensor] | None = None


class SerialTrainer:
    """Trains clients one after the other in one module."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.module = laid_out(experiment.new_module(), experiment.config.engine.device)
        self.model = ModuleView(self.module, experiment.setting.network, dict(self.module.named_parameters()))
        refuse_single_batches(experiment, self.module)

    def train(self, training: TrainJob) -> list[TrainResult]:
        return [self._train_client(training.of([place])) for place in range(len(training.contexts))]

    def _train_client(self, training: TrainJob) -> TrainResult:
        (ctx,), (start,), phases = training.contexts, training.starts, training.phases
        load_weights(self.module, start)
        num_classes = ctx.setting.num_classes
        inputs = self.experiment.method.loss_inputs(ctx) if phases else {}
        totals, drawn, steps = _Totals(), torch.zeros(num_classes, dtype=torch.int64), 0
        for number, phase in enumerate(phases, start=training.first_phase):
            set_mode(self.module, phase, self.experiment.batchnorm)
            samples, (size,) = phase_samples(phase, training.data, [inputs], training.tables)
            skip = uses_batch_statistics(self.module)
            tape = plan_batches(self.experiment, self.module, ctx, phase, number, size, skip_single=skip)
            tape = tape.on(self.experiment.config.engine.device)
            self._run_phase(ctx, phase, tape, samples, loss_context(inputs, phases), totals)
            steps += len(tape)
            labels, sizes = samples.labels[tape.positions], torch.tensor(tape.sizes, dtype=torch.int64)
            drawn += drawn_labels(labels.unsqueeze(1), sizes.unsqueeze(1), num_classes)[0]
        self.model.drops = None
        losses = {name: float(total) / totals.counts[name] for name, total in totals.sums.items()}
        return TrainResult(snapshot(self.module), losses, steps, drawn, totals.noted)

    def _run_phase(
        self, ctx: ClientContext, phase: Phase, tape: BatchPlan, samples: Samples, inputs: LossInputs, totals: _Totals
    ) -> None:
        model, method = self.model, self.experiment.method
        moves = build_steps(self.experiment, self.module, phase, ctx.round)
        moving = [[model.params[name] for name in move.names] for move in moves]
        for step, size in enumerate(tape.sizes):
            rows = tape.positions[step, :size]
            labels = samples.labels.index_select(0, rows)
            draws = {k: draw[step, :size] for k, draw in tape.augmentation.items()}
            images = augmented(self.experiment, samples.inputs(rows), draws)
            model.drops = {site: drops[step, :size] for site, drops in tape.drops.items()} or None
            frozen = {name: table.index_select(0, rows) for name, table in samples.tables.items()}
            batch = Batch(images, labels, None, {name: draw[step] for name, draw in tape.draws.items()}, frozen)
            terms: dict[str, Tensor] = {}
            for number, (move, params) in enumerate(zip(moves, moving, strict=True)):
                terms = together(terms, self._make(move, params, batch, inputs))
                if number == 0 and step >= tape.noted_from:
                    found = class_sums(model.take_noted(method.name), labels, ctx.setting.num_classes)
                    if phase.note == "passes":
                        this = torch.tensor(tape.pass_numbers[step], device=labels.device)
                        found = in_its_pass(found, this, tape.pass_numbers[-1] + 1)
                    totals.noted = add_noted(totals.noted, found)
            totals.counts.update(terms.keys())
            for name, term in terms.items():
                totals.sums[name] = totals.sums[name] + term.detach() if name in totals.sums else term.detach()

    def _make(self, move: Step, params: list[Tensor], batch: Batch, inputs: LossInputs) -> dict[str, Tensor]:
        """Move the module's parameters ``params`` once, and say what the loss was."""
        if move.probe is None:
            terms, grads = self._gradients(move, params, batch, inputs)
        else:
            kept = [parameter.detach().clone() for parameter in params]
            self._go_to_probe(move, params, batch, inputs)
            terms, grads = self._gradients(move, params, batch, inputs)
            _set(params, kept)
        limit = self.experiment.config.local.clip
        if limit is not None:
            clip_gradients(grads, limit, stacked=False)
        move.optimizer.step(params, grads)
        return terms

    def _gradients(
        self, move: Step, params: list[Tensor], batch: Batch, inputs: LossInputs
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        with precision(self.experiment):
            terms = move.loss(self.model, batch, inputs)
        return terms, list(torch.autograd.grad(total_of(terms), params, allow_unused=True, materialize_grads=True))

    def _go_to_probe(self, move: Step, params: list[Tensor], batch: Batch, inputs: LossInputs) -> None:
        """Put the parameters where the move's gradient is taken; running statistics stay as they are."""
        buffers = list(self.module.buffers())
        statistics = [buffer.clone() for buffer in buffers]
        _, grads = self._gradients(move, params, batch, inputs)
        _set(buffers, statistics)
        point = probed(move, self.model.params, grads, stacked=False)
        _set(params, list(point.values()))


@torch.no_grad()
def _set(places: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
