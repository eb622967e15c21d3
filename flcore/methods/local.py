"""Local-only training: the lower reference that frames every personalised comparison (baselines.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flcore.io.records import Payloads
from flcore.methods.api import Method
from flcore.methods.types import MODEL, ClientContext, TrainedClient


@dataclass(frozen=True)
class Local(Method):
    """All clients train alone in every round, from the same initial weights; nothing is sent."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "every client trains alone; lower reference for personalised methods"
    citation: ClassVar[str] = "reference without communication"
    trains: ClassVar[Literal["cohort", "all"]] = "all"
    has_global_model: ClassVar[bool] = False

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        return {}, {MODEL: trained.weights}
