"""Types that methods and the engine share: contexts, messages, phases and exchanges.

A round has one *exchange* or several. In an exchange clients receive a message, train and reply; then the *server
steps* process the replies. The next exchange broadcasts the server state that they return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from flcore.aggregation.settings import Aggregation
from flcore.core.optim import Optimizer
from flcore.core.rng import numpy_stream, torch_stream
from flcore.io.messages import Count, Prototypes, Weights
from flcore.io.records import Key, P, Payloads, Record
from flcore.models.network import Network, View

MODEL = Key("model", Weights)
"""The model: the global one at the server, the transmitted one in a message, the client's own in client state."""

NUM_SAMPLES = Key("num_samples", Count)
"""n_k, the number of training samples of a reply."""

PROTOTYPES = Key("prototypes", Prototypes)
"""One vector per class."""

BATCHNORM = Key("batchnorm", Weights)
"""A client's private BatchNorm statistics, in its state (policy ``local``). The engine sets it, not a method."""

PRIVATE = Key("private_model", Weights)
"""A client's locally trained model, in its state, for scoring alone. The engine sets it, not a method."""

Metrics = Mapping[str, float]
"""Metrics of a server step by name (a loss, a distance, a number of clusters).

They are written to the history's record of that round only.
"""


@dataclass(frozen=True)
class FederationContext:
    """Constants of the federation, known to all parties.

    Attributes:
        seed: the run's seed; streams are derived from it.
        num_clients: K.
        num_classes: C.
        feature_dim: d, the length of the model's features.
        rounds: R, for schedules that need it.
        batch_size: B, of local training.
        image_shape: (channels, height, width).
        pixel_mean: per channel, on the scale 0 to 1; models read (pixel - mean) / std.
        pixel_std: likewise.
        initial: the initial weights, equal for all parties; on ``device`` in client functions.
        network: the model's parts as functions of weights, in evaluation mode; for work on the server.
        device: device for heavy work; a server step receives its records on the CPU.
        aggregation: rule by which the server aggregates weights and prototypes.
        cohort_size: m, the clients sampled in a round, before any drop out.
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
    """One exchange of one round, as all parties know it.

    Attributes:
        setting: constants of the federation.
        round: 1-based.
        exchange: name of the exchange.
        is_later_leg: whether the round has an earlier exchange. The name then enters the streams' keys.
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
        """Return a torch generator of this exchange for one purpose of the method."""
        return torch_stream(self.setting.seed, self._of_leg(purpose), self.round, *keys)

    def numpy_stream(self, purpose: str, *keys: int) -> np.random.Generator:
        return numpy_stream(self.setting.seed, self._of_leg(purpose), self.round, *keys)

    def _of_leg(self, purpose: str) -> str:
        return f"{purpose}, {self.exchange}" if self.is_later_leg else purpose


@dataclass(frozen=True)
class ClientContext(RoundContext):
    """One client in one exchange of a round: everything that its method may read. Its streams are the client's own.

    Attributes:
        client: id of the client.
        class_counts: int64 [C], its training samples per class in this round.
        received: the message it received.
        client_state: its state from its last exchange; empty at the first.
        task: 0-based task of this round; None without a task stream.
        task_visit: 0-based number of the visit to a task: of the round in a cyclic schedule, of the task in a blocked
            one.
        task_counts: int64 [T, C], its training samples per task and class of the whole stream.
        learning_rate: of local training in this round.
        momentum: of its SGD.
        steps_per_pass: mini-batches per pass over the data in the current phase, without those that BatchNorm skips;
            set for :meth:`flcore.methods.api.Method.random_inputs`, else 0.
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
        """Return a torch generator of this client and exchange for one purpose of the method."""
        return super().stream(purpose, self.client, *keys)

    def numpy_stream(self, purpose: str, *keys: int) -> np.random.Generator:
        return super().numpy_stream(purpose, self.client, *keys)

    def with_statistics(self, weights: Weights) -> Weights:
        return with_statistics(weights, self.client_state, self.setting)


def with_statistics(weights: Weights, client_state: Payloads, setting: FederationContext) -> Weights:
    """Return weights with a complete set of buffers: their own, else a client's private ones, else the initial ones.

    Under ``model.batchnorm: local`` and ``frozen`` no BatchNorm statistics travel. ``weights`` have all buffers or
    none.
    """
    if weights.buffers:
        return weights
    own = Record(client_state).get(BATCHNORM, setting.initial)
    device = next(iter(weights.params.values())).device
    return Weights(weights.params, {name: tensor.to(device) for name, tensor in own.buffers.items()})


class Replies(Mapping[int, Record]):
    """Messages of an exchange by client id, ascending."""

    def __init__(self, messages: Mapping[int, Payloads]) -> None:
        self._messages = {client: _as_record(messages[client]) for client in sorted(messages)}

    def __getitem__(self, client: int) -> Record:
        """Return a client's message."""
        return self._messages[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def of(self, slot: Key[P]) -> dict[int, P]:
        """Return one payload of every client that sent it, in order of ids."""
        return {client: message[slot] for client, message in self._messages.items() if slot in message}


def _as_record(message: Payloads) -> Record:
    return message if isinstance(message, Record) else Record(message)


ServerStep = Callable[[Record, Replies, RoundContext], tuple[Payloads, Metrics]]
"""Server step: (server state, replies, round context) → (new server state, metrics)."""

Kind = Literal["weights", "prototypes"]
"""Kinds of payloads that section ``aggregation`` covers: models, or one vector per class."""

S = TypeVar("S", bound=Callable[..., tuple[Payloads, Metrics]])


def aggregates(kind: Kind) -> Callable[[S], S]:
    """Mark a server step that aggregates payloads of this kind by the rule of section ``aggregation``."""

    def mark(step: S) -> S:
        step.aggregates = kind  # type: ignore[attr-defined]  # a function's own namespace
        return step

    return mark


LossInputs = Mapping[str, Any]
"""Constants of a loss: tensors, mappings of tensors, or numbers that all clients of an exchange share."""

LocalModel = View
"""The model as a loss reads it."""


@dataclass(frozen=True)
class Batch:
    """Input of the loss of one step.

    Attributes:
        images: normalised, [B, C, H, W]; in a phase with a ``source`` its inputs, such as pseudo-features [B, d].
        labels: int64 [B].
        weight: float [B], 1 for a sample, 0 for padding; None without padding.
        random_inputs: the step's random numbers, from :meth:`flcore.methods.api.Method.random_inputs`.
        per_sample: [B, ...] each. Rows of :meth:`flcore.methods.api.Method.per_sample_inputs`, and outputs of
            :meth:`flcore.methods.api.Method.teachers`; the loss computes teacher outputs that are missing.
    """

    images: Tensor
    labels: Tensor
    weight: Tensor | None = None
    random_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LocalModel, Batch, LossInputs], dict[str, Tensor]]

