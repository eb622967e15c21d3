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
from flcore.models.network import WithLayers


@dataclass(frozen=True)
class NewHead(WrapperMethod):
    """Another method, with a new head for its final model.

    With the same seed the training equals the base's bit for bit. One more exchange follows the base's last: *all*
    clients receive the final global model and send :meth:`statistics` of their samples. The server step ``head_stage``
    then makes a head (:meth:`new_head`), stored in ``head_slot`` next to the base's state. It replaces the base's head
    in predictions; the body stays, and the head is not trained further. Predictions with the base's head are scored as
    ``scored_before``.

    Attributes:
        collect_leg: name of the exchange.
        head_slot: key of the head in the server state.
        scored_before: name of the scores of the base's model.
    """

    collect_leg: ClassVar[str]
    head_slot: ClassVar[Key[Weights]]
    scored_before: ClassVar[str]

    @property
    @abstractmethod
    def head_stage(self) -> str:
        """Name of the server step that makes the head."""

    @abstractmethod
    def statistics(self, ctx: ClientContext, trained: TrainedClient) -> Payloads:
        """Return a client's statistics of its samples; ``trained`` has the final global model."""

    @abstractmethod
    def new_head(self, model: Weights, replies: Replies, setting: FederationContext) -> tuple[Weights | None, Metrics]:
        """Return the head, or None to keep the base's; and metrics.

        Args:
            model: the base's global model.
            replies: of all clients.
            setting: of the run.
        """

    @property
    def can_be_base(self) -> bool:
        """False: training ends with the new head."""
        return False

    def round_exchanges(self, round_number: int, setting: FederationContext) -> tuple[Exchange, ...]:
        """Return the base's exchanges; in the last round, also the one for statistics and head."""
        exchanges = self.legs_with(round_number, setting)
        if round_number < setting.rounds:
            return exchanges
        return (*exchanges, Exchange(self.collect_leg, participants="all", phases=(), server_steps=(self.head_stage,)))

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """Return the base's message; for the statistics the final model alone."""
        if ctx.exchange == self.collect_leg:
            return {MODEL: self.base_model(server)}
        return super().broadcast(server, client, ctx)

    def initial_weights(self, ctx: ClientContext) -> Weights:
        """Return the base's initial weights; for the statistics the final model."""
        return ctx.received[MODEL] if ctx.exchange == self.collect_leg else super().initial_weights(ctx)

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """Return the base's reply; after training, the statistics with unchanged client state."""
        if ctx.exchange != self.collect_leg:
            return super().reply(ctx, trained)
        return self.statistics(ctx, trained), ctx.client_state

    def server_steps(self) -> Mapping[str, ServerStep]:
        """Return the base's steps, and the one that makes the head."""
        return self.beside(super().server_steps(), {self.head_stage: self.answer_with_new_head})

    def answer_with_new_head(self, server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
        """Server step: store the result of :meth:`new_head`."""
        head, facts = self.new_head(self.base_model(server), replies, ctx.setting)
        return server if head is None else server | on_device({self.head_slot: head}, "cpu"), facts

    def global_model(self, server: Record) -> Weights:
        """Return the base's model, with the new head if there is one."""
        return patched(self.base_model(server), server.get(self.head_slot))

    def scoring_message(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """Return the base's message, and the new head."""
        return {**super().scoring_message(server, client, ctx), **server.only(self.head_slot)}

    def client_model(self, received: Record, client_state: Record, setting: FederationContext) -> Weights | None:
        """Return the base's model, with the new head if there is one."""
        return patched(super().client_model(received, client_state, setting), received.get(self.head_slot))

    def predict_before(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """Return the scores with the base's head."""
        if self.head_slot in known:
            own = self.base_model(known).params
            model = WithLayers(model, {name: value for name, value in own.items() if name.startswith("head.")})
        return self.predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, Predict]:
        """Return the base's predictors, and ``scored_before``."""
        return {**super().predictors(), self.scored_before: self.predict_before}
