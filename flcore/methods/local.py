"""Local-only training: the lower reference that frames every personalised comparison (baselines.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass

from flcore.io.records import Payloads
from flcore.methods.api import Method
from flcore.methods.types import MODEL, ClientContext, TrainedClient


@dataclass(frozen=True)
class Local(Method, name="local", citation="reference without communication"):
    """Every client trains alone; lower reference for personalised methods."""

    trains = "all"
    has_global_model = False

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        return {}, {MODEL: trained.weights}
