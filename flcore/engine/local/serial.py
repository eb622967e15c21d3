"""The one loop of local training, for one client at a time: the reference that the stacked engine must agree with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from flcore.data.augment import augment
from flcore.engine.local.batchnorm import refuse_single_batches, uses_batch_statistics
from flcore.engine.local.samples import ClientImages, GivenSamples, Samples
from flcore.engine.local.step import make_optimizer
from flcore.engine.local.tape import Tape, record_tape
from flcore.experiment import Experiment
from flcore.messages import Weights
from flcore.methods.vocabulary import Batch, Context, Phase, Turn
from flcore.models import Backbone, extract_weights, load_weights
from flcore.models.view import ModuleView
from flcore.optim import clip_gradients


@dataclass(frozen=True)
class Outcome:
    """What local training leaves.

    Attributes:
        weights: the trained model with its buffers, on the CPU.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        drawn: int64 [C], how often a sample of each class was in a mini-batch.
        noted: sums of noted features by class, float64 [C, d], and how many they are, float64 [C]; None without any.
    """

    weights: Weights
    losses: Mapping[str, float]
    steps: int
    drawn: Tensor
    noted: tuple[Tensor, Tensor] | None = None


class Trainer(Protocol):
    """Trains some clients of one leg from given weights."""

    def train(
        self, turns: Sequence[Turn], starts: Sequence[Weights], phases: Sequence[Phase], first_phase: int
    ) -> list[Outcome]:
        """One outcome per turn, in order. ``first_phase``: number of the leg's first phase within the round."""


@dataclass
class _Totals:
    """What one client's phases add up to."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    noted: tuple[Tensor, Tensor] | None = None


class SerialTrainer:
    """Trains clients one after the other in one module."""

    def __init__(self, experiment: Experiment) -> None:
        """Build the module."""
        self.experiment = experiment
        self.module = experiment.new_module()
        self.model = ModuleView(self.module, experiment.setting.network, dict(self.module.named_parameters()))
        if experiment.config.engine.compile != "none":
            compile_parts(self.module, experiment.config.engine.compile)
        refuse_single_batches(experiment, self.module)

    def train(
        self, turns: Sequence[Turn], starts: Sequence[Weights], phases: Sequence[Phase], first_phase: int
    ) -> list[Outcome]:
        """One outcome per turn, in order."""
        pairs = zip(turns, starts, strict=True)
        return [self._train_client(turn, start, phases, first_phase) for turn, start in pairs]

    def _train_client(self, turn: Turn, start: Weights, phases: Sequence[Phase], first_phase: int) -> Outcome:
        load_weights(self.module, start)
        context = self.experiment.method.context(turn) if phases else {}
        totals = _Totals()
        drawn = torch.zeros(turn.setting.num_classes, dtype=torch.int64)
        steps = 0
        for number, phase in enumerate(phases, start=first_phase):
            tape, samples = self._prepare(turn, phase, number, context)
            self._run_phase(turn, phase, tape, samples, loss_context(context, phases), totals)
            steps += len(tape)
            drawn += drawn_labels(tape, samples, len(drawn))
        self.model.noise = None
        losses = {name: float(total) / totals.counts[name] for name, total in totals.sums.items()}
        return Outcome(extract_weights(self.module), losses, steps, drawn, totals.noted)

    def _prepare(self, turn: Turn, phase: Phase, number: int, context: Context) -> tuple[Tape, Samples]:
        set_mode(self.module, phase, self.experiment.batchnorm)
        samples = phase_samples(self.experiment, turn, phase, context)
        skip = uses_batch_statistics(self.module)
        tape = record_tape(self.experiment, self.module, turn, phase, number, len(samples), skip_single=skip)
        return tape, samples

    def _run_phase(
        self,
        turn: Turn,
        phase: Phase,
        tape: Tape,
        samples: Samples,
        context: Context,
        totals: _Totals,
    ) -> None:
        config, model, method = self.experiment.config, self.model, self.experiment.method
        loss = phase.loss or method.loss
        trainable = [parameter for parameter in model.params.values() if parameter.requires_grad]
        optimizer = make_optimizer(config.local, turn.round, config.federation.rounds)
        for step, size in enumerate(tape.sizes):
            images, labels = samples.take(tape.positions[step, :size])
            images = augmented(self.experiment, images, {k: draw[step, :size] for k, draw in tape.augmentation.items()})
            model.noise = {site: noise[step, :size] for site, noise in tape.noise.items()} or None
            draws = {name: draw[step] for name, draw in tape.draws.items()}
            with precision(self.experiment):
                terms = loss(model, Batch(images, labels, None, draws), context)
            total = torch.stack(tuple(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
            grads = list(torch.autograd.grad(total, trainable, allow_unused=True, materialize_grads=True))
            if config.local.clip is not None:
                clip_gradients(grads, config.local.clip, stacked=False)
            optimizer.step(trainable, grads)
            totals.counts.update(terms.keys())
            for name, term in terms.items():
                totals.sums[name] = totals.sums[name] + term.detach() if name in totals.sums else term.detach()
            if step >= tape.noted_from:
                found = class_sums(model.take_noted(method.name), labels, turn.setting.num_classes)
                totals.noted = added(totals.noted, found)


def phase_samples(experiment: Experiment, turn: Turn, phase: Phase, context: Context) -> Samples:
    """What a phase goes through: the client's images of this round, or a source of the method's own."""
    if phase.source is None:
        return ClientImages(experiment, experiment.training_indices(turn.client, turn.round))
    given = context[phase.source]
    return GivenSamples(given["inputs"], given["labels"])


def loss_context(context: Context, phases: Sequence[Phase]) -> Context:
    """The context without the samples of phases, which no loss reads."""
    sources = {phase.source for phase in phases}
    return {name: value for name, value in context.items() if name not in sources}


def drawn_labels(tape: Tape, samples: Samples, num_classes: int) -> Tensor:
    """int64 [C]: how often each class was in the mini-batches of a tape."""
    if not len(tape):
        return torch.zeros(num_classes, dtype=torch.int64)
    width = tape.positions.shape[1]
    real = torch.arange(width) < torch.tensor(tape.sizes)[:, None]
    _, labels = samples.take(tape.positions[real.to(tape.positions.device)])
    return torch.bincount(labels.cpu(), minlength=num_classes)


def class_sums(
    features: Tensor, labels: Tensor, num_classes: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sums of features by class, float64 [..., C, d], and how many they are, float64 [..., C].

    Args:
        features: [..., B, d].
        labels: int64 [..., B].
        num_classes: C.
        weight: [..., B], 1 for samples, 0 for padding; None for all.
    """
    # By a product, not by adding rows to places: that has no fixed order on a GPU.
    member = (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).double()
    if weight is not None:
        member = member * weight.unsqueeze(-1)
    return member.mT @ features.double(), member.sum(-2)


