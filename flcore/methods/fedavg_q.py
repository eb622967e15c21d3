"""FedAvg with quantised differences and error feedback, both ways: what cheap FedAvg gives at the same bytes.

Client: from the received model v, FedAvg's training to w_k; sends Q(w_k − v + e_k) and keeps the error
e_k ← w_k − v + e_k − Q(…) (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019).
Server: w ← v + Σ (n_k/N) Q_k; then the public model moves by what travels, v ← v + Q(w + e − v) with the error kept at
the server (double compression: Tang et al., DoubleSqueeze, ICML 2019). A client with all of these differences has v to
the bit.

Q: per tensor 2^bits − 1 even values between ∓ its largest size, rounded at random without bias (QSGD). A client that
missed j rounds receives their j differences, or the whole of v where that is less. BatchNorm statistics are not
quantised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from flcore.aggregation.mean import average_weights
from flcore.core.params import param
from flcore.io.messages import Count, Payload, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.compression import quantised_all, restored_all
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg, sample_counts

QUANTIZED_CHANGE = Key("change", TensorDict)
"""A client's quantised difference, see :func:`flcore.math.compression.quantised_all`."""

MODEL_STATISTICS = Key("model_statistics", Weights)
"""BatchNorm statistics, not quantised."""

CHANGES = Key("changes", TensorDict)
"""Quantised differences of v, ``<round>/<name>/…``, of rounds with fewer bytes than v in all."""

LAST_SEEN = Key("seen", TensorDict)
"""At the server: ``rounds`` int64 [K], the round of each client's v; 0: the initial model."""

ERROR = Key("error", Weights)
"""Accumulated error of quantisation."""


@dataclass(frozen=True)
class FedAvgQ(FedAvg, name="fedavg_q", citation="Alistarh et al., NeurIPS 2017; Karimireddy et al., ICML 2019"):
    """FedAvg with quantised differences and error feedback in both directions."""

    bits: Literal[2, 4, 8] = param(4, "bits of a value on its way up")
    down_bits: Literal[2, 4, 8] = param(8, "bits of a value on its way down")

    @property
    def can_be_base(self) -> bool:
        return False  # a wrapper would send the model whole

    @property
    def broadcasts_model(self) -> bool:
        return False

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        return {
            fl.MODEL: setting.initial,
            CHANGES: TensorDict({}),
            LAST_SEEN: TensorDict({"rounds": torch.zeros(setting.num_clients, dtype=torch.int64)}),
            ERROR: _zeros(setting.initial),
        }

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        """Send the differences that the client has missed, or v if it is smaller."""
        seen = int(server[LAST_SEEN]["rounds"][client])
        message: dict[str, Payload] = {}
        if ctx.rounds_done - seen < self._kept_rounds:
            message[CHANGES] = TensorDict(_after(server[CHANGES], seen))
        else:
            message[fl.MODEL] = server[fl.MODEL].without_buffers()
        if server[fl.MODEL].buffers:
            message[MODEL_STATISTICS] = Weights({}, server[fl.MODEL].buffers)
        return message

    @property
    def _kept_rounds(self) -> int:
        """Return the number of rounds of differences with as many bytes as the model."""
        return 32 // self.down_bits

    def initial_weights(self, ctx: fl.ClientContext) -> Weights:
        buffers = ctx.received[MODEL_STATISTICS].buffers if MODEL_STATISTICS in ctx.received else {}
        if fl.MODEL in ctx.received:
            return Weights(ctx.received[fl.MODEL].params, buffers)
        own = ctx.client_state.get(fl.MODEL, ctx.setting.initial)
        return Weights(_moved(own.params, ctx.received[CHANGES], self.down_bits), buffers)

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        start, before = self.initial_weights(ctx), ctx.client_state.get(ERROR, _zeros(ctx.setting.initial)).params
        wanted = {name: value - start.params[name] + before[name] for name, value in trained.weights.params.items()}
        sent = quantised_all(wanted, self.bits, ctx.stream("quantisation"))
        arrived = restored_all(sent, wanted, self.bits)
        error = Weights({name: value - arrived[name] for name, value in wanted.items()})
        message: dict[str, Payload] = {QUANTIZED_CHANGE: TensorDict(sent), fl.NUM_SAMPLES: Count(trained.num_samples)}
        if trained.weights.buffers:
            message[MODEL_STATISTICS] = Weights({}, trained.weights.buffers)
        return message, {fl.MODEL: start.without_buffers(), ERROR: error}

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"aggregate": self.aggregate}

    def aggregate(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Move v by the quantised mean of the uploads. Metric: the norm of the remaining error."""
        before, sizes = server[fl.MODEL], sample_counts(replies)
        arrived = {
            client: Weights(restored_all(sent.named, before.params, self.bits))
            for client, sent in replies.of(QUANTIZED_CHANGE).items()
        }
        mean = average_weights(arrived, sizes)
        wanted = {name: value + server[ERROR].params[name] for name, value in mean.params.items()}
        sent = quantised_all(wanted, self.down_bits, ctx.stream("quantisation"))
        moved = restored_all(sent, wanted, self.down_bits)
        error = {name: value - moved[name] for name, value in wanted.items()}
        buffers = replies.of(MODEL_STATISTICS)
        statistics = average_weights(buffers, sizes).buffers if buffers else before.buffers
        # Clients of this round have v as it was before the round.
        rounds = server[LAST_SEEN]["rounds"].clone()
        rounds[list(replies)] = ctx.round - 1
        changes = _after(server[CHANGES], ctx.round - self._kept_rounds)
        changes |= {f"{ctx.round:06d}/{name}": value for name, value in sent.items()}
        params = {name: value + moved[name] for name, value in before.params.items()}
        after: dict[str, Payload] = {
            fl.MODEL: Weights(params, statistics),
            CHANGES: TensorDict(changes),
            LAST_SEEN: TensorDict({"rounds": rounds}),
            ERROR: Weights(error),
        }
        norm = math.sqrt(float(torch.stack([value.square().sum() for value in error.values()]).sum()))
        return server | after, {"quantisation_error": norm}


def _zeros(model: Weights) -> Weights:
    return Weights({name: torch.zeros_like(value) for name, value in model.params.items()})


def _after(changes: TensorDict, seen: int) -> dict[str, torch.Tensor]:
    """Return the differences of the rounds after ``seen``."""
    return {name: value for name, value in changes.named.items() if int(name.split("/", 1)[0]) > seen}


def _moved(params: Mapping[str, torch.Tensor], changes: TensorDict, bits: int) -> dict[str, torch.Tensor]:
    """Add the differences of several rounds to weights, in order of the rounds."""
    moved = dict(params)
    for number in sorted({name.split("/", 1)[0] for name in changes.named}):
        own = {name.split("/", 1)[1]: value for name, value in changes.named.items() if name.startswith(f"{number}/")}
        step = restored_all(own, moved, bits)
        moved = {name: value + step[name] for name, value in moved.items()}
    return moved
