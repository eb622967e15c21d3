"""Centralised training on the union of all clients' data: the upper reference of a comparison.

FedAvg with one client that holds all data at the server. A round is ``local.epochs`` passes over the union, so it costs
as many gradient steps as a full round of all clients; with ``local.steps`` it is that many steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from flcore.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Central(FedAvg, name="central", citation="reference without federation", trains="all", data_scope="union"):
    """One model trained on the union of all clients' data; upper reference."""

    @property
    def can_be_base(self) -> bool:
        return False  # no clients to ask for statistics
