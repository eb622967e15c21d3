"""What a method answers; the loop that asks is in `flcore/engine`, the tools that watch are in `pipelines`.

A method is a frozen dataclass of hyper-parameters with a few pure functions. It holds no state: the server's and the
clients' are records (`flcore/messages.py`) that go in and come out. Everything random comes from a stream that is
handed in, or from ``seed`` with the round and client.

A round is one *leg*, or several: clients receive, train and answer, then the server's stages work on the answers. What
the clients of the next leg receive is what those stages left. Nearly every method has one leg.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from flcore.losses.basic import cross_entropy
from flcore.messages import Prototypes, Weights
from flcore.models.network import Network, Values
from flcore.records import Record, payload_of
from flcore.rng import torch_stream

Context = Mapping[str, Any]
"""Constants of a loss: tensors, mappings of tensors, or plain numbers that are the same for every client of a leg."""

Stage = Callable[[Record, Mapping[int, Record], "Setting", int], Record]

Predict = Callable[["LocalModel", Tensor, Record, Tensor | None], Tensor]
"""(model, images, server, classes) → scores, see :meth:`Method.predict`."""

BATCHNORM = "batchnorm"
"""Name of a client's private BatchNorm statistics in its memory (policy ``local``); the engine's, not a method's."""


@dataclass(frozen=True)
class Setting:
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
        initial: the initial weights, the same for every party.
        network: the model's parts as functions of weights, in evaluation mode; for work on the server.
        device: where heavy work belongs; records that a stage is given lie on the CPU.
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


@dataclass(frozen=True)
class Turn:
    """One client's part in one leg of a round: all that its method may look at.

    Attributes:
        setting: common knowledge.
        round: 1-based.
        leg: name of the leg.
        client: id of the client.
        counts: int64 [C], its training samples per class in this round.
        inbox: the message it received.
        memory: what it kept from its last turn; empty at the first.
        task: 0-based task of the stream that it meets in this round; None where data do not change.
        stage: which stretch of rounds on one task this is, from 0: each round is one under a cyclic schedule, each task
            under a blocked one; 0 throughout where data do not change.
        task_counts: int64 [T, C], its training samples per task of the whole stream and class; one row, that of
            ``counts``, where data do not change.
    """

    setting: Setting
    round: int
    leg: str
    client: int
    counts: Tensor
    inbox: Record
    memory: Record
    task: int | None = None
    stage: int = 0
    task_counts: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))

    def stream(self, purpose: str, *keys: int) -> torch.Generator:
        """A generator of this client's and round's own, for one purpose of the method."""
        return torch_stream(self.setting.seed, purpose, self.round, self.client, *keys)

    def with_statistics(self, weights: Weights) -> Weights:
        """Received or remembered weights as this client evaluates them: :func:`with_statistics`."""
        return with_statistics(weights, self.memory, self.setting)


def with_statistics(weights: Weights, memory: Record, setting: Setting) -> Weights:
    """Weights with a complete set of buffers: their own, else a client's private ones, else the initial ones.

    Under ``model.batchnorm: local`` and ``frozen`` no BatchNorm statistics travel.

    Args:
        weights: with all buffers or none.
        memory: the client's; empty for none.
        setting: has the initial weights.
    """
    if weights.buffers:
        return weights
    own = payload_of(Weights, memory, BATCHNORM) if BATCHNORM in memory else setting.initial
    device = next(iter(weights.params.values())).device
    return Weights(weights.params, {name: tensor.to(device) for name, tensor in own.buffers.items()})


@dataclass(frozen=True)
class Batch:
    """What the loss of one step sees.

    Attributes:
        images: normalised, [B, C, H, W]; in a phase with a ``source`` its inputs, such as pseudo-features [B, d].
        labels: int64 [B].
        weight: float [B], 1 for a sample, 0 for padding; None where nothing is padded.
        draws: the random numbers of the step, from :meth:`Method.draws`.
    """

    images: Tensor
    labels: Tensor
    weight: Tensor | None = None
    draws: Mapping[str, Tensor] = field(default_factory=dict)


