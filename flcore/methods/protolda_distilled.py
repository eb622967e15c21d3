"""The paper's network, taught by ProtoLDA (ours; no paper): protolda.md section 6, the "same network" track.

First round, all clients, before any training: ProtoLDA's exchanges (`flcore/methods/protolda.py`) make a *teacher*, a
dictionary of patches with a linear head, from sums. Each client keeps the teacher's logits of its own images without
augmentation, t_i [C]. Then FedAvg in few bits (`flcore/methods/fedavg_q.py`) on

    CE(w; x_i, y_i) + λ·T²·KL(softmax(t_i/T) ‖ softmax(z_i/T)).

Clients with different classes have different optima; the teacher is one function of the image for all of them, and also
scores classes that a client does not hold. A client that missed an exchange of the teacher's trains by cross-entropy
alone. A head in closed form on the trained features is ``method.name: lda_head`` with this as its ``base``.

Relatives: distillation (Hinton, Vinyals, Dean, 2015) with soft labels on absent classes as in FedNTD, with the received
model as its teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flcore.core.params import Search, build, param
from flcore.io.messages import Payload, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.alignment import softmax_divergence
from flcore.math.losses.basic import cross_entropy, weighted_mean
from flcore.methods import types as fl
from flcore.methods.closed_head import DELIVERY_LEG, LDA_HEAD
from flcore.methods.fedavg_q import FedAvgQ
from flcore.methods.kit.patch_sums import ASKS_ONCE, FILTERS
from flcore.methods.protolda import ProtoLDA
from flcore.models import build_model
from flcore.models.base import extract_weights
from flcore.models.network import Network
from flcore.models.patch_dictionary import PatchDictionary

TEACHER_LOGITS = Key("answers", TensorDict)
"""In a client's state: ``logits`` float32 [n, C], the teacher's for its samples, in their order."""

_PREFIX = "teacher_"
"""Prefix of the teacher's payloads, exchanges and server steps."""

_BLOCK = 256  # images at a time

E = TypeVar("E", bound=fl.RoundContext)


