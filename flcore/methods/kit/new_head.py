"""Give a finished model a new head: one more exchange after the last round, and a server step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads, Record, on_device
from flcore.methods.kit.on_top import WrapperMethod, patched
from flcore.methods.types import (
    MODEL,
    ClientContext,
    Exchange,
    FederationContext,
    LocalModel,
    Metrics,
    Predict,
    Replies,
    RoundContext,
    ServerStep,
    TrainedClient,
)
from flcore.models.view import WithLayers


@dataclass(frozen=True)
class NewHead(WrapperMethod):
    """Another method, and a new head for the model it ends with.

    With the same seed the training is the base's own to the bit. When the base's last round is over, one more exchange
    of that round follows: *all* clients receive the final global model and send :meth:`statistics` of their samples
    under it, from which the server stage ``head_stage`` makes a head (:meth:`new_head`). It stands in ``head_slot``
    beside what the base holds and answers in place of the base's; the body is not touched, and the head never goes back
    into training. What the base answers with its own head is scored as ``scored_before``.

    Attributes:
        collect_leg: name of the exchange.
        head_slot: where the server keeps the head.
        scored_before: name of the scores of the base's own model.
    """

    collect_leg: ClassVar[str]
    head_slot: ClassVar[Key[Weights]]
    scored_before: ClassVar[str]

    @property
    @abstractmethod
    def head_stage(self) -> str:
        """Name of the stage that makes the head."""

    @abstractmethod
    def statistics(self, ctx: ClientContext, trained: TrainedClient) -> Payloads:
        """What a client sends of its samples; ``trained`` has the final global model."""

    @abstractmethod
    def new_head(self, model: Weights, replies: Replies, setting: FederationContext) -> tuple[Weights | None, Metrics]:
        """The head for what clients sent, or None to leave the base's; and what there is to tell of it.

        Args:
            model: the base's global model. replies: of all clients. setting: of the run.
        """

    @property
    def can_be_base(self) -> bool:
        """No: nothing is trained behind it."""
        return False

    def round_exchanges(self, round_number: int, setting: FederationContext) -> tuple[Exchange, ...]:
        """The base's; after the last one of the run, everybody's statistics and the head."""
        exchanges = self.legs_with(round_number, setting)
        if round_number < setting.rounds:
            return exchanges
        return (*exchanges, Exchange(self.collect_leg, participants="all", phases=(), server_steps=(self.head_stage,)))

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The base's message; for the statistics the final model alone."""
        if ctx.exchange == self.collect_leg:
            return {MODEL: self.base_model(server)}
        return super().broadcast(server, client, ctx)

    def initial_weights(self, ctx: ClientContext) -> Weights:
        """The base's start; for the statistics the final model."""
        return ctx.received[MODEL] if ctx.exchange == self.collect_leg else super().initial_weights(ctx)

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The base's; when training is over statistics, and what is remembered stays."""
        if ctx.exchange != self.collect_leg:
            return super().reply(ctx, trained)
        return self.statistics(ctx, trained), ctx.client_state

    def server_steps(self) -> Mapping[str, ServerStep]:
        """The base's, and the one that makes the head."""
        return self.beside(super().server_steps(), {self.head_stage: self.answer_with_new_head})

    def answer_with_new_head(self, server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
        """Server stage: :meth:`new_head`, kept beside what the base holds."""
        head, facts = self.new_head(self.base_model(server), replies, ctx.setting)
        return server if head is None else server | on_device({self.head_slot: head}, "cpu"), facts

    def global_model(self, server: Record) -> Weights:
        """The base's, with the new head once there is one."""
        return patched(self.base_model(server), server.get(self.head_slot))

    def scoring_message(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The base's, and the new head."""
        return {**super().scoring_message(server, client, ctx), **server.only(self.head_slot)}

    def client_model(self, received: Record, client_state: Record, setting: FederationContext) -> Weights | None:
        """The base's, with the new head once there is one."""
        return patched(super().client_model(received, client_state, setting), received.get(self.head_slot))

    def predict_before(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """The base's answer with its own head."""
        if self.head_slot in known:
            own = self.base_model(known).params
            model = WithLayers(model, {name: value for name, value in own.items() if name.startswith("head.")})
        return self.predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, Predict]:
        """The base's, and ``scored_before``."""
        return {**super().predictors(), self.scored_before: self.predict_before}
