"""The words that methods and the engine share: what is known to whom, when, and what travels.

A round is one *exchange*, or several: clients receive, train and answer, then the server's *stages* work on the
answers. What the clients of the next exchange receive is what those stages left. Nearly every method has one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from flcore.aggregation.settings import Aggregation
from flcore.core.rng import numpy_stream, torch_stream
from flcore.io.messages import Count, Payload, Prototypes, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.methods.kit.updates import Batch as Batch  # with what follows, words of a step that belong to these
from flcore.methods.kit.updates import LocalModel as LocalModel
from flcore.methods.kit.updates import Loss as Loss
from flcore.methods.kit.updates import LossInputs as LossInputs
from flcore.methods.kit.updates import Perturb as Perturb
from flcore.methods.kit.updates import StepSpec as StepSpec
from flcore.models.network import Network

MODEL = Key("model", Weights)
"""The model: at the server the global one, in a message the one that travels, in a memory the client's own."""

NUM_SAMPLES = Key("num_samples", Count)
"""n_k, the training samples behind a reply."""

PROTOTYPES = Key("prototypes", Prototypes)
"""One vector per class."""

BATCHNORM = Key("batchnorm", Weights)
"""A client's private BatchNorm statistics in its memory (policy ``local``); the engine's, not a method's."""

PRIVATE = Key("private_model", Weights)
"""A client's model as its own training left it, in its memory; for scoring alone, and the engine's likewise."""

Metrics = Mapping[str, float]
"""Figures that a server stage measured on its way (a loss, a distance, a number of clusters), by name.

They go into the history's record of the round in which the stage ran, and nowhere else.
"""

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True)
class FederationContext:
    """What every party knows before the first round.

    Attributes:
        seed: the run's seed; streams are derived from it.
        num_clients: K.
        num_classes: C.
        feature_dim: d, the length of the model's features.
        rounds: R, for schedules that need it.
        batch_size: B, of local training.
        image_shape: (channels, height, width).
        pixel_mean: per channel, on the scale 0 to 1; models read (pixel - mean) / std. pixel_std: likewise.
        initial: the initial weights, the same for every party; in a client's turn on ``device``.
        network: the model's parts as functions of weights, in evaluation mode; for work on the server.
        device: where heavy work belongs; records that a stage is given lie on the CPU.
        aggregation: how the server folds weights and prototypes.
        cohort_size: m, the clients that a round asks, whoever of them answers.
    """

    seed: int
    num_clients: int
    num_classes: int
    feature_dim: int
    rounds: int
    batch_size: int
    image_shape: tuple[int, int, int]
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    initial: Weights
    network: Network
    device: str = "cpu"
    aggregation: Aggregation = field(default_factory=Aggregation)
    cohort_size: int = 1


@dataclass(frozen=True)
class RoundContext:
    """One exchange of one round, as everybody knows it.

    Attributes:
        setting: common knowledge.
        round: 1-based.
        leg: name of the exchange.
        is_later_leg: whether the round has another exchange before it. Its streams are its own: noise that is drawn for
        one
            purpose in two exchanges must not be the same.
    """

    setting: FederationContext
    round: int
    exchange: str = "train-clients"
    is_later_leg: bool = False

    @property
    def rounds_done(self) -> int:
        """Rounds before this one: the papers' t, which counts from 0."""
        return self.round - 1

    def stream(self, purpose: str, *keys: int) -> torch.Generator:
        """A torch generator of this round's and leg's own, for one purpose of the method."""
        return torch_stream(self.setting.seed, self._of_leg(purpose), self.round, *keys)

    def numpy_stream(self, purpose: str, *keys: int) -> np.random.Generator:
        return numpy_stream(self.setting.seed, self._of_leg(purpose), self.round, *keys)

    def _of_leg(self, purpose: str) -> str:
        return f"{purpose}, {self.exchange}" if self.is_later_leg else purpose


@dataclass(frozen=True)
class ClientContext(RoundContext):
    """One client's part in one exchange of a round: all that its method may look at. Its streams are the client's own.

    Attributes:
        client: id of the client.
        class_counts: int64 [C], its training samples per class in this round.
        received: the message it received.
        client_state: what it kept from its last turn; empty at the first.
        task: 0-based task of the stream that it meets in this round; None where data do not change.
        task_visit: which stretch of rounds on one task this is, from 0: each round is one under a cyclic schedule, each
            task under a blocked one; 0 throughout where data do not change.
        task_counts: int64 [T, C], its training samples per task of the whole stream and class; one row, that of
            ``counts``, where data do not change.
        learning_rate: of local training in this round. momentum: of its SGD.
        steps_per_pass: mini-batches that one pass over the data has in the phase under way, those that BatchNorm skips
            left out; for :meth:`flcore.methods.api.Method.random_inputs`, 0 elsewhere.
    """

    client: int = 0
    class_counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    received: Record = field(default_factory=Record)
    client_state: Record = field(default_factory=Record)
    task: int | None = None
    task_visit: int = 0
    task_counts: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    learning_rate: float = 0.0
    momentum: float = 0.0
    steps_per_pass: int = 0

    def stream(self, purpose: str, *keys: int) -> torch.Generator:
        """A torch generator of this client's own in this exchange, for one purpose of the method."""
        return super().stream(purpose, self.client, *keys)

    def numpy_stream(self, purpose: str, *keys: int) -> np.random.Generator:
        return super().numpy_stream(purpose, self.client, *keys)

    def with_statistics(self, weights: Weights) -> Weights:
        """Received or remembered weights as this client evaluates them: :func:`with_statistics`."""
        return with_statistics(weights, self.client_state, self.setting)


