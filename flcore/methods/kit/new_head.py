"""What methods share that give a finished model a new head: one more leg after the last round, and a server stage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flcore.io.messages import Weights
from flcore.io.records import Payloads, Record, Slot, on_device
from flcore.methods.kit.on_top import OnTop, patched
from flcore.methods.types import (
    MODEL,
    Exchange,
    Facts,
    Leg,
    LocalModel,
    Predict,
    Replies,
    Setting,
    Stage,
    TrainedClient,
    Turn,
)
from flcore.models.view import WithLayers


@dataclass(frozen=True)
class NewHead(OnTop):
    """Another method, and a new head for the model it ends with.

    With the same seed the training is the base's own to the bit. When the base's last round is over, one more leg of
    that round follows: *all* clients receive the final global model and send :meth:`statistics` of their samples under
    it, from which the server stage ``head_stage`` makes a head (:meth:`new_head`). It stands in ``head_slot`` beside
    what the base holds and answers in place of the base's; the body is not touched, and the head never goes back into
    training. What the base answers with its own head is scored as ``scored_before``.

    Attributes:
        collect_leg: name of the leg.
        head_slot: where the server keeps the head.
        scored_before: name of the scores of the base's own model.
    """

    collect_leg: ClassVar[str]
    head_slot: ClassVar[Slot[Weights]]
    scored_before: ClassVar[str]

    @property
    @abstractmethod
    def head_stage(self) -> str:
        """Name of the stage that makes the head."""

    @abstractmethod
    def statistics(self, turn: Turn, trained: TrainedClient) -> Payloads:
        """What a client sends of its samples; ``trained`` has the final global model."""

    @abstractmethod
    def new_head(self, model: Weights, replies: Replies, setting: Setting) -> tuple[Weights | None, Facts]:
        """The head for what clients sent, or None to leave the base's; and what there is to tell of it.

        Args:
            model: the base's global model. replies: of all clients. setting: of the run.
        """

    @property
    def can_be_calibrated(self) -> bool:
        """No: nothing is trained behind it."""
        return False

    def legs(self, round_number: int, setting: Setting) -> tuple[Leg, ...]:
        """The base's; after the last one of the run, everybody's statistics and the head."""
        legs = self.legs_with(round_number, setting)
        if round_number < setting.rounds:
            return legs
        return (*legs, Leg(self.collect_leg, who="all", phases=(), stages=(self.head_stage,)))

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The base's message; for the statistics the final model alone."""
        if exchange.leg == self.collect_leg:
            return {MODEL: self.base_model(server)}
        return super().broadcast(server, client, exchange)

    def begin(self, turn: Turn) -> Weights:
        """The base's start; for the statistics the final model."""
        return turn.inbox[MODEL] if turn.leg == self.collect_leg else super().begin(turn)

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The base's; when training is over statistics, and what is remembered stays."""
        if turn.leg != self.collect_leg:
            return super().reply(turn, trained)
        return self.statistics(turn, trained), turn.memory

    def stages(self) -> Mapping[str, Stage]:
        """The base's, and the one that makes the head."""
        return self.beside(super().stages(), {self.head_stage: self.answer_with_new_head})

    def answer_with_new_head(self, server: Record, replies: Replies, exchange: Exchange) -> tuple[Record, Facts]:
        """Server stage: :meth:`new_head`, kept beside what the base holds."""
        head, facts = self.new_head(self.base_model(server), replies, exchange.setting)
        return server if head is None else server | on_device({self.head_slot: head}, "cpu"), facts

    def global_model(self, server: Record) -> Weights:
        """The base's, with the new head once there is one."""
        return patched(self.base_model(server), server.get(self.head_slot))

    def scoring_message(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The base's, and the new head."""
        return {**super().scoring_message(server, client, exchange), **server.only(self.head_slot)}

    def client_model(self, received: Record, memory: Record, setting: Setting) -> Weights | None:
        """The base's, with the new head once there is one."""
        return patched(super().client_model(received, memory, setting), received.get(self.head_slot))

    def predict_before(self, model: LocalModel, images: Tensor, known: Record, classes: Tensor | None) -> Tensor:
        """The base's answer with its own head."""
        if self.head_slot in known:
            own = self.base_model(known).params
            model = WithLayers(model, {name: value for name, value in own.items() if name.startswith("head.")})
        return self.predict(model, images, known, classes)

    def alternatives(self) -> Mapping[str, Predict]:
        """The base's, and ``scored_before``."""
        return {**super().alternatives(), self.scored_before: self.predict_before}
