"""FedAvg (McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017): weighted averaging of trained weights.

Client: minimise CE(w; D_k) from w_g.    Server: w_g ← Σ_{k∈S} (n_k / N) w_k, N over the *sampled* clients (Algorithm
1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flcore.messages import Count, Weights
from flcore.methods.base import Method, Setting, Stage, TrainedClient, Turn
from flcore.models.averaging import average_weights
from flcore.records import Record, payload_of


@dataclass(frozen=True)
class FedAvg(Method):
    """Weights down, weights and sample count up, weighted average on the server."""

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "weighted averaging of locally trained weights"
    citation: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def start_server(self, setting: Setting) -> Record:
        """The initial model."""
        return {"model": setting.initial}

    def broadcast(self, server: Record, client: int, setting: Setting) -> Record:
        """The global model."""
        return {"model": server["model"]}

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The trained weights with n_k; nothing is remembered."""
        return {"model": trained.weights, "num_samples": Count(trained.num_samples)}, {}

    def stages(self) -> Mapping[str, Stage]:
        """One stage: aggregate."""
        return {"aggregate": aggregate}


def aggregate(server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
    """w_g ← Σ_{k∈S} (n_k / N) w_k."""
    models = {client: payload_of(Weights, message, "model") for client, message in replies.items()}
    sizes = {client: payload_of(Count, message, "num_samples").value for client, message in replies.items()}
    return {**server, "model": average_weights(models, sizes)}
