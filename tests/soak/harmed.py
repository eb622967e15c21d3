"""A plug-in: FedAvg whose clients can be made to answer what no client should, from outside and for a round alone.

The environment variable SOAK_HARM, ``kind,round,client,file``, says how; it is no part of a run, which goes on without
it. The file is made when it has happened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from flcore.io.messages import Weights
from flcore.io.records import Payloads
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import MODEL, ClientContext, TrainedClient

_HUGE = 16 * 1024 * 1024
"""Values of 4 bytes: 64 MiB, some 600 times what the model has."""


def _first(weights: Weights, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    name = next(iter(weights.params))
    return Weights({**weights.params, name: change(weights.params[name])}, weights.buffers)


HARMS: Mapping[str, Callable[[Weights], Weights]] = {
    "nan": lambda weights: _first(weights, lambda values: values * torch.nan),
    # Of one value, which would be added to every one of a mean without a word.
    "wrong-shape": lambda weights: _first(weights, lambda values: values.flatten()[:1]),
    "too-few": lambda weights: Weights(dict(list(weights.params.items())[1:]), weights.buffers),
    "too-many": lambda weights: Weights({**weights.params, "more": torch.zeros(3)}, weights.buffers),
    "huge": lambda weights: _first(weights, lambda values: torch.zeros(_HUGE)),
}


@dataclass(frozen=True)
class Harmed(FedAvg):
    """FedAvg, and what SOAK_HARM says."""

    name: ClassVar[str] = "harmed"
    summary: ClassVar[str] = "FedAvg whose clients can be made to answer nonsense"
    citation: ClassVar[str] = "nobody"

    def reply(self, turn: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The trained weights; where it is told to, others."""
        message, kept = super().reply(turn, trained)
        kind, number, client, file = (os.environ.get("SOAK_HARM") or ",0,0,").split(",")
        weights = message[MODEL]
        if (turn.round, turn.client) != (int(number), int(client)) or not isinstance(weights, Weights):
            return message, kept
        Path(file).touch()
        return {**message, MODEL: HARMS[kind](weights)}, kept
