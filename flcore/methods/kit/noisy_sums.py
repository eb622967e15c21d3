"""Sums over a client's images as messages: their precision, and Gaussian noise with its account."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.params import param
from flcore.math.prototypes.gaussians import from_upper_triangles
from flcore.math.prototypes.release import privacy_spent
from flcore.methods import types as fl
from flcore.methods.api import Method

_SECURE = "secure aggregation: no single message is visible, and every client of a cohort answers"


@dataclass(frozen=True)
class NoisySums(Method):
    """Send sums over images, with noise if asked for.

    Attributes:
        first_messages: messages before those of :meth:`account`'s caller. first_covers: what they are.
    """

    trains_locally: ClassVar[bool] = False
    first_messages: ClassVar[int] = 0
    first_covers: ClassVar[str] = ""

    wire: Literal["float64", "float32", "float16", "int8"] = param(
        "float16", "precision in which second moments travel; int8: of their Cholesky factor"
    )
    clip: float = param(30.0, "largest norm of a feature, where noise is added", above=0)
    noise_multiplier: float = param(0.0, "Gaussian noise on every message, in units of its sensitivity; 0: none", low=0)
    noise_of: Literal["message", "sum"] = param(
        "message",
        "the noise is on every message, or on a cohort's sum, which needs secure aggregation (simulated here)",
    )
    delta: float = param(1e-5, "δ of the account of noise", above=0, below=1)

    def first_legs(self) -> tuple[fl.Exchange, ...]:
        """Return the exchanges that make the features; none if clients have them."""
        return ()

    def _noise(
        self, ctx: fl.ClientContext, purpose: str, shape: torch.Size | tuple[int, ...], moved: float
    ) -> Tensor | float:
        """Return Gaussian noise for a sum that one image changes by at most ``moved``; 0 without noise.

        With ``noise_of: sum`` each of the m sampled clients adds 1/m of the variance, so that the sum has all of it.
        """
        if not self.noise_multiplier:
            return 0.0
        # The key has the exchange's name, also in the first exchange of a round.
        stream = ctx.stream(purpose if ctx.is_later_leg else f"{purpose}, {ctx.exchange}")
        drawn = torch.randn(shape, generator=stream, dtype=torch.float64)
        share = 1.0 if self.noise_of == "message" else 1 / math.sqrt(ctx.setting.cohort_size)
        return drawn * self.noise_multiplier * moved * share

    def _symmetric(self, ctx: fl.ClientContext, purpose: str, dim: int, moved: float) -> Tensor | float:
        drawn = self._noise(ctx, purpose, (dim * (dim + 1) // 2,), moved)
        return from_upper_triangles(drawn) if isinstance(drawn, Tensor) else drawn

    def _sent(self, values: Tensor) -> Tensor:
        return values if self.wire == "float64" else values.float()

    def account(self, later: int, covers: str) -> Mapping[str, Any] | None:
        """Return the account of all noisy messages: the first ones, and ``later`` more."""
        if not self.noise_multiplier:
            return None
        messages = self.first_messages + later
        return {
            "epsilon": privacy_spent(self.noise_multiplier, messages, self.delta),
            "delta": self.delta,
            "unit": "sample",
            "covers": f"{self.first_covers}{covers}; not class counts",
            "releases": messages,
            **({} if self.noise_of == "message" else {"assumes": _SECURE}),
        }
