"""What a method answers; the loop that asks is in `flcore/engine`, the tools that watch are in `pipelines`.

A method is a frozen dataclass of hyper-parameters with a few pure functions. It holds no state: the server's and the
clients' are records (`flcore/messages.py`) that go in and come out. Everything random comes from a stream that is
handed in, or
from
``Setting.seed`` with the round and client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from flcore.losses import cross_entropy
from flcore.messages import Record, Weights, payload_of

Context = Mapping[str, Any]
Stage = Callable[[Record, Mapping[int, Record], "Setting", int], Record]


@dataclass(frozen=True)
class Setting:
    """What every party knows before the first round.

    Attributes:
        seed: the run's seed; streams are derived from it.
        num_clients: K.
        num_classes: C.
        feature_dim: d, the length of the model's features.
        rounds: R, for schedules that need it.
        initial: the initial weights, the same for every party.
    """

    seed: int
    num_clients: int
    num_classes: int
    feature_dim: int
    rounds: int
    initial: Weights


@dataclass(frozen=True)
class Batch:
    """Normalised ``images`` [B, C, H, W], ``labels`` [B] and, where padded, ``weight`` [B] (1 real, 0 padding)."""

    images: Tensor
    labels: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Phase:
    """A stretch of local training with its own trainable part and a fresh optimiser.

    Attributes:
        trainable: prefixes of parameter names that move (``head.``); the rest is frozen, BatchNorm statistics included.
        epochs: passes over the client's data; ``steps``: mini-batches instead. Both None: as configured in ``local``.
    """

    trainable: tuple[str, ...] = ("",)
    epochs: int | None = None
    steps: int | None = None


class LocalModel(Protocol):
    """The model as a loss sees it; dropout noise of the step is inside. The same for one client or a stack of many."""

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by name."""

    def features(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] to features [B, d]."""

    def classify(self, features: Tensor) -> Tensor:
        """Features [B, d] to logits [B, K]."""


class TrainedClient(Protocol):
    """A client after its local training, as :meth:`Method.reply` sees it."""

    @property
    def weights(self) -> Weights:
        """The trained model with its buffers."""

    @property
    def num_samples(self) -> int:
        """n_k, the number of training samples."""

    def features(self) -> tuple[Tensor, Tensor]:
        """Features [n, d] and labels [n] of all training samples: evaluation mode, no augmentation, no gradient."""


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

    def start_server(self, setting: Setting) -> Record:
        """What the server holds before the first round."""
        return {}

    def broadcast(self, server: Record, client: int, setting: Setting) -> Record:
        """The message that goes down to a client."""
        return {}

    def begin(self, inbox: Record, memory: Record, setting: Setting) -> Weights:
        """The weights from which a client's local training starts: those received, else those it kept.

        Args:
            inbox: the received message.
            memory: what this client kept from its last participation; empty at the first.
            setting: common knowledge.
        """
        return payload_of(Weights, inbox, "model") if "model" in inbox else own_model(memory, setting)

    def phases(self) -> tuple[Phase, ...]:
        """The stretches of local training, in order."""
        return (Phase(),)

    def context(self, inbox: Record, memory: Record, setting: Setting) -> Context:
        """Constants of this round's loss (anchors, prototypes, ...), prepared once per client and round."""
        return {}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The named terms whose sum is minimised: scalars, pure, shape-stable, no branch on a tensor's value.

        Here the cross-entropy alone.
        """
        logits = model.classify(model.features(batch.images))
        return {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}

    @abstractmethod
    def reply(self, trained: TrainedClient, inbox: Record, memory: Record, setting: Setting) -> tuple[Record, Record]:
        """The message that goes up, and what the client remembers."""

    def stages(self) -> Mapping[str, Stage]:
        """The server's work on a round's replies, in order: (server, client id → message, setting, round) → server."""
        return {}

    def global_model(self, server: Record, setting: Setting) -> Weights | None:
        """The model that answers for everybody; None where there is none."""
        return payload_of(Weights, server, "model") if "model" in server else None

    def client_model(self, server: Record, memory: Record, setting: Setting) -> Weights | None:
        """The model that answers for one client; None where that is the global one."""
        return None if self.has_global_model else own_model(memory, setting)

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """Scores [B, K], the largest of which is the prediction.

        Args:
            model: the model to answer with, in evaluation mode.
            images: normalised images [B, C, H, W].
            server: what the server holds.
            classes: bool [K], the classes the answering client holds in training; None for a global answer.
        """
        return model.classify(model.features(images))


def own_model(memory: Record, setting: Setting) -> Weights:
    """The model a client kept, or the common initial one before its first participation."""
    return payload_of(Weights, memory, "model") if "model" in memory else setting.initial
