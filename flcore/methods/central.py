"""Centralised training on the union of all clients' data: the upper reference of a comparison.

FedAvg with one client that holds all data at the server. A round is ``local.epochs`` passes over the union, so it costs
as many gradient steps as a full round of all clients; with ``local.steps`` it is that many steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flcore.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Central(FedAvg):
    """One trainer, all data, no communication."""

    name: ClassVar[str] = "central"
    summary: ClassVar[str] = "one model trained on the union of all clients' data; upper reference"
    citation: ClassVar[str] = "reference without federation"
    trains: ClassVar[Literal["cohort", "all"]] = "all"
    data_scope: ClassVar[Literal["client", "union"]] = "union"

    @property
    def can_be_base(self) -> bool:
        return False  # no clients to ask for statistics
