"""The paper's network, taught by ProtoLDA (ours; no paper): protolda.md section 6, the "same network" track.

First round, everybody, before any training: ProtoLDA's legs (`flcore/methods/protolda.py`) make a *teacher*, a
dictionary of patches with a linear head, from sums. Each client keeps what the teacher answers to its own images,
t_i [C], and forgets the teacher. Then FedAvg in few bits (`flcore/methods/fedavg_q.py`), whose clients minimise

    CE(w; x_i, y_i) + λ·T²·KL(softmax(t_i/T) ‖ softmax(z_i/T)).

Clients whose classes differ have optima that differ; the teacher is one function of the image for all of them, and says
what it thinks of classes that a client does not hold. Bytes of the teacher come once, and are in the ledger.

Choices: answers are those to images as they are, whatever augmentation training has. A client that missed a leg of the
teacher's has no answers and trains by cross-entropy alone. A head in closed form on the trained features is
``method.name: lda_head`` with this as its ``base``.

Relatives: distillation (Hinton, Vinyals, Dean, 2015) with soft answers on absent classes as in FedNTD, whose teacher is
the received model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from flcore.core.params import Search, build, param
from flcore.io.messages import Arrays, Payload, Weights
from flcore.io.records import Payloads, Record, Slot
from flcore.math.losses.alignment import softmax_divergence
from flcore.math.losses.basic import cross_entropy, weighted_mean
from flcore.methods.fedavg_q import FedAvgQ
from flcore.methods.kit.patch_sums import ASKS_ONCE, FILTERS
from flcore.methods.protolda import DELIVERY_LEG, HEAD, ProtoLDA
from flcore.methods.types import (
    Batch,
    Context,
    Exchange,
    Facts,
    Leg,
    LocalModel,
    Replies,
    Setting,
    Stage,
    TrainedClient,
    Turn,
)
from flcore.models import build_model
from flcore.models.base import extract_weights
from flcore.models.network import Network
from flcore.models.patch_dictionary import PatchDictionary

ANSWERS = Slot("answers", Arrays)
"""In a client's memory: ``logits`` float32 [n, C], what the teacher says of its samples, in their order."""

_PREFIX = "teacher_"
"""Of the teacher's payloads beside the student's, of its legs and its stages."""

_BLOCK = 256  # images at a time
_SIDE = 28  # of the images that a dictionary's own patches are for

E = TypeVar("E", bound=Exchange)


