"""FedAvg with quantised differences and error feedback, both ways: what cheap FedAvg gives at the same bytes.

Client: from the model v that it received, FedAvg's training to w_k; sends Q(w_k − v + e_k) and keeps the error
e_k ← w_k − v + e_k − Q(…) (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019).
Server: w ← v + Σ (n_k/N) Q_k; then the public model moves by what travels, v ← v + Q(w + e − v) with the error kept at
the server (double compression: Tang et al., DoubleSqueeze, ICML 2019). Everybody who has seen all of these differences
has v to the bit.

Q: per tensor 2^bits − 1 even values between ∓ its largest size, rounded at random without bias (QSGD). A client that
was not sampled for j rounds receives the j differences that it missed, or the whole of v where that is less. BatchNorm
statistics travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from flcore.aggregation.mean import average_weights
from flcore.core.params import param
from flcore.io.messages import Arrays, Count, Payload, Weights
from flcore.io.records import Payloads, Record, Slot
from flcore.math.compression import quantised_all, restored_all
from flcore.methods.fedavg import FedAvg, sample_counts
from flcore.methods.types import (
    MODEL,
    NUM_SAMPLES,
    Exchange,
    Facts,
    Replies,
    Setting,
    Stage,
    TrainedClient,
    Turn,
)

CHANGE = Slot("change", Arrays)
"""A client's quantised difference, see :func:`flcore.math.compression.quantised_all`."""

STATISTICS = Slot("model_statistics", Weights)
"""BatchNorm statistics beside quantised parameters, as they are."""

CHANGES = Slot("changes", Arrays)
"""Quantised differences of v, ``<round>/<name>/…``, of as many rounds as are less than v itself."""

SEEN = Slot("seen", Arrays)
"""At the server: ``rounds`` int64 [K], of which round the v is that each client has; 0: the initial model."""

ERROR = Slot("error", Weights)
"""What quantisation left out so far."""


@dataclass(frozen=True)
class FedAvgQ(FedAvg):
    """FedAvg in a few bits per weight."""

    name: ClassVar[str] = "fedavg_q"
    summary: ClassVar[str] = "FedAvg with quantised differences and error feedback in both directions"
    citation: ClassVar[str] = "Alistarh et al., NeurIPS 2017; Karimireddy et al., ICML 2019"

    bits: Literal[2, 4, 8] = param(4, "bits of a value on its way up")
    down_bits: Literal[2, 4, 8] = param(8, "bits of a value on its way down")

    @property
    def can_be_calibrated(self) -> bool:
        """No: what stands on top would send the model as it is."""
        return False

    @property
    def broadcasts_model(self) -> bool:
        """Its differences; whole only to clients that missed many of them."""
        return False

    def start_server(self, setting: Setting) -> Payloads:
        """The initial model, which everybody knows."""
        return {
            MODEL: setting.initial,
            CHANGES: Arrays({}),
            SEEN: Arrays({"rounds": torch.zeros(setting.num_clients, dtype=torch.int64)}),
            ERROR: _zeros(setting.initial),
        }

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The differences that the client has missed, or v where it is smaller; nothing that it has."""
        seen = int(server[SEEN]["rounds"][client])
        message: dict[str, Payload] = {}
        if exchange.passed - seen < self._kept_rounds:
            message[CHANGES] = Arrays(_behind(server[CHANGES], seen))
        else:
            message[MODEL] = server[MODEL].without_buffers()
        if server[MODEL].buffers:
            message[STATISTICS] = Weights({}, server[MODEL].buffers)
        return message

    @property
    def _kept_rounds(self) -> int:
        """Differences of so many rounds are as large as the model."""
        return 32 // self.down_bits

    def begin(self, turn: Turn) -> Weights:
        """v: as received, or what the client had with the differences that it missed."""
        buffers = turn.inbox[STATISTICS].buffers if STATISTICS in turn.inbox else {}
        if MODEL in turn.inbox:
            return Weights(turn.inbox[MODEL].params, buffers)
        own = turn.memory.get(MODEL, turn.setting.initial)
        return Weights(_moved(own.params, turn.inbox[CHANGES], self.down_bits), buffers)

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The quantised difference with n_k; v and the error are remembered."""
        start, error = self.begin(turn), turn.memory.get(ERROR, _zeros(turn.setting.initial))
        wanted = {
            name: value - start.params[name] + error.params[name] for name, value in trained.weights.params.items()
        }
        sent = quantised_all(wanted, self.bits, turn.stream("quantisation"))
        arrived = restored_all(sent, wanted, self.bits)
        left = Weights({name: value - arrived[name] for name, value in wanted.items()})
        message: dict[str, Payload] = {CHANGE: Arrays(sent), NUM_SAMPLES: Count(trained.num_samples)}
        if trained.weights.buffers:
            message[STATISTICS] = Weights({}, trained.weights.buffers)
        return message, {MODEL: start.without_buffers(), ERROR: left}

    def stages(self) -> Mapping[str, Stage]:
        return {"aggregate": self.aggregate}

    def aggregate(self, server: Record, replies: Replies, exchange: Exchange) -> tuple[Record, Facts]:
        """Server stage: v moves by the quantised mean of what arrived. Fact: the norm of the error that is left."""
        before, sizes = server[MODEL], sample_counts(replies)
        arrived = {
            client: Weights(restored_all(sent.named, before.params, self.bits))
            for client, sent in replies.of(CHANGE).items()
        }
        mean = average_weights(arrived, sizes)
        wanted = {name: value + server[ERROR].params[name] for name, value in mean.params.items()}
        sent = quantised_all(wanted, self.down_bits, exchange.stream("quantisation"))
        moved = restored_all(sent, wanted, self.down_bits)
        left = {name: value - moved[name] for name, value in wanted.items()}
        buffers = replies.of(STATISTICS)
        statistics = average_weights(buffers, sizes).buffers if buffers else before.buffers
        # Whoever took part has had v as it was before this round.
        rounds = server[SEEN]["rounds"].clone()
        rounds[list(replies)] = exchange.round - 1
        changes = _behind(server[CHANGES], exchange.round - self._kept_rounds)
        changes |= {f"{exchange.round:06d}/{name}": value for name, value in sent.items()}
        params = {name: value + moved[name] for name, value in before.params.items()}
        after: dict[str, Payload] = {
            MODEL: Weights(params, statistics),
            CHANGES: Arrays(changes),
            SEEN: Arrays({"rounds": rounds}),
            ERROR: Weights(left),
        }
        norm = float(torch.stack([value.square().sum() for value in left.values()]).sum().sqrt())
        return server | after, {"quantisation_error": norm}


def _zeros(model: Weights) -> Weights:
    return Weights({name: torch.zeros_like(value) for name, value in model.params.items()})


def _behind(changes: Arrays, seen: int) -> dict[str, torch.Tensor]:
    """Differences of the rounds after ``seen``."""
    return {name: value for name, value in changes.named.items() if int(name.split("/", 1)[0]) > seen}


def _moved(params: Mapping[str, torch.Tensor], changes: Arrays, bits: int) -> dict[str, torch.Tensor]:
    """Weights with the differences of several rounds, in order of the rounds."""
    found = dict(params)
    for number in sorted({name.split("/", 1)[0] for name in changes.named}):
        own = {name.split("/", 1)[1]: value for name, value in changes.named.items() if name.startswith(f"{number}/")}
        step = restored_all(own, found, bits)
        found = {name: value + step[name] for name, value in found.items()}
    return found