def added(first: tuple[Tensor, Tensor] | None, second: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Sums and counts of both; None is nothing."""
    if first is None or second is None:
        return first or second
    return first[0] + second[0], first[1] + second[1]


def set_mode(module: Backbone, phase: Phase, batchnorm: str) -> None:
    """Training mode for what a phase moves; the rest is frozen, BatchNorm statistics included."""
    module.train()
    for name, layer in module.named_modules():
        moves = any(f"{name}.".startswith(prefix) for prefix in phase.trainable)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (batchnorm == "frozen" or not moves):
            layer.eval()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(name.startswith(prefix) for prefix in phase.trainable))


def augmented(experiment: Experiment, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
    """Images [n, C, H, W] augmented by their draws; outside is black, as if padded before normalising."""
    if not draws:
        return images
    meta = experiment.dataset.meta
    black = -torch.tensor(meta.mean) / torch.tensor(meta.std)
    return augment(images, experiment.config.data.augmentation, draws, fill=black)


def precision(experiment: Experiment) -> AbstractContextManager[object]:
    """bfloat16 where the engine is told to: parameters, gradients and messages stay float32."""
    engine = experiment.config.engine
    if engine.precision == "bf16":
        return torch.autocast(engine.device, dtype=torch.bfloat16)
    return nullcontext()


def compile_parts(module: Backbone, mode: str) -> None:
    """Compile the model's parts (`torch.compile`; ``reduce-overhead`` records CUDA graphs)."""
    for name in ("encode", "project", "classify"):
        compiled = torch.compile(getattr(module, name), mode=None if mode == "default" else mode)
        setattr(module, name, compiled)
