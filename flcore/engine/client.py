"""A client's turn: receive, train, answer. A :class:`Worker` does it for one client, or for a stack of them.

All state comes in and goes out as records, so that nothing of one client can reach the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flcore.data.images import normalise
from flcore.engine.local.serial import Outcome, SerialTrainer, Trainer
from flcore.engine.local.stacked import StackedTrainer
from flcore.errors import RunError
from flcore.experiment import Experiment
from flcore.messages import Payload, Prototypes, Size, Weights
from flcore.methods.vocabulary import (
    BATCHNORM,
    MODEL,
    PRIVATE,
    Exchange,
    Leg,
    LocalModel,
    Predict,
    Turn,
    with_statistics,
)
from flcore.models import load_weights
from flcore.models.view import ModuleView
from flcore.records import Payloads, Record, measure, on_device

Memories = Callable[[int], Record]


@dataclass(frozen=True)
class Reply:
    """What the server learns of one client's turn, and what it cost.

    Attributes:
        message: what goes up.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        remembers: whether the client keeps a memory for its next turn.
        down: cost of the received message by kind. up: of the reply.
    """

    message: Record
    losses: Mapping[str, float]
    steps: int
    remembers: bool
    down: Mapping[str, Size]
    up: Mapping[str, Size]


@dataclass(frozen=True)
class Failure:
    """A client that could not finish its turn; ``cause`` is for people. It received its message all the same."""

    cause: str
    down: Mapping[str, Size]


@dataclass(frozen=True)
class Place:
    """Where a run is: the round under way (1-based) and the leg of it (0-based)."""

    round: int
    leg: int


class Worker:
    """Trains clients in this process, on one intra-op thread, and evaluates models."""

    def __init__(self, experiment: Experiment) -> None:
        """Build the modules; the experiment's data are used in place."""
        self.experiment = experiment
        serial = SerialTrainer(experiment)
        self._trainer: Trainer = StackedTrainer(experiment) if experiment.stacked else serial
        self.module = serial.module
        self._server: tuple[Record, Record] = (Record(), Record())
        self.model: LocalModel = ModuleView(
            self.module, experiment.setting.network, dict(self.module.named_parameters())
        )

    def train(
        self, place: Place, clients: Sequence[int], server: Record, memories: Memories
    ) -> dict[int, tuple[Reply, Record] | Failure]:
        """One leg's turns of a stack of clients: per client the reply and what it remembers, or why it failed.

        Args:
            place: the round and leg.
            clients: ids; more than one only where clients are stacked.
            server: what the server holds at the start of the leg.
            memories: client id to what it kept; empty at its first turn.
        """
        experiment, method = self.experiment, self.experiment.method
        if server is not self._server[0]:
            # Once per leg, so that clients share the very tensors of a broadcast: what is shared is not stacked.
            self._server = (server, on_device(server, experiment.config.engine.device))
        server = self._server[1]
        legs = method.legs(place.round, experiment.setting)
        leg = legs[place.leg]
        turns = [self.receive(place.round, leg, client, server, memories(client)) for client in clients]
        starts = [turn.with_statistics(method.begin(turn)) for turn in turns]
        before = sum(len(earlier.phases) for earlier in legs[: place.leg])
        outcomes = self._trainer.train(turns, starts, leg.phases, before)
        answers = zip(turns, outcomes, strict=True)
        return {turn.client: self._answer(turn, outcome, trained=bool(leg.phases)) for turn, outcome in answers}

    def receive(self, round_number: int, leg: Leg, client: int, server: Record, memory: Record) -> Turn:
        """A client's turn, with the message it is sent."""
        experiment = self.experiment
        device = experiment.config.engine.device
        exchange = Exchange(experiment.setting, round_number, leg.name)
        inbox = outgoing(experiment.method.broadcast(server, client, exchange), experiment)
        return Turn(
            setting=experiment.setting,
            round=round_number,
            leg=leg.name,
            client=client,
            counts=experiment.label_counts(client, round_number),
            inbox=on_device(inbox, device),
            memory=on_device(memory, device),
            task=experiment.task(round_number),
            stretch=experiment.stream.stretch(round_number),
            task_counts=experiment.task_counts(client),
        )

    def _answer(self, turn: Turn, outcome: Outcome, *, trained: bool) -> tuple[Reply, Record] | Failure:
        experiment = self.experiment
        down = _cost(turn.inbox, experiment)
        cause = _not_finite(outcome)
        if cause is not None:
            return Failure(cause, down)
        message, kept = experiment.method.reply(turn, _Trained(self, turn, outcome))
        own = kept.get(MODEL)
        keeps_statistics = isinstance(own, Weights) and bool(own.buffers)
        if experiment.batchnorm == "local" and outcome.weights.buffers and not keeps_statistics:
            kept = {**kept, BATCHNORM: Weights({}, outcome.weights.buffers)}
        if experiment.keeps_private_models:
            kept = {**kept, **_private_model(kept, turn.memory, outcome.weights if trained else None)}
        message, kept = on_device(outgoing(message, experiment), "cpu"), on_device(kept, "cpu")
        for name, payload in (*kept.items(), *message.items()):
            if not _finite(payload):
                return Failure(f"its {name} holds values that are not finite", down)
        reply = Reply(message, outcome.losses, outcome.steps, bool(kept), down, _cost(message, experiment))
        return reply, kept

    @torch.no_grad()
    def scores(self, images: Tensor, server: Record, classes: Tensor | None, predict: Predict | None = None) -> Tensor:
        """The method's scores for uint8 images [N, C, H, W], in batches, with the weights now in the module."""
        self.module.eval()
        answer = predict or self.experiment.method.predict
        return torch.cat(
            [answer(self.model, batch, server, classes).cpu() for batch in self._evaluation_batches(images)]
        )

    @torch.no_grad()
    def over_images(self, images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of normalised images, in evaluation mode and in batches, over uint8 images [N, C, H, W]."""
        self.module.eval()
        return torch.cat([function(batch) for batch in self._evaluation_batches(images)])

    def _evaluation_batches(self, images: Tensor) -> Iterator[Tensor]:
        meta, device = self.experiment.dataset.meta, self.experiment.config.engine.device
        for batch in torch.split(images, self.experiment.config.evaluation.batch_size):
            yield normalise(batch.to(device), meta.mean, meta.std)


class _Trained:
    """A client after local training, for :meth:`Method.reply`."""

    def __init__(self, worker: Worker, turn: Turn, outcome: Outcome) -> None:
        self._worker, self._outcome = worker, outcome
        self._indices = worker.experiment.training_indices(turn.client, turn.round)
        self.weights, self.steps = outcome.weights, outcome.steps
        self.num_samples = len(self._indices)

    def features(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        return self._over_samples(self._worker.model.features, weights)

    def encoded(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        return self._over_samples(self._worker.model.encode, weights)

    def drawn_labels(self) -> Tensor:
        return self._outcome.drawn

    def noted_means(self) -> Prototypes:
        setting = self._worker.experiment.setting
        if self._outcome.noted is None:
            return Prototypes.empty(setting.num_classes, setting.feature_dim)
        sums, counts = (total.cpu() for total in self._outcome.noted)
        return Prototypes((sums / counts.clamp_min(1).unsqueeze(1)).float(), counts > 0)

    def _over_samples(self, part: Callable[[Tensor], Tensor], weights: Weights | None) -> tuple[Tensor, Tensor]:
        worker = self._worker
        chosen = self.weights if weights is None else with_statistics(weights, {}, worker.experiment.setting)
        load_weights(worker.module, chosen)
        split = worker.experiment.dataset.train
        values = worker.over_images(split.images[self._indices], part).cpu()
        return values, split.labels[self._indices]


def private_model(memory: Record) -> Weights | None:
    """A client's model as its last local training left it; None before its first."""
    return memory.get(PRIVATE) or memory.get(MODEL)


def _private_model(kept: Payloads, memory: Record, trained: Weights | None) -> dict[str, Payload]:
    """What to remember for :func:`private_model`: nothing where the method keeps that model itself."""
    if trained is None:
        return {PRIVATE: memory[PRIVATE]} if PRIVATE in memory else {}
    return {} if kept.get(MODEL) is trained else {PRIVATE: trained}


def _not_finite(outcome: Outcome) -> str | None:
    """Why a client must be stopped before anything that is not a number is averaged or remembered."""
    if _finite(outcome.weights) and all(math.isfinite(value) for value in outcome.losses.values()):
        return None
    terms = ", ".join(f"{name} {value:.3g}" for name, value in outcome.losses.items())
    return f"training diverged (mean loss: {terms}); lower local.lr or the weight of the growing term"


def _finite(payload: Payload) -> bool:
    tensors = payload.arrays().values()
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point())


def failed(place: Place, client: int, cause: str) -> RunError:
    """The error that stops a run for one client."""
    return RunError(f"round {place.round}, client {client}: {cause}")


def outgoing(message: Payloads, experiment: Experiment) -> Record:
    """A message as it leaves: BatchNorm statistics of the model stay at home unless the policy aggregates them."""
    if experiment.batchnorm == "aggregate":
        return Record(message)
    return Record(
        {
            name: payload.without_buffers() if name == MODEL and isinstance(payload, Weights) else payload
            for name, payload in message.items()
        }
    )


def download(server: Record, client: int, experiment: Experiment, place: Place) -> dict[str, Size]:
    """What a client's broadcast costs, whether or not it ever answers."""
    leg = experiment.method.legs(place.round, experiment.setting)[place.leg]
    exchange = Exchange(experiment.setting, place.round, leg.name)
    return _cost(outgoing(experiment.method.broadcast(server, client, exchange), experiment), experiment)


def _cost(message: Record, experiment: Experiment) -> dict[str, Size]:
    """Cost by kind; nothing where the only trainer stands at the server."""
    return {} if experiment.method.data_scope == "union" else measure(message)
