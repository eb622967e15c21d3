"""What a method answers; the loop that asks is in `flcore/engine`, the tools that watch are in `pipelines`.

A method is a frozen dataclass of hyper-parameters with a few pure functions. It holds no state: the server's and the
clients' are records (`flcore/io/records.py`) that go in and come out. Everything random comes from a stream that is
handed in (`flcore/methods/types.py` has these and the other words), or from ``seed`` with the round and client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flcore.io.messages import Weights
from flcore.io.records import Payloads, Record
from flcore.math.losses.basic import cross_entropy
from flcore.methods.types import (
    MODEL,
    Batch,
    ClientContext,
    Exchange,
    FederationContext,
    Kind,
    LocalModel,
    LossInputs,
    Phase,
    Predict,
    RoundContext,
    ServerStep,
    TrainedClient,
)

ModelPart = Literal["features", "logits"]
"""What may be asked of a frozen model: features [B, d], or logits [B, K]."""

ScoreKind = Literal["logits", "probabilities", "ranks"]
"""What the scores of :meth:`Method.predict` are: logits, probabilities of sum 1, or numbers of which only the order has
a meaning (distances, cosines, mixtures of unlike things)."""


class ValidatedParams:
    """Parameters that look at each other once all are set: whoever overrides this calls ``super()``'s first."""

    def __post_init__(self) -> None:
        """Nothing to look at."""


