"""FedDecorr (Shi, Liang, Zhang, Xue, Bai, Tan, ICLR 2023): FedAvg against the collapse of features to few dimensions.

Client: CE + β·L_dec with Z [B, d] the features of a mini-batch, standardised per dimension over it:

    paper: L_dec = ‖corr(Z)‖²_F / d²;    code: L_dec = mean over i ≠ j of (ZᵀZ)²_ij, divided by B.

The two differ by about (B − 1)²/B, 62 at B = 64: β = 0.1 of the code is β = 6.2 of the formula. The published β belongs
to the code's form, the default. Server: FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flcore.core.params import Search, param
from flcore.math.losses.basic import correlation_penalty, cross_entropy
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedDecorr(FedAvg, name="feddecorr", citation="Shi et al., ICLR 2023", reduces_to_fedavg={"beta": 0.0}):
    """FedAvg with a penalty on correlated feature dimensions, against dimensional collapse."""

    beta: float = param(0.1, "weight β of the penalty", low=0, search=Search(choices=(0.01, 0.05, 0.1, 0.2)))
    scaling: Literal["code", "paper"] = param("code", "the penalty as published code or paper has it; β depends on it")

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        features = model.features(batch.images)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if self.beta > 0:
            penalty = correlation_penalty(features, scaling=self.scaling, weight=batch.weight)
            terms["decorrelation"] = self.beta * penalty
        return terms
