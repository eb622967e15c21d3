"""The one loop of local training, serial: the reference that every faster engine must agree with.

A :class:`Worker` owns a module that clients use in turn; all state comes in and goes out as records, so that nothing of
one client can reach the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flcore.data.augment import augment, draw_augmentation
from flcore.data.images import normalise
from flcore.engine.experiment import Experiment
from flcore.engine.optimizers import make_optimizer
from flcore.errors import ConfigError, RunError
from flcore.messages import Payload, Record, Size, Weights, measure, on_device, payload_of
from flcore.methods.base import Batch, Context, Phase
from flcore.models import Backbone, Noise, extract_weights, load_weights
from flcore.rng import torch_stream

BATCHNORM = "batchnorm"
"""Name of a client's private BatchNorm statistics in its memory (policy ``local``); the engine's, not a method's."""


@dataclass(frozen=True)
class Reply:
    """What the server learns of one client's participation, and what it cost.

    Attributes:
        message: what goes up.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        remembers: whether the client keeps a memory for its next participation.
        down: cost of the received message by kind. up: of the reply.
    """

    message: Record
    losses: Mapping[str, float]
    steps: int
    remembers: bool
    down: Mapping[str, Size]
    up: Mapping[str, Size]


class SerialModel:
    """A module as a loss sees it; ``noise`` is the dropout noise of the current step, None in evaluation."""

    def __init__(self, module: Backbone) -> None:
        """View a module."""
        self.module = module
        self.params: Mapping[str, Tensor] = dict(module.named_parameters())
        self.noise: Noise | None = None

    def features(self, images: Tensor) -> Tensor:
        """Images to features."""
        return self.module.features(images, self.noise)

    def classify(self, features: Tensor) -> Tensor:
        """Features to logits."""
        return self.module.classify(features, self.noise)