class LocalModel(Protocol):
    """The model as a loss sees it; dropout noise of the step is inside. The same for one client or a stack of many.

    Every part takes other ``weights`` (parameters and buffers by name, constants of the context) to ask a frozen model
    instead, in evaluation mode; names that are not given are those of the initial model.

    Images may stand behind those of the batch in one call: they are not padding, and have no dropout. Other images
    alone go through :meth:`beside`.
    """

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by name."""

    def encode(self, images: Tensor, weights: Values | None = None) -> Tensor:
        """Images [B, C, H, W] to what the projection reads [B, e]; the features where there is no projection."""

    def project(self, encoded: Tensor, weights: Values | None = None) -> Tensor:
        """Encoded images [B, e] to features [B, d]."""

    def features(self, images: Tensor, weights: Values | None = None) -> Tensor:
        """Images [B, C, H, W] to features [B, d]."""

    def classify(self, features: Tensor, weights: Values | None = None) -> Tensor:
        """Features [B, d] to logits [B, K]."""

    def apply_extra(self, name: str, features: Tensor, weights: Values | None = None) -> Tensor:
        """Features [B, d] (or what the projection reads) through a layer of :meth:`Method.extra_layers`, no dropout."""

    def beside(self) -> LocalModel:
        """The same model in training for inputs that are not the batch's: none is padding; without dropout."""

    def note(self, features: Tensor) -> None:
        """Leave the batch's features [B, d] to be averaged by class where :attr:`Phase.note` says so; no gradient."""


Loss = Callable[[LocalModel, Batch, Context], dict[str, Tensor]]


@dataclass(frozen=True)
class Phase:
    """A stretch of local training with its own trainable part and a fresh optimiser.

    Attributes:
        trainable: prefixes of parameter names that move (``head.``); the rest is frozen, BatchNorm statistics included.
        epochs: passes over the client's data; ``steps``: mini-batches instead. Both None: as configured in ``local``.
        source: batches of what: None for the client's images, else the name of a context entry ``{"inputs": [n, ...],
            "labels": [n]}``, such as pseudo-features.
        loss: of this phase; None for :meth:`Method.loss`.
        note: the mini-batches whose features, as the loss notes them while the weights move, are averaged by class for
            :meth:`TrainedClient.noted_means`: of all, or of the last ones, as many as a pass over the data has.
    """

    trainable: tuple[str, ...] = ("",)
    epochs: int | None = None
    steps: int | None = None
    source: str | None = None
    loss: Loss | None = None
    note: Literal["none", "all", "last_pass"] = "none"


@dataclass(frozen=True)
class Leg:
    """One exchange of a round.

    Attributes:
        name: of the clients' work, as an orchestrator shows it.
        who: the sampled cohort, or all clients.
        phases: of local training; empty where clients only answer.
        stages: names of the server stages (of :meth:`Method.stages`) that follow, in order; None: all of them.
    """

    name: str = "train-clients"
    who: Literal["cohort", "all"] = "cohort"
    phases: tuple[Phase, ...] = (Phase(),)
    stages: tuple[str, ...] | None = None


