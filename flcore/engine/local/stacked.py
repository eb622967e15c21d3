"""Many clients trained at once: one step function under `torch.vmap`, parameters and buffers stacked [A, ...].

Clients of a stack are ordered by their number of steps: those still training come first, and a finished client costs
nothing. Smaller mini-batches are padded; padding has weight 0 in every loss and in BatchNorm's statistics. Clients'
losses share nothing, so the gradient of their sum is each client's own. It is taken outside of vmap, with PyTorch's
ordinary batched kernels.

Results agree with the serial trainer to float32 rounding, not to the bit. Stacks depend on the cohort alone, never on
workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from flcore.core.errors import ConfigError
from flcore.core.optim import clip_gradients
from flcore.engine.local.batchnorm import refuse_single_batches, uses_batch_statistics
from flcore.engine.local.client_loss import ClientLoss
from flcore.engine.local.plan import phase_layout, plan_batches
from flcore.engine.local.samples import phase_samples
from flcore.engine.local.serial import TrainJob, TrainResult
from flcore.engine.local.stacked_inputs import StackedBatch, StackedBatches, StackedContext
from flcore.engine.local.step import (
    LossOutput,
    add_class_sums,
    augmented,
    build_steps,
    by_pass,
    gradients,
    loss_context,
    merge_terms,
    precision,
    set_mode,
)
from flcore.experiment.experiment import Experiment
from flcore.io.messages import rows_finite
from flcore.io.stacks import WeightStack
from flcore.math.prototypes.class_means import class_sums
from flcore.methods.types import Loss, LossInputs, Phase

Recorded = tuple[Tensor, Tensor]
"""Sums of recorded features by client and class, float64 [A, C, d], and their counts, [A, C]; by pass [A, P, …]
(:func:`flcore.engine.local.step.by_pass`)."""


_KEPT_ON_DEVICE = 2 * 2**30
"""Bytes of a round's models that may stay on a GPU until the aggregation."""