class Method(ValidatedParams, ABC):
    """A federated method. Defaults describe a method without server, messages or memory; override what the paper says.

    Attributes:
        name: the registry's name.
        AUTHORS: see :class:`flcore.methods.kit.preset.AuthorsPreset`.
        summary: one line.
        citation: authors, venue, year.
        trains: who trains in a round: the sampled cohort, or all clients (methods without communication).
        data_scope: what a trainer sees: its own data, or (the centralised reference) the union of all clients' data,
            which then stand at the server: nothing crosses the line and no bytes are counted.
        has_global_model: whether one model answers for everybody; else every client answers with its own.
        has_vote: without a global model, whether the majority vote of all clients' models is scored in its place
            (baselines.md section 21), under a name of its own.
        trains_locally: whether clients (or the centralised trainer) take steps at all; else what ``local`` says has no
            effect, and tuning leaves it alone.
        needs_linear_head: whether it takes the head for one linear map of features, ``head.weight`` [K, d] and
            ``head.bias`` [K]; a model with a hidden layer in its head is then refused.
        needs: what other sections of a configuration must say for it, by dotted key: the values that it works with,
            such as ``{"local.momentum": (0.0,)}``. Others are refused before any data are read.
        reduces_to_fedavg: values of its parameters that make it FedAvg, to the bit and with FedAvg's traffic, where
            clients have equally many samples; None: none do. A subclass does not inherit it.
    """

    AUTHORS: ClassVar[Mapping[str, Any]] = {}
    name: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    trains: ClassVar[Literal["cohort", "all"]] = "cohort"
    data_scope: ClassVar[Literal["client", "union"]] = "client"
    has_global_model: ClassVar[bool] = True
    has_vote: ClassVar[bool] = False
    trains_locally: ClassVar[bool] = True
    needs_linear_head: ClassVar[bool] = False
    required_config: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    reduces_to_fedavg: ClassVar[Mapping[str, Any] | None] = None

    def num_outputs(self, num_classes: int) -> int:
        """Outputs of the model's head: one per class, and those of classes that only the method knows behind them."""
        return num_classes

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, nn.Module]:
        """Fresh layers beside the head, by name; they are a part of every model of the run.

        They read features [B, d], or what the projection reads, [B, ``encoded_dim``]. Their parameters are called
        ``extra.<name>.…``. They are made after everything else, whose initial weights are those of other methods.
        """
        return {}

    def start_server(self, setting: FederationContext) -> Payloads:
        """What the server holds before the first round."""
        return {}

    def round_exchanges(self, round_number: int, setting: FederationContext) -> tuple[Exchange, ...]:
        """The exchanges of a round, in order."""
        return (Exchange(participants=self.trains, phases=self.phases()),)

    def phases(self) -> tuple[Phase, ...]:
        """The stretches of local training of a method with one exchange, in order."""
        return (Phase(),)

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The message that goes down to a client."""
        return {}

    def initial_weights(self, ctx: ClientContext) -> Weights:
        """Return the weights from which a client starts to train: received ones, else kept ones."""
        return ctx.received[MODEL] if MODEL in ctx.received else kept_model(ctx)

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        """Return constants of the loss (anchors, prototypes, ...); shapes are equal for all clients of an exchange."""
        return {}

    def teachers(self, ctx: ClientContext) -> Mapping[str, tuple[ModelPart, Weights]]:
        """Models that stand still during a turn, by name: the part that is asked of them, and their weights.

        ``{"teacher": ("logits", received)}``. Where a sample's image is the same in every step (no augmentation), the
        engine asks each of them once per sample of the client, and :attr:`Batch.frozen` has the answers. A loss reads
        them through :func:`frozen_answer`, which asks where they are not there.

        Returns:
            Weights with a complete set of buffers; the same names and parts for every client of an exchange.
        """
        return {}

    def per_sample_inputs(self, ctx: ClientContext) -> Mapping[str, Tensor]:
        """What a client remembers of each of its samples, by name [n, ...]; :attr:`Batch.frozen` has a step's rows.

        Returns:
            In the order of :meth:`TrainedClient.images`; the same names, dtypes and shapes behind n for every client of
            an exchange.
        """
        return {}

    def random_inputs(self, ctx: ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Random numbers of the loss for all steps of a phase at once, each [steps, ...]."""
        return {}

    def loss(self, model: LocalModel, batch: Batch, inputs: LossInputs) -> dict[str, Tensor]:
        """The named terms whose sum is minimised: scalars, pure, shape-stable, no branch on a tensor's value.

        Here the cross-entropy alone.
        """
        logits = model.classify(model.features(batch.images))
        return {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}

    @abstractmethod
    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The message that goes up, and what the client remembers."""

    def server_steps(self) -> Mapping[str, ServerStep]:
        """The server's work on replies by name: (server, client id → message, exchange) → (server, facts)."""
        return {}

    @property
    def task_stream_error(self) -> str | None:
        """Why its clients may not meet one task after the other, and a cure, in words behind its name; None: they may.

        A stream of tasks is then refused, before data are read where the partitioner says that it makes one.
        """
        return None

    @property
    def aggregates(self) -> frozenset[Kind]:
        """What the server folds as the section ``aggregation`` says; everything else it uses as it comes."""
        kinds = (getattr(stage, "folds", None) for stage in self.server_steps().values())
        return frozenset(kind for kind in kinds if kind is not None)

    @property
    def poisonable_payloads(self) -> frozenset[Kind]:
        """What clients send of these kinds, folded as ``aggregation`` says or not: what a poisoned client may change.

        By default what is folded; a method whose own stages take weights or prototypes as they come says so.
        """
        return self.aggregates

    @property
    def releases_weights_alone(self) -> bool:
        """Whether everything that the server learns from clients is in that fold of weights: it has no other stage."""
        stages = self.server_steps().values()
        return bool(stages) and all(getattr(stage, "folds", None) == "weights" for stage in stages)

    @property
    def can_be_base(self) -> bool:
        """Whether it trains a global model that answers by itself through its head: a base of CCVR and FedCSPC."""
        return False

    @property
    def broadcasts_model(self) -> bool:
        """Whether clients are sent :data:`MODEL` as the server holds it; else what they make theirs of, as differences.

        Where not, a model that stands on top of it at the server does not reach them in its place.
        """
        return True

    @property
    def predicts_from_client_state(self) -> bool:
        """Whether clients answer with models of their own although there is a global one."""
        return False

    @property
    def ignores_model(self) -> bool:
        """Whether :meth:`predict` says the same of an image whichever model it is given.

        Then a client's own test images, which are among those that everybody answers for, are not asked about again.
        """
        return False

    def global_model(self, server: Record) -> Weights | None:
        """The model that answers for everybody; None where there is none.

        What it lacks (upper layers that never leave the clients) is, for scoring alone, the mean over all clients of
        their own models, weighted by their samples (baselines.md section 21).
        """
        return server.get(MODEL)

    def scoring_message(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The message that goes down to a client which is scored with a model of its own, for that alone.

        What :meth:`client_model` and :meth:`predict` need of the server's that the client does not keep; counted apart
        from training's (`bytes_eval_down`). By default the global model, which clients complete with BatchNorm
        statistics of their own; nothing without one.

        Args:
            server: what the server holds. client: id.
            ctx: the round that is scored, as everybody knows it.
        """
        model = self.global_model(server) if self.has_global_model else None
        return {} if model is None else {MODEL: model}

    def client_model(self, received: Record, client_state: Record, setting: FederationContext) -> Weights | None:
        """The model that answers for one client; None where the global one does.

        Args:
            received: the client's :meth:`scoring_message`. client_state: what it remembers.
            setting: common knowledge.
        """
        return self.global_model(received) if self.has_global_model else client_state.get(MODEL, setting.initial)

    @property
    def score_kind(self) -> ScoreKind:
        """What :meth:`predict` returns: with ``ranks`` there is no cross-entropy, and ``loss_global`` is None."""
        return "logits"

    def predict(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """Scores [B, K], the largest of which is the prediction; :attr:`score_kind` says what they are.

        Args:
            model: the model to answer with, in evaluation mode.
            images: normalised images [B, C, H, W].
            known: for a global answer what the server holds; for a client's what it remembers, with its
                :meth:`scoring_message` (if a name is in both, the message's).
            classes: bool [K], the classes the answering client holds in training; None for a global answer.
        """
        return model.classify(model.features(images))

    def predict_private(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """As :meth:`predict`, where a client's model is asked for what it says as its training left it (A_loc, A_sel).

        A method whose answers come from elsewhere too (an ensemble, what stands at the server alone) leaves that out.
        """
        return self.predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, Predict]:
        """Other ways to predict by name, scored beside :meth:`predict` (heads, nearest prototypes, their fusion)."""
        return {}

    @property
    def projections(self) -> Predict | None:
        """What of an image is held against a frame or prototypes, [B, p], where that is not the feature: for analyses.

        None where it is the feature, or nothing.
        """
        return None

    def generated_features(
        self, server: Record, setting: FederationContext, count: int, generator: torch.Generator
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

    def virtual_images(self, server: Record, setting: FederationContext) -> Tensor | None:
        """Images beside their own that clients learned from last, for analyses.

        Returns:
            Pixels [K·n, C, H, W] as they travel, class by class, equally many of each; None where there are none.
        """
        return None

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """Return the privacy account after `releases` rounds (>= 0); None without noise.

        A client uploads at most once in a round: the worst case, whoever was sampled. JSON values that say what is
        covered: ``epsilon``, ``delta``, ``unit``, ``covers``, ``releases``.
        """
        return None


@torch.no_grad()
def teacher_output(model: LocalModel, batch: Batch, inputs: LossInputs, name: str, part: ModelPart) -> Tensor:
    """What a model of :meth:`Method.teachers` says of a batch, [B, ...], in evaluation mode and without gradient.

    Args:
        model: whose parts are asked with other weights.
        batch: with the answer, or with the images.
        inputs: without the answer has the weights (parameters and buffers) under the same name.
        name: of the frozen model. part: what is asked of it.
    """
    if name in batch.per_sample:
        return batch.per_sample[name]
    features = model.features(batch.images, inputs[name])
    return features if part == "features" else model.classify(features, inputs[name])


def kept_model(ctx: ClientContext) -> Weights:
    """The model a client kept, or the common initial one before its first turn."""
    return ctx.client_state.get(MODEL, ctx.setting.initial)