class TrainedClient(Protocol):
    """A client after its local training, as :meth:`Method.reply` sees it."""

    @property
    def weights(self) -> Weights:
        """The trained model with its buffers."""

    @property
    def num_samples(self) -> int:
        """n_k, the number of training samples."""

    @property
    def steps(self) -> int:
        """Mini-batches trained on in this leg."""

    def features(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """Features [n, d] and labels [n] of all training samples: evaluation mode, no augmentation, no gradient.

        With ``weights`` those of another model.
        """

    def encoded(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """What the projection reads [n, e] and labels [n], likewise."""

    def drawn_labels(self) -> Tensor:
        """int64 [C], how often a sample of each class was in a mini-batch of this leg."""

    def noted_means(self) -> Prototypes:
        """Per class the mean feature of the mini-batches that the leg's phases note, as computed in training.

        Every appearance of a sample counts. Empty if no phase notes anything.
        """


class Method(ABC):
    """A federated method. Defaults describe a method without server, messages or memory; override what the paper says.

    Attributes:
        name: the registry's name.
        summary: one line.
        citation: authors, venue, year.
        trains: who trains in a round: the sampled cohort, or all clients (methods without communication).
        data_scope: what a trainer sees: its own data, or (the centralised reference) the union of all clients' data,
            which then stand at the server: nothing crosses the line and no bytes are counted.
        has_global_model: whether one model answers for everybody; else every client answers with its own.
        has_vote: without a global model, whether the final global score is the majority vote of all clients' models
            (baselines.md section 21); False leaves it undefined.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    trains: ClassVar[Literal["cohort", "all"]] = "cohort"
    data_scope: ClassVar[Literal["client", "union"]] = "client"
    has_global_model: ClassVar[bool] = True
    has_vote: ClassVar[bool] = False

    def num_outputs(self, num_classes: int) -> int:
        """Outputs of the model's head: one per class, and those of classes that only the method knows behind them."""
        return num_classes

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, nn.Module]:
        """Fresh layers beside the head, by name; they are a part of every model of the run.

        They read features [B, d], or what the projection reads, [B, ``encoded_dim``]. Their parameters are called
        ``extra.<name>.…``. They are made after everything else, whose initial weights are those of other methods.
        """
        return {}

    def start_server(self, setting: Setting) -> Record:
        """What the server holds before the first round."""
        return {}

    def legs(self, round_number: int, setting: Setting) -> tuple[Leg, ...]:
        """The exchanges of a round, in order."""
        return (Leg(who=self.trains, phases=self.phases()),)

    def phases(self) -> tuple[Phase, ...]:
        """The stretches of local training of a method with one leg, in order."""
        return (Phase(),)

    def broadcast(self, server: Record, client: int, setting: Setting) -> Record:
        """The message that goes down to a client."""
        return {}

    def begin(self, turn: Turn) -> Weights:
        """The weights from which a client's turn starts: those received, else those it kept."""
        return payload_of(Weights, turn.inbox, "model") if "model" in turn.inbox else own_model(turn)

    def context(self, turn: Turn) -> Context:
        """Constants of this turn's loss (anchors, prototypes, ...), of the same shapes for every client of a leg."""
        return {}

    def draws(self, turn: Turn, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Random numbers of the loss for all steps of a phase at once, each [steps, ...]."""
        return {}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The named terms whose sum is minimised: scalars, pure, shape-stable, no branch on a tensor's value.

        Here the cross-entropy alone.
        """
        logits = model.classify(model.features(batch.images))
        return {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}

    @abstractmethod
    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The message that goes up, and what the client remembers."""

    def stages(self) -> Mapping[str, Stage]:
        """The server's work on replies by name: (server, client id → message, setting, round) → server."""
        return {}

    def global_model(self, server: Record, setting: Setting) -> Weights | None:
        """The model that answers for everybody; None where there is none.

        What it lacks (upper layers that never leave the clients) is, for scoring alone, the mean over all clients of
        their own models, weighted by their samples (baselines.md section 21).
        """
        return payload_of(Weights, server, "model") if "model" in server else None

    def client_model(self, server: Record, client: int, memory: Record, setting: Setting) -> Weights | None:
        """The model that answers for one client, given its memory; None where that is the global one."""
        if self.has_global_model:
            return None
        return payload_of(Weights, memory, "model") if "model" in memory else setting.initial

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """Scores [B, K], the largest of which is the prediction.

        Args:
            model: the model to answer with, in evaluation mode.
            images: normalised images [B, C, H, W].
            server: what the server holds.
            classes: bool [K], the classes the answering client holds in training; None for a global answer.
        """
        return model.classify(model.features(images))

    def alternatives(self) -> Mapping[str, Predict]:
        """Other ways to predict by name, scored beside :meth:`predict` (heads, nearest prototypes, their fusion)."""
        return {}

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """What the server's generator (or mixtures, or virtual images through the global model) makes, for analyses.

        Args:
            server: what the server holds, on the setting's device.
            setting: common knowledge.
            count: features per class, of every class that can be generated.
            generator: of the noise.

        Returns:
            Features [n, d] and labels int64 [n], grouped by class; None where the method generates none.
        """
        return None

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """The account of a differentially private part of its messages after so many uploads of a client; else None.

        JSON values that say what is covered: ``epsilon``, ``delta``, ``unit``, ``covers``, ``releases``.
        """
        return None


def own_model(turn: Turn) -> Weights:
    """The model a client kept, or the common initial one before its first turn."""
    return payload_of(Weights, turn.memory, "model") if "model" in turn.memory else turn.setting.initial