def with_statistics(weights: Weights, client_state: Payloads, setting: FederationContext) -> Weights:
    """Weights with a complete set of buffers: their own, else a client's private ones, else the initial ones.

    Under ``model.batchnorm: local`` and ``frozen`` no BatchNorm statistics travel.

    Args:
        weights: with all buffers or none.
        client_state: the client's; empty for none.
        setting: has the initial weights.
    """
    if weights.buffers:
        return weights
    own = Record(client_state).get(BATCHNORM, setting.initial)
    device = next(iter(weights.params.values())).device
    return Weights(weights.params, {name: tensor.to(device) for name, tensor in own.buffers.items()})


class Replies(Mapping[int, Record]):
    """The messages of an exchange by client id, ascending."""

    def __init__(self, messages: Mapping[int, Payloads]) -> None:
        self._messages = {client: _as_record(messages[client]) for client in sorted(messages)}

    def __getitem__(self, client: int) -> Record:
        """A client's message."""
        return self._messages[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def of(self, slot: Key[P]) -> dict[int, P]:
        """One payload of every client that sent it, in order of ids."""
        return {client: message[slot] for client, message in self._messages.items() if slot in message}


def _as_record(message: Payloads) -> Record:
    return message if isinstance(message, Record) else Record(message)


ServerStep = Callable[[Record, Replies, RoundContext], tuple[Payloads, Metrics]]
"""Server's work on replies: (what the server holds, messages, exchange) → (what it holds then, facts)."""

Kind = Literal["weights", "prototypes"]
"""What the section ``aggregation`` speaks of: models that clients send, or one vector per class."""

S = TypeVar("S", bound=Callable[..., tuple[Payloads, Metrics]])


def folds(kind: Kind) -> Callable[[S], S]:
    """Mark a stage that folds what clients send of this kind as the section ``aggregation`` says.

    The mark is what a configuration is checked against: a rule that no stage of a method would follow is refused.
    """

    def mark(stage: S) -> S:
        stage.folds = kind  # type: ignore[attr-defined]  # a function's own namespace
        return stage

    return mark


Predict = Callable[[LocalModel, Tensor, Record, Tensor | None], Tensor]
"""(model, images, known, classes) → scores, see :meth:`flcore.methods.api.Method.predict`."""


@dataclass(frozen=True)
class Phase:
    """A stretch of local training with its own trainable part and a fresh optimiser.

    Attributes:
        trainable: prefixes of parameter names that move (``head.``); the rest is frozen, BatchNorm statistics included.
        epochs: passes over the client's data; ``steps``: mini-batches instead. Both None: as configured in ``local``.
        source: batches of what: None for the client's images, else the name of a context entry ``{"inputs": [n, ...],
            "labels": [n]}``, such as pseudo-features.
        loss: of this phase; None for :meth:`flcore.methods.api.Method.loss`.
        updates: what a step is, one after the other on the same mini-batch; their terms have names of their own.
        note: the mini-batches whose features, as the loss of the first update notes them while the weights move, are
            averaged by class for :meth:`TrainedClient.noted_means`: of all, or of the last ones, as many as a pass over
            the data has; or for :meth:`TrainedClient.noted_passes` of each pass by itself.
    """

    trainable: tuple[str, ...] = ("",)
    epochs: int | None = None
    steps: int | None = None
    source: str | None = None
    loss: Loss | None = None
    updates: tuple[StepSpec, ...] = (StepSpec(),)
    note: Literal["none", "all", "last_pass", "passes"] = "none"


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round.

    Attributes:
        name: of the clients' work, as an orchestrator shows it.
        participants: the round's cohort, or all clients.
        phases: of local training; empty where clients only answer.
        server_steps: names of the server stages (of :meth:`flcore.methods.api.Method.server_steps`) that follow, in
        order; None:
            all of them.
    """

    name: str = "train-clients"
    participants: Literal["cohort", "all"] = "cohort"
    phases: tuple[Phase, ...] = (Phase(),)
    server_steps: tuple[str, ...] | None = None


class TrainedClient(Protocol):
    """A client after its local training, as :meth:`flcore.methods.api.Method.reply` sees it.

    Tensors lie on the setting's device; a message or memory may hold them as they are.
    """

    @property
    def weights(self) -> Weights:
        """The trained model with its buffers."""

    @property
    def num_samples(self) -> int:
        """n_k, the number of training samples."""

    @property
    def steps(self) -> int:
        """Mini-batches trained on in this exchange."""

    def images(self, rows: int) -> Iterator[Tensor]:
        """All training images, in blocks of ``rows``: normalised [rows, C, H, W], without augmentation."""

    def labels(self) -> Tensor:
        """int64 [n], of all training samples, in the order of :meth:`images`."""

    def features(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """Features [n, d] and labels [n] of all training samples: evaluation mode, no augmentation, no gradient.

        With ``weights`` those of another model.
        """

    def encoded(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """What the projection reads [n, e] and labels [n], likewise."""

    def drawn_labels(self) -> Tensor:
        """int64 [C], how often a sample of each class was in a mini-batch of this exchange."""

    def noted_means(self) -> Prototypes:
        """Per class the mean feature of the mini-batches that the leg's phases note, as computed in training.

        Every appearance of a sample counts. Empty if no phase notes anything.
        """

    def noted_passes(self) -> tuple[Tensor, Tensor]:
        """Per pass of the phase that notes passes, and class, the mean over mini-batches of the class's mean feature.

        Returns:
            float32 [P, C, d], and bool [P, C]: whether any mini-batch of the pass had the class; others have zeros and
            do not count in the mean. P is 0 without a step.
        """
