"""The section ``aggregation`` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flcore.core.params import param


@dataclass(frozen=True)
class Aggregation:
    """The server's fold of weights and class prototypes; by default the method's own."""

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
        None, "largest norm of a client's update of the weights; median: the round's median norm; null: any", above=0
    )
    prototype_clip: float | Literal["median"] | None = param(
        None, "largest norm of a prototype; median: the class's median norm; null: any", above=0
    )
    noise: float = param(
        0.0,
        "z: Gaussian noise of z · clip on the sum of clipped updates, every client weighing the same; metrics.json "
        "then has the client-level (ε, δ) of the global model",
        low=0,
    )
    delta: float = param(1e-5, "δ of that account; less than one over the number of clients", above=0, below=1)
    optimizer: Literal["none", "momentum", "adam", "yogi", "adagrad"] = param(
        "none",
        "step of the server towards the folded weights, after clipping, rule and noise: all the way (none), or an "
        "optimiser's, for which model before minus fold is the gradient",
    )
    server_lr: float | None = param(
        None,
        "η, learning rate of that optimiser; null: 1 with momentum, 0.1 with adam and adagrad, 0.01 with yogi",
        above=0,
    )
    momentum: float | None = param(
        None, "β of momentum, β1 of adam, yogi and adagrad; null: 0.9, and 0 with adagrad", low=0, below=1
    )
    beta2: float = param(0.99, "adam, yogi: how much of the mean squared update a round keeps", low=0, below=1)
    tau: float = param(
        1e-3, "τ of adam, yogi, adagrad: added to the root of the mean squared update; larger adapts less", above=0
    )

    def __post_init__(self) -> None:
        """Refuse noise without a bound to measure it against."""
        if self.noise > 0 and not isinstance(self.clip, float):
            raise ValueError(
                "noise needs clip, a number: the norm that the noise is measured against (a median depends on the data)"
            )
        if self.noise > 0 and self.rule != "mean":
            raise ValueError(f"noise is measured against a sum, and rule = {self.rule} is none; set rule = mean")

    @property
    def leaves_weights(self) -> bool:
        """True if weights are folded by the method's own mean."""
        return self.rule == "mean" and self.clip is None and self.noise == 0

    @property
    def learning_rate(self) -> float:
        """η of the server's optimiser."""
        if self.server_lr is not None:
            return self.server_lr
        return {"momentum": 1.0, "yogi": 0.01}.get(self.optimizer, 0.1)

    @property
    def first_decay(self) -> float:
        """β1 of the server's optimiser, the share of the mean update that a round keeps."""
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.optimizer == "adagrad" else 0.9

    @property
    def leaves_prototypes(self) -> bool:
        """True if prototypes are folded by the method's own mean."""
        return self.rule == "mean" and self.prototype_clip is None
