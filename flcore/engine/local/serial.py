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
from flcore.engine.local.plan import BatchPlan, phase_layout, plan_batches
from flcore.engine.local.samples import Samples, drawn_labels, phase_samples
from flcore.engine.local.step import (
    Step,
    add_class_sums,
    augmented,
    build_steps,
    by_pass,
    loss_context,
    merge_terms,
    perturbed,
    precision,
    set_mode,
    total_of,
)
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.math.prototypes.class_means import class_sums
from flcore.methods.types import Batch, ClientContext, LossInputs, Phase
from flcore.models.base import laid_out, load_weights, snapshot
from flcore.models.network import ModuleView

Tables = Mapping[str, Sequence[Tensor]]
"""Per-sample inputs by name and client of the stack, [n_k, ...] on the device: clients' own
(:meth:`flcore.methods.api.Method.per_sample_inputs`) and the outputs of teachers."""


@dataclass(frozen=True)
class TrainJob:
    """The local training of one client or more in an exchange, in order.

    Attributes:
        contexts: of the clients. data: their samples. starts: initial weights with buffers.
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
        """Return the job of some clients, by index."""
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
    """The result of a client's local training.

    Attributes:
        weights: the trained model with its buffers, on the device.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        drawn: int64 [C], how often a sample of each class was in a mini-batch.
        recorded: sums of recorded features by class, float64 [C, d], and their counts, float64 [C]; None without any.
            Where passes are recorded, of the classes' means in mini-batches by pass, [P, C, d] and [P, C].
        finite: whether all weights are finite; None: not checked.
    """

    weights: Weights
    losses: Mapping[str, float]
    steps: int
    drawn: Tensor
    recorded: tuple[Tensor, Tensor] | None = None
    finite: bool | None = None


class Trainer(Protocol):
    """Trains some clients of one exchange from given weights."""

    def train(self, training: TrainJob) -> list[TrainResult]:
        """Return a result per client, in order."""


@dataclass
class _Totals:
    """Sums over one client's phases."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    recorded: tuple[Tensor, Tensor] | None = None


class SerialTrainer:
    """Trains clients one after the other in one module."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.module = laid_out(experiment.new_module(), experiment.config.engine.device)
        self.model = ModuleView(self.module, experiment.setting.network, dict(self.module.named_parameters()))
        refuse_single_batches(experiment, self.module)

    def train(self, training: TrainJob) -> list[TrainResult]:
        num_classes, phases = self.experiment.setting.num_classes, training.phases
        results = []
        for place, (ctx, start) in enumerate(zip(training.contexts, training.starts, strict=True)):
            one = training.of([place])
            load_weights(self.module, start)
            inputs = self.experiment.method.loss_inputs(ctx) if phases else {}
            totals, drawn, steps = _Totals(), torch.zeros(num_classes, dtype=torch.int64), 0
            for number, phase in enumerate(phases, start=training.first_phase):
                set_mode(self.module, phase, self.experiment.batchnorm)
                samples, (size,) = phase_samples(phase, one.data, [inputs], one.tables)
                skip = uses_batch_statistics(self.module)
                layout = phase_layout(size, self.experiment.config.local, phase, ctx.round, skip_single=skip)
                plan = plan_batches(self.experiment, self.module, [ctx], phase, number, [layout])
                plan = plan.on(self.experiment.config.engine.device)
                self._run_phase(ctx, phase, plan, samples, loss_context(inputs, phases), totals)
                steps += plan.sizes.shape[1]
                drawn += drawn_labels(samples.labels[plan.positions], plan.sizes.t(), num_classes)[0]
            self.model.dropout_masks = None
            losses = {name: float(total) / totals.counts[name] for name, total in totals.sums.items()}
            results.append(TrainResult(snapshot(self.module), losses, steps, drawn, totals.recorded))
        return results

    def _run_phase(
        self, ctx: ClientContext, phase: Phase, plan: BatchPlan, samples: Samples, inputs: LossInputs, totals: _Totals
    ) -> None:
        model, method, limit = self.model, self.experiment.method, self.experiment.config.local.clip
        steps = build_steps(self.experiment, self.module, phase, ctx.round)
        trainable = [[model.params[name] for name in step.names] for step in steps]
        recorded_from, pass_numbers = int(plan.recorded_from), plan.pass_numbers[0].tolist()
        for index, size in enumerate(plan.sizes[0].tolist()):
            batch = self._batch(plan, index, size, samples)
            terms: dict[str, Tensor] = {}
            for number, (step, params) in enumerate(zip(steps, trainable, strict=True)):
                weights = self._perturb(step, params, batch, inputs) if step.perturb is not None else None
                with precision(self.experiment):
                    found = step.loss(model, batch, inputs)
                grads = _gradients(found, params)
                if weights is not None:
                    _set(params, weights)
                if limit is not None:
                    clip_gradients(grads, limit, stacked=False)
                step.optimizer.step(params, grads)
                terms = merge_terms(terms, found)
                if number == 0 and index >= recorded_from:
                    recorded = class_sums(model.take_recorded(method.name), batch.labels, ctx.setting.num_classes)
                    if phase.record_features == "passes":
                        this = torch.tensor(pass_numbers[index], device=batch.labels.device)
                        recorded = by_pass(recorded, this, plan.passes)
                    totals.recorded = add_class_sums(totals.recorded, recorded)
            totals.counts.update(terms.keys())
            for name, term in terms.items():
                totals.sums[name] = totals.sums[name] + term.detach() if name in totals.sums else term.detach()

    def _batch(self, plan: BatchPlan, index: int, size: int, samples: Samples) -> Batch:
        """Return a planned mini-batch of ``size`` samples, and set its dropout masks in the model."""
        rows = plan.positions[index, 0, :size]
        draws = {name: draw[index, 0, :size] for name, draw in plan.augmentation.items()}
        self.model.dropout_masks = {site: masks[index, 0, :size] for site, masks in plan.dropout_masks.items()} or None
        return Batch(
            augmented(self.experiment, samples.inputs(rows), draws),
            samples.labels.index_select(0, rows),
            None,
            {name: draw[index, 0] for name, draw in plan.draws.items()},
            {name: table.index_select(0, rows) for name, table in samples.tables.items()},
        )

    def _perturb(self, step: Step, params: list[Tensor], batch: Batch, inputs: LossInputs) -> list[Tensor]:
        """Move the parameters to the point of the gradient; return their old values. Buffers stay."""
        weights = [parameter.detach().clone() for parameter in params]
        buffers = list(self.module.buffers())
        statistics = [buffer.clone() for buffer in buffers]
        with precision(self.experiment):
            terms = step.loss(self.model, batch, inputs)
        grads = _gradients(terms, params)
        _set(buffers, statistics)
        _set(params, list(perturbed(step, self.model.params, grads, stacked=False).values()))
        return weights


def _gradients(terms: Mapping[str, Tensor], params: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(total_of(terms), params, allow_unused=True, materialize_grads=True))


@torch.no_grad()
def _set(places: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