Perturb = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""(trained parameters, their gradient) → the point at which to take the gradient of the update: pure, for one
client, by name."""


@dataclass(frozen=True)
class StepSpec:
    """One update of weights within a step: a gradient on the step's mini-batch, and an optimiser.

    Attributes:
        loss: loss to differentiate; None for the phase's.
        trainable: prefixes of the parameters to update, among the phase's.
        optimizer: factory of the phase's optimiser for this update; None: as configured in ``local``.
        perturb: None: the gradient is taken at the weights. Else that gradient goes to it, and a second one, at the
            point it returns, to the optimiser. The first leaves no terms, recorded features or running statistics.
    """

    loss: Loss | None = None
    trainable: tuple[str, ...] = ("",)
    optimizer: Callable[[], Optimizer] | None = None
    perturb: Perturb | None = None


Predict = Callable[[LocalModel, Tensor, Record, Tensor | None], Tensor]
"""(model, images, known, classes) → scores, see :meth:`flcore.methods.api.Method.predict`."""


@dataclass(frozen=True)
class Phase:
    """A phase of local training with its own trainable parameters and a fresh optimiser.

    Attributes:
        trainable: prefixes of the trained parameters' names (``head.``); all others are frozen, as are their BatchNorm
            statistics.
        epochs: passes over the client's data; None, with ``steps`` None too: as configured in ``local``.
        steps: mini-batches, in place of ``epochs``.
        source: samples of the phase: None for the client's images, else the name of a loss input ``{"inputs": [n, ...],
            "labels": [n]}``, such as pseudo-features.
        loss: of this phase; None for :meth:`flcore.methods.api.Method.loss`.
        updates: updates of a step, in order, on the same mini-batch; names of their terms must differ.
        record_features: mini-batches for means by class of the features recorded in the first update's loss:
            ``all`` or those of the ``last_pass`` for :meth:`TrainedClient.recorded_means`, ``passes`` for
            :meth:`TrainedClient.recorded_passes`.
    """

    trainable: tuple[str, ...] = ("",)
    epochs: int | None = None
    steps: int | None = None
    source: str | None = None
    loss: Loss | None = None
    updates: tuple[StepSpec, ...] = (StepSpec(),)
    record_features: Literal["none", "all", "last_pass", "passes"] = "none"


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round.

    Attributes:
        name: of the clients' work, as an orchestrator shows it.
        participants: the round's cohort, or all clients.
        phases: of local training; empty if clients only reply.
        server_steps: names in :meth:`flcore.methods.api.Method.server_steps` of the steps that follow, in order; None:
            all.
    """

    name: str = "train-clients"
    participants: Literal["cohort", "all"] = "cohort"
    phases: tuple[Phase, ...] = (Phase(),)
    server_steps: tuple[str, ...] | None = None


class TrainedClient(Protocol):
    """A client after its local training, as :meth:`flcore.methods.api.Method.reply` sees it.

    Tensors are on the setting's device.
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
        """Yield all training images in blocks of ``rows``: normalised [rows, C, H, W], without augmentation."""

    def labels(self) -> Tensor:
        """Return the labels int64 [n] of all training samples, in the order of :meth:`images`."""

    def features(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """Return features [n, d] and labels [n] of all training samples, by the trained model or by ``weights``.

        They are computed in evaluation mode, without augmentation.
        """

    def encoded(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """Return the projection's inputs [n, e] and labels [n], computed like :meth:`features`."""

    def drawn_labels(self) -> Tensor:
        """Return int64 [C], how often a sample of each class was in a mini-batch of this exchange."""

    def recorded_means(self) -> Prototypes:
        """Return the mean recorded feature per class; every appearance of a sample counts."""

    def recorded_passes(self) -> tuple[Tensor, Tensor]:
        """Return, per recorded pass and class, the mean over mini-batches of the class's mean feature.

        Shapes: float32 [P, C, d], zero for absent classes, and bool [P, C], classes in any mini-batch of the pass.
        """
