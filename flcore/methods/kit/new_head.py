"""Give a finished model a new head: one more exchange after the last round, and a server step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads, Record, on_device
from flcore.methods import types as fl
from flcore.methods.kit.on_top import WrapperMethod
from flcore.models.network import WithLayers


@dataclass(frozen=True)
class NewHead(WrapperMethod):
    """Another method, with a new head for its final model.

    With the same seed the training equals the base's bit for bit. One more exchange follows the last: *all* clients
    receive the final global model and send :meth:`statistics`. The server step ``head_step`` then makes a head, stored
    in ``head_slot`` next to the base's state. It replaces the base's head in predictions; the body stays. Predictions
    with the base's head are scored as ``scored_before``.

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
    def head_step(self) -> str:
        """Name of the server step that makes the head."""

    @abstractmethod
    def statistics(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> Payloads:
        """Return statistics of a client's samples; ``trained`` has the final global model."""

    @abstractmethod
    def new_head(
        self, model: Weights, replies: fl.Replies, setting: fl.FederationContext
    ) -> tuple[Weights | None, fl.Metrics]:
        """Return the head for the base's ``model``, or None to keep its own; and metrics. All clients have replied."""

    @property
    def can_be_base(self) -> bool:
        return False  # training ends with the new head

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        exchanges = self.exchanges_with(round_number, setting)
        if round_number < setting.rounds:
            return exchanges
        return (
            *exchanges,
            fl.Exchange(self.collect_leg, participants="all", phases=(), server_steps=(self.head_step,)),
        )

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        if ctx.exchange == self.collect_leg:
            return {fl.MODEL: self.base_model(server)}
        return super().broadcast(server, client, ctx)

    def initial_weights(self, ctx: fl.ClientContext) -> Weights:
        return ctx.received[fl.MODEL] if ctx.exchange == self.collect_leg else super().initial_weights(ctx)

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        if ctx.exchange != self.collect_leg:
            return super().reply(ctx, trained)
        return self.statistics(ctx, trained), ctx.client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return self.merged(super().server_steps(), {self.head_step: self.store_head})

    def store_head(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        head, facts = self.new_head(self.base_model(server), replies, ctx.setting)
        return server if head is None else server | on_device({self.head_slot: head}, "cpu"), facts

    def global_model(self, server: Record) -> Weights:
        return self.base_model(server).with_params(server.get(self.head_slot))

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return {**super().scoring_message(server, client, ctx), **server.only(self.head_slot)}

    def client_model(self, received: Record, client_state: Record, setting: fl.FederationContext) -> Weights | None:
        model = super().client_model(received, client_state, setting)
        return model and model.with_params(received.get(self.head_slot))

    def predict_before(self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        if self.head_slot in known:
            model = WithLayers(model, self.base_model(known).part("head.").params)
        return self.predict(model, images, known, classes)

    def predictors(self) -> Mapping[str, fl.Predict]:
        return {**super().predictors(), self.scored_before: self.predict_before}