class Worker:
    """Trains clients one after the other in this process, on one intra-op thread."""

    def __init__(self, experiment: Experiment) -> None:
        """Build the module; the experiment's data are used in place."""
        self.experiment = experiment
        self.module = experiment.new_module()
        self.model = SerialModel(self.module)
        self._batchnorm_layers = [
            layer for layer in self.module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        ]
        if self._batchnorm_layers and experiment.config.local.batch_size == 1 and experiment.batchnorm != "frozen":
            raise ConfigError(
                "local.batch_size = 1: BatchNorm needs 2 samples or more; change it, or set model.batchnorm=frozen"
            )

    def train(self, round_number: int, client: int, server: Record, memory: Record) -> tuple[Reply, Record]:
        """One participation: receive, train, reply. Returns the reply and what the client remembers.

        Args:
            round_number: 1-based. client: trainer id.
            server: what the server holds at the start of the round.
            memory: what this client kept; empty at its first participation.

        Raises:
            RunError: the loss or a weight stopped being finite; names client and round.
        """
        experiment, method = self.experiment, self.experiment.method
        device = experiment.config.engine.device
        inbox = on_device(outgoing(method.broadcast(server, client, experiment.setting), experiment), device)
        memory = on_device(memory, device)
        load_weights(self.module, starting_weights(method.begin(inbox, memory, experiment.setting), memory, experiment))
        context = method.context(inbox, memory, experiment.setting)
        sums: dict[str, Tensor] = {}
        counts: Counter[str] = Counter()
        steps = 0
        for number, phase in enumerate(method.phases()):
            for terms in self._run_phase(phase, number, round_number, client, context):
                counts.update(terms.keys())
                for name, term in terms.items():
                    sums[name] = sums[name] + term if name in sums else term
                steps += 1
        losses = {name: float(total) / counts[name] for name, total in sums.items()}
        trained = _Trained(self, client)
        message, kept = method.reply(trained, inbox, memory, experiment.setting)
        own = kept.get("model")
        keeps_statistics = isinstance(own, Weights) and bool(own.buffers)
        if experiment.batchnorm == "local" and trained.weights.buffers and not keeps_statistics:
            kept = {**kept, BATCHNORM: Weights({}, trained.weights.buffers)}
        message, kept = on_device(outgoing(message, experiment), "cpu"), on_device(kept, "cpu")
        _check_finite(losses, {**kept, **message, "trained": trained.weights}, round_number, client)
        down, up = _cost(inbox, experiment), _cost(message, experiment)
        return Reply(message, losses, steps, bool(kept), down, up), kept

    def _run_phase(
        self, phase: Phase, number: int, round_number: int, client: int, context: Context
    ) -> Iterator[dict[str, Tensor]]:
        """Train one phase, a step at a time; yields the loss terms of each."""
        config, method, model = self.experiment.config, self.experiment.method, self.model
        trainable = self._select(phase)
        optimizer = make_optimizer(config.local, round_number, config.federation.rounds)
        for batch in self._batches(phase, number, round_number, client):
            terms = method.loss(model, batch, context)
            total = torch.stack(tuple(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
            grads = torch.autograd.grad(total, trainable, allow_unused=True, materialize_grads=True)
            optimizer.step(trainable, list(grads))
            yield {name: term.detach() for name, term in terms.items()}
        model.noise = None

    def _select(self, phase: Phase) -> list[Tensor]:
        """Set training mode, freeze what the phase does not move, and return what it does."""
        self.module.train()
        frozen_statistics = self.experiment.batchnorm == "frozen"
        for name, layer in self.module.named_modules():
            moves = any(f"{name}.".startswith(prefix) for prefix in phase.trainable)
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (frozen_statistics or not moves):
                layer.eval()
        for name, parameter in self.model.params.items():
            parameter.requires_grad_(any(name.startswith(prefix) for prefix in phase.trainable))
        return [parameter for parameter in self.model.params.values() if parameter.requires_grad]

    def _batches(self, phase: Phase, number: int, round_number: int, client: int) -> Iterator[Batch]:
        """The mini-batches of a phase, with augmentation; every draw of a step is made here, in the step's order."""
        experiment = self.experiment
        config, meta = experiment.config, experiment.dataset.meta
        samples = _ClientSamples(experiment, client)
        generator = torch_stream(config.seed, "batches", round_number, client, number)
        noise_generator = torch_stream(config.seed, "dropout", round_number, client, number)
        augment_generator = torch_stream(config.seed, "augmentation", round_number, client, number)
        black = -torch.tensor(meta.mean) / torch.tensor(meta.std)
        epochs, steps = (config.local.epochs, config.local.steps)
        if phase.epochs is not None or phase.steps is not None:
            epochs, steps = (phase.epochs or 1, phase.steps)
        for positions in batch_positions(len(samples), config.local.batch_size, epochs, steps, generator):
            if len(positions) == 1 and self._uses_batch_statistics():
                continue  # those of one sample are undefined
            images, labels = samples.take(positions)
            if config.data.augmentation != "none":
                draws = draw_augmentation(len(positions), config.data.augmentation, augment_generator)
                # Outside the image is black, as where published code pads before it normalises.
                images = augment(images, config.data.augmentation, draws, fill=black)
            if self.module.noise_shapes:
                self.model.noise = {
                    site: torch.rand(len(positions), *shape, generator=noise_generator).to(images.device)
                    for site, shape in self.module.noise_shapes.items()
                }
            yield Batch(images, labels)

    def _uses_batch_statistics(self) -> bool:
        return any(layer.training for layer in self._batchnorm_layers)

    @torch.no_grad()
    def scores(self, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """The method's scores for uint8 images [N, C, H, W], in batches, with the weights now in the module."""
        self.module.eval()
        return torch.cat(
            [
                self.experiment.method.predict(self.model, batch, server, classes).cpu()
                for batch in self._evaluation_batches(images)
            ]
        )

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features [N, d] of uint8 images, in evaluation mode."""
        self.module.eval()
        return torch.cat([self.module.features(batch) for batch in self._evaluation_batches(images)])

    def _evaluation_batches(self, images: Tensor) -> Iterator[Tensor]:
        meta, device = self.experiment.dataset.meta, self.experiment.config.engine.device
        for batch in torch.split(images, self.experiment.config.evaluation.batch_size):
            yield normalise(batch.to(device), meta.mean, meta.std)


class _ClientSamples:
    """A client's training samples on the device: normalised once, unless that would take too much memory.

    Normalising is element-wise, so when it is done changes no bit.
    """

    _MOST_BYTES = 256 * 2**20

    def __init__(self, experiment: Experiment, client: int) -> None:
        self._meta, self._device = experiment.dataset.meta, experiment.config.engine.device
        self._indices = experiment.trainers[client]
        self._images, labels = experiment.dataset.train.images, experiment.dataset.train.labels
        self._labels = labels.index_select(0, self._indices).to(self._device)
        size = 4 * len(self._indices) * math.prod(self._meta.shape)
        self._normalised = self._load(self._indices) if size <= self._MOST_BYTES else None

    def _load(self, indices: Tensor) -> Tensor:
        images = self._images.index_select(0, indices).to(self._device)
        return normalise(images, self._meta.mean, self._meta.std)

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels at positions [B] of the client's data."""
        here = positions.to(self._device)
        labels = self._labels.index_select(0, here)
        if self._normalised is None:
            return self._load(self._indices.index_select(0, positions)), labels
        return self._normalised.index_select(0, here), labels


class _Trained:
    """A client after local training, for :meth:`Method.reply`."""

    def __init__(self, worker: Worker, client: int) -> None:
        self._worker = worker
        self._indices = worker.experiment.trainers[client]
        self.weights = extract_weights(worker.module)
        self.num_samples = len(self._indices)

    def features(self) -> tuple[Tensor, Tensor]:
        split = self._worker.experiment.dataset.train
        return self._worker.features(split.images[self._indices]).cpu(), split.labels[self._indices]


def _check_finite(losses: Mapping[str, float], held: Record, round_number: int, client: int) -> None:
    """Stop before anything that is not a number is averaged or remembered."""
    arrays = (tensor for payload in held.values() for tensor in payload.arrays().values())
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in arrays if tensor.is_floating_point())
    if not finite or not all(math.isfinite(value) for value in losses.values()):
        terms = ", ".join(f"{name} {value:.3g}" for name, value in losses.items())
        raise RunError(
            f"round {round_number}, client {client}: training diverged (mean loss: {terms}); "
            "lower local.lr or the weight of the growing term"
        )


def batch_positions(
    size: int, batch_size: int, epochs: int, steps: int | None, generator: torch.Generator
) -> Iterator[Tensor]:
    """Positions of each mini-batch in a client's data: shuffled passes, the last batch of a pass may be smaller.

    With ``steps``, passes are chained and cut after so many batches.
    """
    if steps is None:
        for _ in range(epochs):
            yield from torch.split(torch.randperm(size, generator=generator), batch_size)
        return
    taken = 0
    while taken < steps:
        for positions in torch.split(torch.randperm(size, generator=generator), batch_size):
            yield positions
            taken += 1
            if taken == steps:
                return


def starting_weights(weights: Weights, memory: Record, experiment: Experiment) -> Weights:
    """Weights with a complete set of buffers: received, else private ones from memory, else the initial ones."""
    if weights.buffers:
        return weights
    if BATCHNORM in memory:
        return Weights(weights.params, payload_of(Weights, memory, BATCHNORM).buffers)
    return Weights(weights.params, experiment.setting.initial.buffers)


def outgoing(message: Record, experiment: Experiment) -> dict[str, Payload]:
    """A message as it leaves: BatchNorm statistics of the model stay at home unless the policy aggregates them."""
    if experiment.batchnorm == "aggregate":
        return dict(message)
    return {
        name: payload.without_buffers() if name == "model" and isinstance(payload, Weights) else payload
        for name, payload in message.items()
    }


def _cost(message: Record, experiment: Experiment) -> dict[str, Size]:
    """Cost by kind; nothing where the only trainer stands at the server."""
    return {} if experiment.method.data_scope == "union" else measure(message)
