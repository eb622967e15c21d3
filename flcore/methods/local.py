"""Local-only training: the lower reference that frames every personalised comparison (baselines.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass

from flcore.io.records import Payloads
from flcore.methods import types as fl
from flcore.methods.api import Method


@dataclass(frozen=True)
class Local(Method, name="local", citation="reference without communication", trains="all", has_global_model=False):
    """Every client trains alone; lower reference for personalised methods."""

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        return {}, {fl.MODEL: trained.weights}
