"""The interface of a federated method.

A method is a frozen dataclass of hyper-parameters with a few pure functions. It holds no state: server and client state
are records (`flcore/io/records.py`) that functions take and return. Random numbers come from a context's streams
(`flcore/methods/types.py`). The training loop is in `flcore/engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flcore.core.registry import Named
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
"""Output of a frozen model: features [B, d], or logits [B, K]."""

ScoreKind = Literal["logits", "probabilities", "ranks"]
"""Scores of :meth:`Method.predict`: logits, probabilities (sum 1), or ranks, where only the order has a meaning."""


class ValidatedParams:
    """Parameters that are validated together; an override calls ``super().__post_init__()`` first."""

    def __post_init__(self) -> None:
        """Accept all values."""


class Method(ValidatedParams, Named, ABC):
    """A federated method. By default it has no server state, messages or client state; override what the paper changes.

    Name, citation and ``reduces_to_fedavg`` are arguments of the class statement::

        @dataclass(frozen=True)
        class FedProx(FedAvg, name="fedprox", citation="Li et al., MLSys 2020", reduces_to_fedavg={"mu": 0.0}):

    Attributes:
        AUTHORS: see :class:`flcore.methods.kit.preset.AuthorsPreset`.
        name: the registry's name.
        summary: the first line of the docstring.
        citation: authors, venue, year.
        trains: clients that train in a round: the sampled cohort, or all (methods without communication).
        data_scope: data of one trainer: its own, or the union of all clients' data (the centralised reference), with
            which nothing is transmitted.
        has_global_model: whether one model predicts for all clients; else each client uses its own.
        has_vote: without a global model, whether to also score the majority vote of all clients' models (baselines.md
            section 21).
        trains_locally: whether clients take steps. If not, ``local`` has no effect and tuning ignores it.
        needs_linear_head: whether the head must have ``head.weight`` [K, d] and ``head.bias`` [K]; others are refused.
        required_config: supported values by dotted key of another section, such as ``{"local.momentum": (0.0,)}``.
            Other values are refused before data are read.
        reduces_to_fedavg: parameters that make it FedAvg bit for bit, with equal traffic, if all clients have equally
            many samples. Not inherited.
    """

    AUTHORS: ClassVar[Mapping[str, Any]] = {}
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
        """Return the number of head outputs: the classes first, then any auxiliary classes of the method."""
        return num_classes

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, nn.Module]:
        """Return additional layers by name; every model of the run contains them.

        They read features [B, d], or the projection's input [B, ``encoded_dim``]. Their parameters are named
        ``extra.<name>.…`` and initialised last, so that all other weights start as in other methods.
        """
        return {}

    def start_server(self, setting: FederationContext) -> Payloads:
        """Return the server state before the first round."""
        return {}

    def round_exchanges(self, round_number: int, setting: FederationContext) -> tuple[Exchange, ...]:
        """Return the exchanges of a round, in order."""
        return (Exchange(participants=self.trains, phases=self.phases()),)

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of local training, in order, for a method with one exchange."""
        return (Phase(),)

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """Return the message from the server to a client."""
        return {}

    def initial_weights(self, ctx: ClientContext) -> Weights:
        """Return the weights from which a client starts to train: received, else kept, else the initial model."""
        return ctx.received[MODEL] if MODEL in ctx.received else kept_model(ctx)

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        """Return constants of the loss (anchors, prototypes, ...); shapes are equal for all clients of an exchange."""
        return {}

    def teachers(self, ctx: ClientContext) -> Mapping[str, tuple[ModelPart, Weights]]:
        """Return frozen models by name, each with the part to evaluate: ``{"teacher": ("logits", received)}``.

        Weights have a complete set of buffers; names and parts are the same for all clients of an exchange. Without
        augmentation, the engine evaluates each teacher once per sample and puts the outputs in
        :attr:`Batch.per_sample`. A loss reads them through :func:`teacher_output`, which computes missing ones.
        """
        return {}

    def per_sample_inputs(self, ctx: ClientContext) -> Mapping[str, Tensor]:
        """Return what a client stores per sample, by name [n, ...]; a step finds its rows in :attr:`Batch.per_sample`.

        Rows are in the order of :meth:`TrainedClient.images`; names, dtypes and shapes after n are equal for all
        clients of an exchange.
        """
        return {}

    def random_inputs(self, ctx: ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Return the loss's random numbers for all steps of a phase, each [steps, ...]."""
        return {}

    def loss(self, model: LocalModel, batch: Batch, inputs: LossInputs) -> dict[str, Tensor]:
        """Return the loss as named scalars, which are added; by default the cross-entropy.

        A loss is pure. Its shapes are constant, and it does not branch on the value of a tensor.
        """
        logits = model.classify(model.features(batch.images))
        return {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}

    @abstractmethod
    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """Return the client's message to the server, and its new state."""

    def server_steps(self) -> Mapping[str, ServerStep]:
        """Return the server steps by name: (server, client id → message, round context) → (server, metrics)."""
        return {}

    @property
    def task_stream_error(self) -> str | None:
        """Reason to refuse a stream of tasks, with a hint, written to follow the method's name; None if supported."""
        return None

    @property
    def aggregates(self) -> frozenset[Kind]:
        """Kinds of payloads that the server aggregates by the rule of section ``aggregation``."""
        kinds = (getattr(step, "aggregates", None) for step in self.server_steps().values())
        return frozenset(kind for kind in kinds if kind is not None)

    @property
    def poisonable_payloads(self) -> frozenset[Kind]:
        """Kinds of payloads that a poisoned client may change, by default :attr:`aggregates`.

        Override this if server steps use weights or prototypes without the rule of section ``aggregation``.
        """
        return self.aggregates

    @property
    def releases_weights_alone(self) -> bool:
        """True if the server uses client messages only to aggregate weights."""
        steps = self.server_steps().values()
        return bool(steps) and all(getattr(step, "aggregates", None) == "weights" for step in steps)

    @property
    def can_be_base(self) -> bool:
        """True if it trains a global model that predicts with its head alone, as CCVR and FedCSPC need of a base."""
        return False

    @property
    def broadcasts_model(self) -> bool:
        """True if clients receive :data:`MODEL` as the server holds it; else in another form, such as differences."""
        return True

    @property
    def predicts_from_client_state(self) -> bool:
        """True if clients predict with their own models although there is a global one."""
        return False

    @property
    def ignores_model(self) -> bool:
        """True if :meth:`predict` returns the same scores for every model."""
        return False

    def global_model(self, server: Record) -> Weights | None:
        """Return the global model; None without one.

        For scoring alone, layers that never leave the clients are filled in with the mean of all clients' models,
        weighted by samples (baselines.md section 21).
        """
        return server.get(MODEL)

    def scoring_message(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """Return the message that lets a client be scored with its own model.

        It has the server's part of what :meth:`client_model` and :meth:`predict` need, by default the global model, if
        any. Its bytes are counted as `bytes_eval_down`. Clients add their own BatchNorm statistics.
        """
        model = self.global_model(server) if self.has_global_model else None
        return {} if model is None else {MODEL: model}

    def client_model(self, received: Record, client_state: Record, setting: FederationContext) -> Weights | None:
        """Return the model that predicts for one client, given its :meth:`scoring_message`; None: the global one."""
        return self.global_model(received) if self.has_global_model else client_state.get(MODEL, setting.initial)

    @property
    def score_kind(self) -> ScoreKind:
        """Kind of scores that :meth:`predict` returns; ``ranks`` have no cross-entropy, and ``loss_global`` is None."""
        return "logits"

    def predict(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """Return scores [B, K] of kind :attr:`score_kind`; the largest is the prediction.

        Args:
            model: the model, in evaluation mode.
            images: normalised images [B, C, H, W].
            known: server state for a global prediction. For a client's prediction: its state, updated with its
                :meth:`scoring_message`.
            classes: bool [K], classes in the client's training data; None for a global prediction.
        """
        return model.classify(model.features(images))

    def predict_private(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """Return :meth:`predict`'s scores for a locally trained model (A_loc, A_sel).

        Override it to leave out other sources of predictions (an ensemble, parts that only the server has).
        """
        return self.predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, Predict]:
        """Return alternative predictors by name, such as nearest prototypes; each is scored as :meth:`predict` is."""
        return {}

    @property
    def projections(self) -> Predict | None:
        """Predictor of the vectors [B, p] that are compared to prototypes or a frame; None: the features."""
        return None

    def generated_features(
        self, server: Record, setting: FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Return synthetic features [n, d] and labels int64 [n], grouped by class, for analyses; None without any.

        Args:
            server: server state, on the setting's device.
            setting: constants of the federation.
            count: features per class, for every class that can be generated.
            generator: stream of the noise.
        """
        return None

    def virtual_images(self, server: Record, setting: FederationContext) -> Tensor | None:
        """Return the synthetic images that clients trained on last, for analyses; None without any.

        They are pixels [K·n, C, H, W] as transmitted, class by class, n of each.
        """
        return None

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """Return the privacy account after `releases` rounds (>= 0); None without noise.

        It assumes the worst case, one upload of a client per round. Its JSON values are ``epsilon``, ``delta``,
        ``unit``, ``covers`` and ``releases``.
        """
        return None


@torch.no_grad()
def teacher_output(model: LocalModel, batch: Batch, inputs: LossInputs, name: str, part: ModelPart) -> Tensor:
    """Return a teacher's output [B, ...] on a batch, in evaluation mode and without gradient.

    It is precomputed, or computed with the weights (parameters and buffers) in ``inputs`` under the teacher's name.
    """
    if name in batch.per_sample:
        return batch.per_sample[name]
    features = model.features(batch.images, inputs[name])
    return features if part == "features" else model.classify(features, inputs[name])


def kept_model(ctx: ClientContext) -> Weights:
    """Return the model that a client kept, or the common initial one before the client's first round."""
    return ctx.client_state.get(MODEL, ctx.setting.initial)
