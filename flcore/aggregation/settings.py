"""The section ``aggregation`` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flcore.core.params import param


@dataclass(frozen=True)
class Aggregation:
    """How the server folds what clients send, for weights and class prototypes; at its defaults as the method says."""

    rule: Literal["mean", "median", "trimmed_mean"] = param(
        "mean",
        "per coordinate, of weights and of each class's prototypes: the method's own mean, or, every client weighing "
        "the same, the median, or the mean without the largest and smallest",
    )
    trim: float = param(
        0.1,
        "trimmed_mean: share of the clients left out at either end, rounded up: at least one",
        above=0,
        below=0.5,
    )
    clip: float | Literal["median"] | None = param(
        None, "largest norm of a client's update of the weights; median: that of the round's norms; null: any", above=0
    )
    prototype_clip: float | Literal["median"] | None = param(
        None, "largest norm of a prototype; median: that of the norms sent for the class; null: any", above=0
    )
    noise: float = param(
        0.0,
        "z: Gaussian noise of z · clip on the sum of clipped updates, every client weighing the same; metrics.json "
        "then has the client-level (ε, δ) of the global model",
        low=0,
    )
    delta: float = param(1e-5, "δ of that account; less than one over the number of clients", above=0, below=1)

    def __post_init__(self) -> None:
        """Refuse noise whose size would say nothing about what it hides."""
        if self.noise > 0 and not isinstance(self.clip, float):
            raise ValueError(
                "noise needs clip, a number: the norm that the noise is measured against (a median depends on the data)"
            )
        if self.noise > 0 and self.rule != "mean":
            raise ValueError(f"noise is measured against a sum, and rule = {self.rule} is none; set rule = mean")

    @property
    def leaves_weights(self) -> bool:
        """Whether weights are folded as the method says."""
        return self.rule == "mean" and self.clip is None and self.noise == 0

    @property
    def leaves_prototypes(self) -> bool:
        """Whether prototypes are folded as the method says."""
        return self.rule == "mean" and self.prototype_clip is None