@dataclass(frozen=True)
class ProtoLDADistilled(FedAvgQ):
    """FedAvg in few bits whose clients learn from the answers of a teacher that was made from sums."""

    name: ClassVar[str] = "protolda_distilled"
    summary: ClassVar[str] = "any network by FedAvg in few bits, taught by ProtoLDA's answers to clients' own images"
    citation: ClassVar[str] = "protofl, 2026"

    weight: float = param(1.0, "λ, weight of the teacher's answers", low=0, search=Search(0.1, 10.0, log=True))
    temperature: float = param(3.0, "T of both softmaxes", above=0, search=Search(1.0, 10.0, log=True))
    teacher: Mapping[str, Any] = param(
        {},
        "the teacher's keys, of protolda and patch_dictionary: {method.shrinkage: 0.003, model.atoms: 54}; without "
        "model.patch 10/28 of the images' side",
    )

    def __post_init__(self) -> None:
        """Refuse keys that the teacher does not have.

        Raises:
            ValueError: keys of another section. ConfigError: one that is not known, or a value out of range.
        """
        super().__post_init__()
        for key in self.teacher:
            if str(key).partition(".")[0] not in ("method", "model"):
                raise ValueError(f"teacher: {key}: expected keys such as method.shrinkage or model.atoms")
        _ = self.teaching, self.spec((1, _SIDE, _SIDE))

    @cached_property
    def teaching(self) -> ProtoLDA:
        """The method that makes the teacher."""
        return build(ProtoLDA, self._section("method"), "method.teacher: method")

    def spec(self, shape: tuple[int, int, int]) -> PatchDictionary:
        """What the teacher's head reads of images of a shape (C, H, W)."""
        patch = max(1, round(min(shape[1:]) * PatchDictionary.patch / _SIDE))
        return build(PatchDictionary, {"patch": patch, **self._section("model")}, "method.teacher: model")

    def _section(self, name: str) -> dict[str, Any]:
        split = {str(key): value for key, value in self.teacher.items()}
        return {key.partition(".")[2]: value for key, value in split.items() if key.partition(".")[0] == name}

    @property
    def no_tasks(self) -> str:
        """The teacher is made in the first round."""
        return ASKS_ONCE

    @property
    def can_be_calibrated(self) -> bool:
        """Yes; what stands on top sends the model as it is."""
        return True

    # ---- the round -----------------------------------------------------------------------------------------------

    def start_server(self, setting: Setting) -> Payloads:
        """FedAvg's, and the teacher's until it has taught."""
        own = super().start_server(setting)
        return own if self.weight == 0 else {**own, **_beside(self.teaching.start_server(self._lesson(setting)))}

    def legs(self, round_number: int, setting: Setting) -> tuple[Leg, ...]:
        """In the first round the teacher's, for everybody; FedAvg's in every one."""
        own = tuple(super().stages())
        training = [replace(leg, stages=own) for leg in super().legs(round_number, setting)]
        if round_number > 1 or self.weight == 0:
            return tuple(training)
        lesson = (
            replace(leg, name=_PREFIX + leg.name, who="all", stages=tuple(_PREFIX + name for name in leg.stages or ()))
            for leg in self.teaching.legs(1, self._lesson(setting))
        )
        return (*lesson, *training)

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The leg's message, the teacher's or FedAvg's."""
        if not _teaches(exchange):
            return super().broadcast(server, client, exchange)
        return _beside(self.teaching.broadcast(_teachers(server), client, self._taught(exchange)))

    def begin(self, turn: Turn) -> Weights:
        """FedAvg's start; while the teacher is made, nothing is trained."""
        return turn.setting.initial if _teaches(turn) else super().begin(turn)

    def tables(self, turn: Turn) -> Mapping[str, Tensor]:
        """The teacher's answers; zeros where the client has none."""
        if self.weight == 0:
            return {}
        if ANSWERS in turn.memory:
            return {"teacher": turn.memory[ANSWERS]["logits"]}
        none = torch.zeros(int(turn.counts.sum()), turn.setting.num_classes, device=turn.setting.device)
        return {"teacher": none}

    def context(self, turn: Turn) -> Context:
        """λ, or 0 for who has no answers."""
        if self.weight == 0:
            return {}
        weight = self.weight if ANSWERS in turn.memory else 0.0
        return {"weight": torch.tensor(weight, device=turn.setting.device)}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy and λ·T²·KL to the teacher's answers."""
        logits = model.classify(model.features(batch.images))
        terms = {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}
        if "weight" in context:
            apart = softmax_divergence(logits, batch.frozen["teacher"], temperature=self.temperature, direction="cz")
            terms["distillation"] = context["weight"] * self.temperature**2 * weighted_mean(apart, batch.weight)
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The teacher's sums, or the quantised difference; the answers are remembered from the end of the lesson on."""
        if not _teaches(turn):
            message, memory = super().reply(turn, trained)
            return message, {**turn.memory.only(ANSWERS), **memory}
        taught = self._taught(turn)
        watched = _Watched(trained, taught.setting.network)
        if taught.leg != DELIVERY_LEG:
            # Of a client that trains nothing its method asks for these two alone.
            message, memory = self.teaching.reply(taught, cast("TrainedClient", watched))
            return _beside(message), _beside(memory)
        if HEAD not in taught.inbox or FILTERS not in taught.memory:
            return {}, {}
        head = {**taught.memory[FILTERS].params, **taught.inbox[HEAD].params}
        features = watched.seen(Weights({**taught.setting.initial.params, **head}))
        return {}, {ANSWERS: Arrays({"logits": features @ head["head.weight"].mT + head["head.bias"]})}

    def stages(self) -> Mapping[str, Stage]:
        """FedAvg's, and the teacher's under names of their own."""
        teachers = {_PREFIX + name: self._stage(stage) for name, stage in self.teaching.stages().items()}
        return {**super().stages(), **teachers}

    def aggregate(self, server: Record, replies: Replies, exchange: Exchange) -> tuple[Record, Facts]:
        """FedAvg's, without the teacher, whom nobody asks any more: D² numbers would stand in every checkpoint."""
        return super().aggregate(server.without(*_beside(_teachers(server))), replies, exchange)

    def _stage(self, stage: Stage) -> Stage:
        def carried_out(server: Record, replies: Replies, exchange: Exchange) -> tuple[Record, Facts]:
            sent = Replies({client: _teachers(message) for client, message in replies.items()})
            after, facts = stage(_teachers(server), sent, self._taught(exchange))
            return server | _beside(after), {_PREFIX + name: value for name, value in facts.items()}

        return carried_out

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """The teacher's; what training sends is not protected."""
        account = self.teaching.privacy(1)
        return None if account is None else {**account, "covers": f"{account['covers']}; not the student's weights"}

    # ---- the teacher ---------------------------------------------------------------------------------------------

    def _lesson(self, setting: Setting) -> Setting:
        """What the teacher's method knows: its own network, everybody, one round."""
        network, initial = _network(self.spec(setting.image_shape), setting.image_shape, setting.num_classes)
        return replace(
            setting,
            network=network,
            initial=initial,
            feature_dim=network.feature_dim,
            rounds=1,
            cohort_size=setting.num_clients,
        )

    def _taught(self, exchange: E) -> E:
        """An exchange, or a turn, as the teacher's method sees it."""
        own: dict[str, Any] = {"setting": self._lesson(exchange.setting), "leg": exchange.leg.removeprefix(_PREFIX)}
        if isinstance(exchange, Turn):
            own |= {"inbox": _teachers(exchange.inbox), "memory": _teachers(exchange.memory)}
        return replace(exchange, **own)


@dataclass(frozen=True)
class _Watched:
    """A client's samples as the teacher's network sees them."""

    trained: TrainedClient
    network: Network

    def images(self, rows: int) -> Iterator[Tensor]:
        return self.trained.images(rows)

    def features(self, weights: Weights) -> tuple[Tensor, Tensor]:
        return self.seen(weights), self.trained.labels()

    @torch.no_grad()
    def seen(self, weights: Weights) -> Tensor:
        """Features [n, D]."""
        return torch.cat([self.network.features(block, weights.values) for block in self.trained.images(_BLOCK)])


@lru_cache(maxsize=4)
def _network(features: PatchDictionary, shape: tuple[int, int, int], num_classes: int) -> tuple[Network, Weights]:
    """The teacher's network, and weights of its shape: all that counts in them is made from sums later."""
    module = build_model(features, shape, num_classes)
    return Network(module), extract_weights(module)


def _teaches(exchange: Exchange) -> bool:
    return exchange.leg.startswith(_PREFIX)


def _beside(payloads: Payloads) -> dict[str, Payload]:
    """The teacher's payloads under the names that they have beside the student's."""
    return {_PREFIX + name: payload for name, payload in payloads.items()}


def _teachers(record: Payloads) -> Record:
    """Those among them, under the names that the teacher's method knows."""
    return Record({name.removeprefix(_PREFIX): payload for name, payload in record.items() if name.startswith(_PREFIX)})
