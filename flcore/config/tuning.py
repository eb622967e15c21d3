"""The section ``tune`` of a parameter file: how hyper-parameters are searched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flcore.core.params import param


@dataclass(frozen=True)
class TuneConfig:
    """Search of hyper-parameters."""

    sampler: Literal["tpe", "gp", "nsgaii", "random"] = param(
        "tpe", "sampler of Optuna: tpe, gp (Gaussian process), nsgaii (genetic) or random"
    )
    pruner: Literal["median", "successive_halving", "none"] = param(
        "median", "pruner of Optuna, which stops poor trials of one objective early"
    )
    startup: int = param(4, "results that are known before the sampler begins; trials are random until then", low=1)
    parallel: int = param(
        2,
        "trials that run at the same time, at most; each is sampled without the results of those still running",
        low=1,
    )