@dataclass(frozen=True)
class ProtoLDADistilled(FedAvgQ, name="protolda_distilled", citation="protofl, 2026"):
    """Any network by FedAvg in few bits, taught by ProtoLDA's answers to clients' own images."""

    weight: float = param(1.0, "λ, weight of the teacher's answers", low=0, search=Search(0.1, 10.0, log=True))
    temperature: float = param(3.0, "T of both softmaxes", above=0, search=Search(1.0, 10.0, log=True))
    teacher: Mapping[str, Any] = param({}, "keys of protolda and patch_dictionary: {method.shrinkage: 0.003}")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in self.teacher:
            if not str(key).startswith(("method.", "model.")):
                raise ValueError(f"teacher: {key}: expected keys such as method.shrinkage or model.atoms")
        _ = self.teaching, self.spec

    @cached_property
    def teaching(self) -> ProtoLDA:
        return build(ProtoLDA, self._section("method"), "method.teacher: method")

    @cached_property
    def spec(self) -> PatchDictionary:
        """The teacher's feature extractor."""
        return build(PatchDictionary, self._section("model"), "method.teacher: model")

    def _section(self, name: str) -> dict[str, Any]:
        prefix = f"{name}."
        return {str(k).removeprefix(prefix): v for k, v in self.teacher.items() if str(k).startswith(prefix)}

    @property
    def task_stream_error(self) -> str:
        return ASKS_ONCE

    @property
    def can_be_base(self) -> bool:
        return True

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = super().start_server(setting)
        if self.weight == 0:
            return server
        return {**server, **_prefixed(self.teaching.start_server(self._lesson(setting)))}

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        """Prepend the teacher's exchanges, with all clients, in the first round."""
        steps = tuple(super().server_steps())
        exchanges = [replace(each, server_steps=steps) for each in super().round_exchanges(round_number, setting)]
        lesson = []
        if round_number == 1 and self.weight > 0:
            for exchange in self.teaching.round_exchanges(1, self._lesson(setting)):
                steps = tuple(_PREFIX + name for name in exchange.server_steps or ())
                lesson.append(fl.Exchange(_PREFIX + exchange.name, "all", exchange.phases, steps))
        return (*lesson, *exchanges)

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        if not _teaches(ctx):
            return super().broadcast(server, client, ctx)
        return _prefixed(self.teaching.broadcast(_unprefixed(server), client, self._taught(ctx)))

    def initial_weights(self, ctx: fl.ClientContext) -> Weights:
        return ctx.setting.initial if _teaches(ctx) else super().initial_weights(ctx)

    def per_sample_inputs(self, ctx: fl.ClientContext) -> Mapping[str, Tensor]:
        """Return the teacher's logits; zeros if the client has none."""
        if self.weight == 0:
            return {}
        if TEACHER_LOGITS in ctx.client_state:
            return {"teacher": ctx.client_state[TEACHER_LOGITS]["logits"]}
        size = int(ctx.class_counts.sum()), ctx.setting.num_classes
        return {"teacher": torch.zeros(size, device=ctx.setting.device)}

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        """Return λ, 0 without logits."""
        if self.weight == 0:
            return {}
        weight = self.weight if TEACHER_LOGITS in ctx.client_state else 0.0
        return {"weight": torch.tensor(weight, device=ctx.setting.device)}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        logits = model.classify(model.features(batch.images))
        terms = {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}
        if "weight" in inputs:
            teacher, temperature = batch.per_sample["teacher"], self.temperature
            divergence = softmax_divergence(logits, teacher, temperature=temperature, direction="cz")
            terms["distillation"] = inputs["weight"] * temperature**2 * weighted_mean(divergence, batch.weight)
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        if not _teaches(ctx):
            message, client_state = super().reply(ctx, trained)
            return message, {**ctx.client_state.only(TEACHER_LOGITS), **client_state}
        taught = self._taught(ctx)
        samples = _TeacherView(trained, taught.setting.network)
        if taught.exchange != DELIVERY_LEG:
            message, client_state = self.teaching.reply(taught, cast("fl.TrainedClient", samples))
            return _prefixed(message), _prefixed(client_state)
        if LDA_HEAD not in taught.received or FILTERS not in taught.client_state:
            return {}, {}
        head = {**taught.client_state[FILTERS].params, **taught.received[LDA_HEAD].params}
        features = samples.seen(Weights({**taught.setting.initial.params, **head}))
        return {}, {TEACHER_LOGITS: TensorDict({"logits": features @ head["head.weight"].mT + head["head.bias"]})}

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        teachers = {_PREFIX + name: self._step(step) for name, step in self.teaching.server_steps().items()}
        return {**super().server_steps(), **teachers}

    def aggregate(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Drop the teacher, which would add D² numbers to every checkpoint."""
        return super().aggregate(server.without(*_prefixed(_unprefixed(server))), replies, ctx)

    def _step(self, step: fl.ServerStep) -> fl.ServerStep:
        def step_of_teacher(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
            sent = fl.Replies({client: _unprefixed(message) for client, message in replies.items()})
            after, facts = step(_unprefixed(server), sent, self._taught(ctx))
            return server | _prefixed(after), {_PREFIX + name: value for name, value in facts.items()}

        return step_of_teacher

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        account = self.teaching.privacy(1)
        return None if account is None else {**account, "covers": f"{account['covers']}; not the student's weights"}

    def _lesson(self, setting: fl.FederationContext) -> fl.FederationContext:
        """Return the teacher's setting: its network, all clients, one round."""
        network, initial = _network(self.spec, setting.image_shape, setting.num_classes)
        teacher: dict[str, Any] = {"network": network, "initial": initial, "feature_dim": network.feature_dim}
        return replace(setting, **teacher, rounds=1, cohort_size=setting.num_clients)

    def _taught(self, ctx: E) -> E:
        """Return an exchange, or a turn, for the method of the teacher."""
        seen: dict[str, Any] = {"setting": self._lesson(ctx.setting), "exchange": ctx.exchange.removeprefix(_PREFIX)}
        if isinstance(ctx, fl.ClientContext):
            seen |= {"received": _unprefixed(ctx.received), "client_state": _unprefixed(ctx.client_state)}
        return replace(ctx, **seen)


@dataclass(frozen=True)
class _TeacherView:
    """A client's samples for the teacher's method: images, and features of the teacher's network."""

    trained: fl.TrainedClient
    network: Network

    def images(self, rows: int) -> Iterator[Tensor]:
        return self.trained.images(rows)

    def features(self, weights: Weights) -> tuple[Tensor, Tensor]:
        return self.seen(weights), self.trained.labels()

    @torch.no_grad()
    def seen(self, weights: Weights) -> Tensor:
        """Return features [n, D]."""
        return torch.cat([self.network.features(block, weights.values) for block in self.trained.images(_BLOCK)])


@lru_cache(maxsize=4)
def _network(features: PatchDictionary, shape: tuple[int, int, int], num_classes: int) -> tuple[Network, Weights]:
    module = build_model(features, shape, num_classes)
    return Network(module), extract_weights(module)


def _teaches(ctx: fl.RoundContext) -> bool:
    return ctx.exchange.startswith(_PREFIX)


def _prefixed(payloads: Payloads) -> dict[str, Payload]:
    return {_PREFIX + name: payload for name, payload in payloads.items()}


def _unprefixed(record: Payloads) -> Record:
    return Record({name.removeprefix(_PREFIX): payload for name, payload in record.items() if name.startswith(_PREFIX)})
