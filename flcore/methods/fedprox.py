"""FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020): FedAvg with a proximal term.

Client: CE + (μ/2)·||w − w_g||² (Eq. 2), the squared norm summed over all trainable parameters, w_g the received
weights. BatchNorm statistics are not part of the norm, and the term is not divided by the batch size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flcore.core.params import Search, param
from flcore.math.losses.basic import proximal
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg, name="fedprox", citation="Li et al., MLSys 2020", reduces_to_fedavg={"mu": 0.0}):
    """FedAvg with a proximal term that keeps clients near the global weights."""

    mu: float = param(0.01, "weight μ of the proximal term", low=0, search=Search(1e-3, 1.0, log=True))

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        return {"anchor": ctx.received[fl.MODEL].params}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        terms = super().loss(model, batch, inputs)
        if self.mu > 0:
            terms["proximal"] = proximal(model.params, inputs["anchor"], self.mu)
        return terms