class StackedTrainer:
    """Trains the clients of a stack at once in one thread."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.loss = ClientLoss(experiment)
        self.module = self.loss.module
        refuse_single_batches(experiment, self.module)

    def train(self, training: TrainJob) -> list[TrainResult]:
        """Train the stack; raise ConfigError if the method cannot be stacked."""
        contexts, phases = training.contexts, training.phases
        all_inputs = [self.experiment.method.loss_inputs(ctx) if phases else {} for ctx in contexts]
        params = self._stacked([start.params for start in training.starts])
        buffers = self._stacked([start.buffers for start in training.starts])
        sums: list[dict[str, float]] = [{} for _ in contexts]
        counts: list[Counter[str]] = [Counter() for _ in contexts]
        steps = [0] * len(contexts)
        num_classes = contexts[0].setting.num_classes
        drawn = [torch.zeros(num_classes, dtype=torch.int64) for _ in contexts]
        recorded: list[tuple[Tensor, Tensor] | None] = [None for _ in contexts]
        for number, phase in enumerate(phases, start=training.first_phase):
            set_mode(self.module, phase, self.experiment.batchnorm)
            order, batches = self._batches(training, all_inputs, number, phase)
            inputs = StackedContext(
                [loss_context(all_inputs[position], phases) for position in order],
                [contexts[position] for position in order],
                self.experiment.method.name,
            )
            in_order = order == list(range(len(contexts)))
            place = torch.tensor(order, device=self.experiment.config.engine.device)
            values = {**params, **buffers}
            arranged = values if in_order else {name: own.index_select(0, place) for name, own in values.items()}
            labels = batches.drawn(num_classes)
            terms, found = self._run_phase(phase, contexts[0].round, arranged, batches, inputs)
            back = torch.argsort(place)
            values = {
                name: value.detach() if in_order else value.detach().index_select(0, back)
                for name, value in arranged.items()
            }
            params, buffers = {name: values[name] for name in params}, {name: values[name] for name in buffers}
            for rank, position in enumerate(order):
                taken = batches.steps_of(rank)
                steps[position] += taken
                drawn[position] += labels[rank]
                if found is not None:
                    recorded[position] = add_class_sums(recorded[position], (found[0][rank], found[1][rank]))
                for name, totals in terms.items() if taken else ():
                    sums[position][name] = sums[position].get(name, 0.0) + totals[rank]
                    counts[position][name] += taken
        weights = self._stack(params, buffers).rows()
        finite = rows_finite([*params.values(), *buffers.values()])
        return [
            TrainResult(
                weights[index],
                {name: total / counts[index][name] for name, total in sums[index].items()},
                steps[index],
                drawn[index],
                recorded[index],
                finite[index],
            )
            for index in range(len(contexts))
        ]

    def _batches(
        self, training: TrainJob, all_inputs: Sequence[LossInputs], number: int, phase: Phase
    ) -> tuple[list[int], StackedBatches]:
        """Plan phase ``number`` of the round, for a module prepared by :func:`set_mode`.

        Returns:
            The clients' indices, those with most steps first; the batches in that order.
        """
        samples, lengths = phase_samples(phase, training.data, all_inputs, training.tables)
        config, contexts = self.experiment.config, training.contexts
        skip = uses_batch_statistics(self.module)
        layouts = [phase_layout(length, config.local, phase, contexts[0].round, skip_single=skip) for length in lengths]
        offsets = [sum(lengths[:position]) if length else 0 for position, length in enumerate(lengths)]
        order = sorted(range(len(layouts)), key=lambda position: -len(layouts[position].sizes))
        plan = plan_batches(
            self.experiment,
            self.module,
            [contexts[position] for position in order],
            phase,
            number,
            [layouts[position] for position in order],
        )
        offsets = [offsets[position] for position in order]
        return order, StackedBatches(plan, offsets, samples, config.engine.device)

    def _stack(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> WeightStack:
        """Return the trained models; a round's models stay on a GPU until the aggregation if there is room."""
        clients = len(next(iter(params.values())))
        size = sum(tensor.nbytes for tensor in (*params.values(), *buffers.values())) // clients
        return WeightStack(params, buffers, stays=size * self.experiment.setting.cohort_size <= _KEPT_ON_DEVICE)

    def _stacked(self, values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        device = self.experiment.config.engine.device
        # First to the device: kept layers are there, initial ones still on the CPU.
        return {name: torch.stack([value[name].to(device) for value in values]) for name in values[0]}

    def _run_phase(
        self,
        phase: Phase,
        round_number: int,
        values: dict[str, Tensor],
        batches: StackedBatches,
        inputs: StackedContext,
    ) -> tuple[dict[str, list[float]], Recorded | None]:
        """Train one phase in place.

        Returns:
            By loss term and client the sum over steps; and sums and counts of recorded features, or None.
        """
        config, device = self.experiment.config, self.experiment.config.engine.device
        updates = build_steps(self.experiment, self.module, phase, round_number)
        buffers = [name for name, _ in self.module.named_buffers()]
        sums: dict[str, Tensor] = {}
        recorded: Recorded | None = None
        active = len(batches)
        for step in range(batches.steps):
            still = batches.active(step)
            if still < active:
                for update in updates:
                    update.optimizer.keep(still)
                active = still
            batch, augmentation = batches.read(step)
            images = augmented(self.experiment, batch["images"], augmentation)
            batch["images"] = images.reshape(active, -1, *images.shape[1:])
            recording = batches.recording(step, active)
            terms: dict[str, Tensor] = {}
            features: list[Tensor] = []
            for number, update in enumerate(updates):
                going = {name: value[:active] for name, value in values.items()}
                wanted = recording is not None and number == 0
                ask = partial(self._losses, update.loss, batch, inputs, active)
                found, recorded_features, grads = gradients(update, going, buffers, ask, stacked=True, recording=wanted)
                if config.local.clip is not None:
                    clip_gradients(grads, config.local.clip, stacked=True)
                update.optimizer.step([going[name] for name in update.names], grads)
                terms, features = merge_terms(terms, found), features + recorded_features
            for name, term in terms.items():
                if name not in sums:
                    sums[name] = torch.zeros(len(batches), device=device)
                sums[name][:active] += term.detach().float()
            if recording is not None:
                weight = recording if not batch["weight"] else recording * batch["weight"][0]
                classes = self.experiment.setting.num_classes
                totals, counts = class_sums(features[0], batch["labels"], classes, weight)
                if phase.record_features == "passes":
                    numbers = batches.pass_numbers(step, active)
                    totals, counts = by_pass((totals, counts), numbers, batches.passes)
                if recorded is None:
                    recorded = (
                        totals.new_zeros(len(batches), *totals.shape[1:]),
                        counts.new_zeros(len(batches), *counts.shape[1:]),
                    )
                recorded[0][:active] += totals
                recorded[1][:active] += counts
        return {name: total.tolist() for name, total in sums.items()}, recorded

    def _losses(
        self,
        loss: Loss,
        batch: StackedBatch,
        inputs: StackedContext,
        active: int,
        values: Mapping[str, Tensor],
        recording: bool,
    ) -> LossOutput:
        """Return loss terms [A], and recorded features [A, B, d]; running statistics change in place."""

        def one_client(values: Mapping[str, Tensor], batch: StackedBatch, own: Sequence[Tensor]) -> LossOutput:
            return self.loss(loss, values, batch, inputs.rebuild(own), recording=recording)

        try:
            with precision(self.experiment):
                found: LossOutput = torch.vmap(one_client)(values, batch, inputs.stacked(active))
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            first = str(error).splitlines()[0]
            raise ConfigError(
                f"engine.stack = true: {self.experiment.method.name} cannot be trained on stacked clients with "
                f"{self.experiment.config.model_spec.name} ({first}); use engine.stack=false"
            ) from error
        finally:
            self.loss.forget_masks()
        return found
