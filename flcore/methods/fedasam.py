"""FedASAM (Caldarola, Caputo, Ciccone, ECCV 2022): FedAvg with steps towards flat minima, and a mean over rounds.

Client, per mini-batch: with g the gradient at w, and T_w = |w| + η element by element for tensors with "weight" in
their name, 1 for the others,

    ε = ρ·T_w²·g / ‖T_w·g‖, one norm over all tensors;    w ← w − lr·∇L(w + ε).

``adaptive`` off is FedSAM, T_w = 1 everywhere. Server: FedAvg; with ``swa``, from round 0.75·R on, every ``swa_every``
rounds, a running mean of the global models, which answers while the model itself is sent.

The first gradient leaves no trace: BatchNorm's running statistics are of the second pass alone (the authors' code
moves them twice), weight decay and clipping act on the second gradient, and w is kept rather than restored by
subtracting ε. The mean over rounds includes BatchNorm's statistics, and begins with its first round's model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flcore.aggregation.mean import average_weights
from flcore.core.params import Search, param
from flcore.core.portable import square_root
from flcore.io.messages import Count, Weights
from flcore.io.records import Key, Record
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg

AVERAGE = Key("average", Weights)
"""The mean of the global models of some rounds, at the server once there is one."""

AVERAGED = Key("averaged_rounds", Count)
"""Number of rounds in :data:`AVERAGE`."""

_NO_DIRECTION = 1e-16
"""Added to the norm: a gradient of 0 leaves the weights where they are."""


@dataclass(frozen=True)
class FedASAM(FedAvg, name="fedasam", citation="Caldarola et al., ECCV 2022", reduces_to_fedavg={"rho": 0.0}):
    """FedAvg with sharpness-aware steps, adaptive to the size of weights; optionally a mean of rounds."""

    rho: float = param(
        0.1, "ρ, distance of the gradient's point; 0: FedAvg", low=0, search=Search(choices=(0.05, 0.1, 0.2, 0.5, 0.7))
    )
    eta: float = param(
        0.2,
        "η, added to the size of weights",
        low=0,
        search=Search(choices=(0.0, 0.01, 0.1, 0.2), when=lambda m: m.adaptive and m.rho > 0),
    )
    adaptive: bool = param(True, "distances in units of the weights' sizes (ASAM); off: SAM", switch=True)
    swa: bool = param(False, "answer with the mean of the global models of the last rounds", switch=True)
    swa_start: float = param(0.75, "share of the rounds, rounded up, after which that mean begins", low=0, below=1)
    swa_every: int = param(1, "rounds from one model of the mean to the next", low=1)

    def phases(self) -> tuple[fl.Phase, ...]:
        return (fl.Phase(updates=(fl.StepSpec(perturb=self.uphill),)),) if self.rho > 0 else super().phases()

    def uphill(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return w + ε."""
        sizes = {name: self.sizes(name, value) for name, value in weights.items()}
        squares = torch.stack([(sizes[name] * grad).square().sum() for name, grad in grads.items()])
        factor = self.rho / (square_root(squares.sum()) + _NO_DIRECTION)
        return {name: value + factor * sizes[name].square() * grads[name] for name, value in weights.items()}

    def sizes(self, name: str, value: Tensor) -> Tensor:
        """Return T_w of one tensor."""
        return value.abs() + self.eta if self.adaptive and "weight" in name else torch.ones_like(value)

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {**super().server_steps(), "average-rounds": self.average_rounds} if self.swa else super().server_steps()

    def average_rounds(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Set w_swa to (n·w_swa + w_g)/(n + 1) in the rounds that count."""
        late = ctx.round - max(1, math.ceil(self.swa_start * ctx.setting.rounds))
        if late < 0 or late % self.swa_every != 0:
            return server, {}
        if AVERAGE not in server:
            return server | {AVERAGE: server[fl.MODEL], AVERAGED: Count(1)}, {}
        count = server[AVERAGED].value
        mean = average_weights({0: server[AVERAGE], 1: server[fl.MODEL]}, {0: count, 1: 1})
        return server | {AVERAGE: mean, AVERAGED: Count(count + 1)}, {}

    def global_model(self, server: Record) -> Weights | None:
        return server.get(AVERAGE, server[fl.MODEL])
